"""A model of one width inside the architecture of a greater one, its function unchanged.

Two specs of one architecture name the same spaces, in different sizes, and every weight is laid out by them alike. A
space of hidden units or heads gets units that nothing writes and nothing reads. A stream that is normalised gets zeros
too, and is stretched: with x' = c x, c² = n'/n, its mean square over all n' entries is that of x over n, so that the
norm divides by the same number, eps and all; what reads it is shrunk by c. Where the norm subtracts the mean, the
direction of ones goes to the direction of ones, and the entries keep their mean of zero. The map of a stream is thus
c times one with orthonormal columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_align.checkpoints.ondemand import OnDemand
from hf_align.errors import IncompatibleModels
from hf_align.symmetry.elements import DUAL, PRIMAL, Power
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.groups import GeneralLinear, Orthogonal, OrthogonalFixingOnes, RotaryCommutant, SignedPermutation
from hf_align.symmetry.spec import Factor, SymmetrySpec

STRETCHES = (1, 0, -1)
"""Powers of c: of a stream whose mean square is taken, of one whose sum is, of one that is named by its readers."""


class WidenedWeights(OnDemand):
    """Canonical weights of a narrow model in the sizes of a wide spec, tensor by tensor as they are asked for.

    Args:
        raw: weights by name in memory.
        stretch: the power of c by which normalised streams grow.
    """

    def __init__(
        self, raw: Mapping[str, Tensor], narrow: SymmetrySpec, wide: SymmetrySpec, stretch: int = STRETCHES[0]
    ) -> None:
        require_widenable(narrow, wide)
        super().__init__(narrow.parameters)
        self._canonical = CanonicalWeights(raw, narrow.gauges)
        self._narrow = narrow
        self._wide = wide
        self._stretch = stretch

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._canonical[name]
        if tensor.shape == torch.Size(self._wide.shape(name)):
            return tensor
        offset = self._narrow.gains.get(name, 0.0)
        wide = torch.zeros(self._wide.shape(name), dtype=torch.float64)
        for old, new in zip(self._narrow.blocks(name), self._wide.blocks(name), strict=True):
            view = old.factored(tensor.double() + offset)
            for axis, (before, after) in enumerate(zip(old.factors, new.factors, strict=True)):
                if before.size != after.size:
                    view = self._longer(name, view.movedim(axis, -1), before, after.size).movedim(-1, axis)
            new.factored(wide).copy_(view)
        return (wide - offset).to(tensor.dtype)

    def _longer(self, name: str, view: Tensor, factor: Factor, size: int) -> Tensor:
        if factor.space is None:
            if not torch.equal(view, view[..., :1].expand_as(view)):
                raise IncompatibleModels(f"{name} has entries along an axis that nothing moves: it cannot be widened")
            return view[..., :1].expand(*view.shape[:-1], size)
        group = self._narrow.spaces[factor.space].group
        if not isinstance(group, Orthogonal | SignedPermutation) or isinstance(group, GeneralLinear):
            return _padded(view, size)
        c = math.sqrt(size / factor.size) ** (self._stretch * _sign(factor.power))
        return _keeping_ones(view, size, c) if isinstance(group, OrthogonalFixingOnes) else c * _padded(view, size)


def is_wider(wide: SymmetrySpec, narrow: SymmetrySpec) -> bool:
    """Whether no parameter of a spec is smaller along any axis than that of the other."""
    return all(w >= n for p in narrow.parameters if p in wide.parameters
               for w, n in zip(wide.shape(p), narrow.shape(p), strict=False))  # fmt: skip


def require_widenable(narrow: SymmetrySpec, wide: SymmetrySpec) -> None:
    """Whether a model fits into the sizes of another, by their specs alone.

    Raises:
        IncompatibleModels: different parameters, or a space that has no room to grow; by name.
    """
    if set(narrow.parameters) != set(wide.parameters):
        other = sorted(set(narrow.parameters) ^ set(wide.parameters))
        raise IncompatibleModels(f"only one of the models has {other[0]}: they differ in more than sizes")
    for name, axes in narrow.parameters.items():
        pairs = zip(_factors(axes), _factors(wide.parameters[name]), strict=False)
        if _layout(axes) != _layout(wide.parameters[name]):
            raise IncompatibleModels(f"{name} is laid out differently in the two models; they do not merge")
        for before, after in pairs:
            if before.size != after.size and before.space is None and name not in narrow.gains:
                raise IncompatibleModels(
                    f"{name} has {_sizes(before.size, after.size)} along an axis that nothing moves"
                    f"{_why_pinned(narrow, before)}; it cannot be widened"
                )
    for name, space in narrow.spaces.items():
        size = wide.spaces[name].size
        if space.size > size:
            raise IncompatibleModels(f"{name} has {_sizes(space.size, size)}, which is wider elsewhere")
        if space.size != size and isinstance(space.group, RotaryCommutant):
            raise IncompatibleModels(
                f"{name} has {_sizes(space.size, size)}: another size of head has other rotary frequencies, so it "
                "cannot be widened"
            )


def _sizes(narrow: int, wide: int) -> str:
    return f"{narrow} entries in the narrower model and {wide} in the wider one"


def _why_pinned(spec: SymmetrySpec, factor: Factor) -> str:
    pinned = spec.pinned.get(factor.pin) if factor.pin is not None else None
    if pinned is None or not pinned.reasons:
        return ""
    why = pinned.reasons[0]
    return f" ({why.role} in {why.module or 'the model'})"


def grown(narrow: SymmetrySpec, wide: SymmetrySpec) -> dict[str, tuple[int, int]]:
    """The spaces that differ in size: name -> (narrow, wide)."""
    both = {n: (s.size, wide.spaces[n].size) for n, s in narrow.spaces.items()}
    return {n: sizes for n, sizes in both.items() if sizes[0] != sizes[1]}


def _factors(axes: tuple[tuple[tuple[Factor, ...], ...], ...]) -> list[Factor]:
    return [f for axis in axes for segment in axis for f in segment]


def _layout(axes: tuple[tuple[tuple[Factor, ...], ...], ...]) -> list[list[list[dict[str, Power]]]]:
    return [[[f.powers for f in segment] for segment in axis] for axis in axes]


def _sign(power: Power) -> int:
    return {PRIMAL: 1, DUAL: -1}.get(power, 0)


def _padded(view: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(view, (0, size - view.shape[-1]))


def _keeping_ones(view: Tensor, size: int, c: float) -> Tensor:
    """c times an isometry [size, n] that takes vectors of mean zero to such, and 1/√n to 1/√size without the c.

    A reflection in the hyperplane between the padded ones and the long ones.
    """
    narrow = view.shape[-1]
    short = _padded(torch.full((narrow,), narrow**-0.5, dtype=view.dtype), size)
    normal = short - size**-0.5
    normal = normal / normal.norm()
    mean = view.mean(-1, keepdim=True)
    long = c * _padded(view - mean, size) + mean * math.sqrt(narrow) * short
    return long - 2 * (long @ normal)[..., None] * normal
