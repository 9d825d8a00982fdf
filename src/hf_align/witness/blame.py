"""Where aligned B stops being B: the first module whose output is not what the spec makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from hf_align.symmetry.action import Elements, act
from hf_align.symmetry.spec import AxisActions, Factor, SymmetrySpec, size_of

_OUT = "what a module gives"


@contextmanager
def recorded(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """What every module with weights of its own gives when it first runs, by its path, in the order of running."""
    into: dict[str, Tensor] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                into.setdefault(path, output.detach().cpu())

        return hook

    own = [(path, m) for path, m in model.named_modules() if any(p is not None for p in m._parameters.values())]
    handles = [m.register_forward_hook(keep(path)) for path, m in own]
    try:
        yield into
    finally:
        for handle in handles:
            handle.remove()


def first_moved(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], spec: SymmetrySpec, elements: Elements, most: float
) -> str | None:
    """The first module whose output moves otherwise than the axis of its weight that writes it.

    Args:
        before, after: outputs by module, of canonical weights, and of the same moved by the elements.
        most: the largest change, over the largest entry, that is none.
    """
    for path, output in before.items():
        moved = after.get(path)
        if moved is None or moved.shape != output.shape:
            return path
        expected = [output, *_images(output, path, spec, elements)]
        if len(expected) > 1 and not any(_alike(moved, one, most) for one in expected[1:]):
            return path
    return None


def _images(output: Tensor, path: str, spec: SymmetrySpec, elements: Elements) -> Iterator[Tensor]:
    """What the output becomes if it moves like an axis of one of the module's weights."""
    prefix = f"{path}." if path else ""
    for name in (*spec.parameters, *spec.ties):
        if not name.startswith(prefix) or "." in name.removeprefix(prefix):
            continue
        axes = spec.parameters[spec.ties.get(name, name)]
        if len(axes) < 2:  # what scales an output does not write it
            continue
        for actions in axes:
            for axis in range(1, output.dim()):
                if output.shape[axis] == size_of(actions) and _stands_alone(actions, spec):
                    yield _moved(output.movedim(axis, -1), actions, spec, elements).movedim(-1, axis)


def _moved(output: Tensor, actions: AxisActions, spec: SymmetrySpec, elements: Elements) -> Tensor:
    rows = output.reshape(-1, output.shape[-1])
    pinned = ((Factor(len(rows)),),)
    alone = replace(spec, parameters={_OUT: (pinned, actions)}, gains={})
    return act(rows.contiguous(), _OUT, alone, elements).reshape(output.shape)


def _stands_alone(actions: AxisActions, spec: SymmetrySpec) -> bool:
    """Whether the axis carries, in each segment, the spaces over which the elements of its others differ."""
    return all(
        set(spec.spaces[space].index) <= {s for f in segment for s in f.powers}
        for segment in actions
        for factor in segment
        for space in factor.powers
    )


def _alike(one: Tensor, other: Tensor, most: float) -> bool:
    size = float(other.abs().max())
    return float((one - other).abs().max()) <= most * (size or 1.0)
