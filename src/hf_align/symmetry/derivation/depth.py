"""The symmetry spec of a deep model from two layers of each kind.

Layers repeat, and so does what is derived from them. The spec of a shortened model is extended by module path: what
lies in a layer is copied to every layer of its kind, what several layers share stays one. That this is right is
checked where it can be seen: the first layer of a kind must give the second one, names and gauges included, and the
extension must name every parameter of the full model with its shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import IncompatibleModels, first_line
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.derivation.unseen import unseen, without_unseen
from hf_align.symmetry.groups import Group
from hf_align.symmetry.spec import SpaceSpec, SymmetrySpec
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.given import GivenCall
from hf_align.tracing.join import join
from hf_align.tracing.layer_code import layers_that_differ
from hf_align.tracing.layers import Stack, find_stacks, shorten
from hf_align.tracing.mode import Mode
from hf_align.tracing.modes import find_modes, trace_mode, trace_modes
from hf_align.tracing.program import Inventory, Program

logger = logging.getLogger(__name__)
T = TypeVar("T")
Layer = tuple[Stack, int]


class IrregularLayersError(Exception):
    """What holds for one layer of a kind does not hold for the next; the message says where."""


def derive_by_depth(
    config: PretrainedConfig, calls: tuple[GivenCall, ...] = (), unused: tuple[str, ...] = ()
) -> SymmetrySpec:
    """The spec that `derive` gives of all modes of the full model, at the cost of two layers of each kind.

    Args:
        config: any config that `transformers` can build; not modified.
        calls: modes besides those that are found.
        unused: weights that no call reads on purpose, as for `without_unseen`.

    Raises:
        IncompatibleModels: the architecture cannot be traced.
        HfAlignError: one of `calls` fails, or there are no weights as `unused` says.
    """
    model = build_without_weights(config)
    spec = _short_as_it_may_be(model, unused, partial(_derived, config, model, calls))
    return without_unseen(replace(spec, given=calls), unused, model)


def _short_as_it_may_be(
    model: PreTrainedModel, unused: tuple[str, ...], derived: Callable[[tuple[Stack, ...]], SymmetrySpec]
) -> SymmetrySpec:
    """The spec with all stacks shortened, or with fewer of them where calls then read more.

    A call may ask for what a layer gives by the number of that layer, or do more behind a certain one, which a
    shortened stack does not have.

    Args:
        unused: as for `derive_by_depth`.
        derived: the spec with some stacks shortened.
    """
    stacks = find_stacks(model)
    try:
        short = derived(stacks)
    except (IncompatibleModels, IrregularLayersError) as reason:
        if not stacks:
            raise
        logger.warning("%s is traced in full: %s", model.config.model_type, reason)
        return derived(())
    others = _apart_from(stacks, unseen(short, unused, model))
    if others == stacks:
        return short
    try:
        longer = derived(others)
    except (IncompatibleModels, IrregularLayersError) as reason:
        logger.warning("%s: what a shortened model does not read stays unread: %s", model.config.model_type, reason)
        return short
    return longer if len(longer.unread) < len(short.unread) else short


def _apart_from(stacks: tuple[Stack, ...], weights: Sequence[str]) -> tuple[Stack, ...]:
    """The stacks that do not lie in a module with some of the weights."""
    homes = {stack: stack.path.rpartition(".")[0] for stack in stacks}
    return tuple(s for s in stacks if not homes[s] or not any(name.startswith(f"{homes[s]}.") for name in weights))


def _derived(
    config: PretrainedConfig, model: PreTrainedModel, calls: tuple[GivenCall, ...], stacks: tuple[Stack, ...]
) -> SymmetrySpec:
    """The spec of a model, some of whose stacks are shortened meanwhile."""
    if not stacks:
        return derive(trace_modes(model, calls))
    short = build_without_weights(config)
    shorten(short, stacks)
    modes = find_modes(short, calls, config=config)
    if model.config._attn_implementation != short.config._attn_implementation:
        model.set_attn_implementation(short.config._attn_implementation)
    for mode, program in _worth_checking(modes):
        try:
            full = trace_mode(model, mode)
        except Exception as error:  # whatever the modelling code raises
            raise IrregularLayersError(f"not all layers can be traced together ({first_line(error)})") from error
        others = layers_that_differ(full, program, stacks)
        if others:
            raise IrregularLayersError(f"{others[0]} runs other code than the layer that stands for it ({mode.name})")
    return extend(derive(join({mode.name: program for mode, program in modes})), stacks, inventory(model))


def _worth_checking(modes: list[tuple[Mode, Program]]) -> list[tuple[Mode, Program]]:
    """The first call, the longest one, the one in steps, and all that read weights which those before do not."""
    longest = max(modes, key=lambda found: found[0].extent[1])
    chosen, read = [], set[str]()
    for mode, program in modes:
        more = set(program.parameters.values()) - read
        if more or mode.goes_on or mode is longest[0]:
            chosen.append((mode, program))
            read |= more
    return chosen


def extend(short: SymmetrySpec, stacks: tuple[Stack, ...], whole: Inventory) -> SymmetrySpec:
    """The spec of the full model.

    Args:
        short: of the shortened model; its layers are numbered from zero.
        whole: what the full model saves.

    Raises:
        IrregularLayersError: the two layers of a kind differ by more than their number, or the extension does not
            name every parameter of the full model with its shape.
    """
    known = _renamed(short, _in_full(stacks))
    again = _Extension(known, {s.path: s.chosen for s in stacks}, stacks).spec(known.parameters)
    _require_same(known, again)
    spec = _Extension(known, {s.path: tuple(range(s.depth)) for s in stacks}, stacks).spec(whole.shapes)
    spec = replace(spec, ties=whole.ties, buffers=tuple(whole.buffers))
    for name, shape in whole.shapes.items():
        if spec.shape(name) != shape:
            raise IrregularLayersError(f"{name} is {list(shape)} but extends to {list(spec.shape(name))}")
    return spec


def _in_full(stacks: tuple[Stack, ...]) -> Callable[[str], str]:
    """From the number of a layer in the shortened model to that in the full one."""

    def rename(name: str) -> str:
        for stack in stacks:
            found = stack.layer(name)
            if found is not None:
                return _join(stack, stack.chosen[found[0]], found[1])
        return name

    return rename


def _require_same(known: SymmetrySpec, again: SymmetrySpec) -> None:
    for field in fields(known):
        found, copied = getattr(known, field.name), getattr(again, field.name)
        if not isinstance(found, Mapping):
            if found != copied:
                raise IrregularLayersError(f"the {field.name} of two layers of a kind differ")
            continue
        for name in dict.fromkeys([*found, *copied]):
            if name not in found or name not in copied or _facts(found[name]) != _facts(copied[name]):
                raise IrregularLayersError(f"{field.name}: {name} is not as in the first layer of its kind")


def _facts(entry: Any) -> Any:
    """What must agree; in what order a space was bounded is of no consequence."""
    return (replace(entry, reasons=()), frozenset(entry.reasons)) if isinstance(entry, SpaceSpec) else entry


class _Extension:
    """A spec copied from the first layer of each kind to its target layers."""

    def __init__(self, known: SymmetrySpec, targets: Mapping[str, tuple[int, ...]], stacks: tuple[Stack, ...]) -> None:
        self.known = known
        self.targets = targets
        self.stacks = stacks

    def spec(self, names: Iterable[str]) -> SymmetrySpec:
        """The extension, with parameters in the order of `names`."""
        rest = {f.name: self._field(getattr(self.known, f.name)) for f in fields(self.known)}
        return replace(self.known, **rest | {"parameters": {n: self._at(n, self.known.parameters) for n in names}})

    def _field(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return self._shared(value)
        return {name: self._at(name, value) for name in self._copies(value)}

    def _at(self, name: str, known: Mapping[str, Any]) -> Any:
        """The entry of a layer's name, from the layer that it repeats."""
        layer = self._locate(name)
        if layer is None:
            return self._shared(known[name])
        stack, target = layer
        source = stack.source[target]
        original = _move(stack, target, source)(name)
        if original not in known:
            raise IrregularLayersError(f"{name} has no counterpart in {stack.path}.{source}")
        return _renamed(known[original], _move(stack, source, target))

    def _copies(self, items: Iterable[T]) -> tuple[T, ...]:
        """A sequence in which every run over the layers of a stack is repeated for all of them."""
        done: list[T] = []
        run: list[tuple[Layer, T]] = []
        for item in items:
            layer = self._owner(item)
            if run and (layer is None or not _continues([at for at, _ in run], layer)):
                done += self._repeated(run)
                run = []
            if layer is None:
                done.append(self._shared(item))
            else:
                run.append((layer, item))
        return (*done, *self._repeated(run))

    def _repeated(self, run: list[tuple[Layer, T]]) -> Iterator[T]:
        if run:
            stack = run[0][0][0]
            targets = self.targets[stack.path]
            for target in reversed(targets) if run[0][0][1] > run[-1][0][1] else targets:
                first = stack.source[target]
                moved = _move_both(stack, first, targets, target)
                yield from (_renamed(item, moved) for layer, item in run if layer[1] == first)

    def _shared(self, value: Any) -> Any:
        """What belongs to no single layer: the sequences inside may still run over layers."""
        if isinstance(value, str):
            if self._locate(value) is not None:
                raise IrregularLayersError(f"{value} is tied to what lies outside of its layer")
            return value
        if isinstance(value, tuple):
            return self._copies(value)
        if is_dataclass(value) and not isinstance(value, (type, Group)):
            return replace(value, **{f.name: self._shared(getattr(value, f.name)) for f in fields(value)})
        return value

    def _owner(self, value: Any) -> Layer | None:
        """The only layer that a value names, or the second of two neighbours: a layer reads what the last one wrote."""
        layers = {(stack.path, i): (stack, i) for stack, i in self._mentioned(value)}
        if len({path for path, _ in layers}) != 1 or len(layers) > 2:
            return None
        places = sorted(stack.chosen.index(i) for stack, i in layers.values())
        stack = next(iter(layers.values()))[0]
        return (stack, stack.chosen[places[-1]]) if places[-1] - places[0] < 2 else None

    def _mentioned(self, value: Any) -> Iterator[Layer]:
        if isinstance(value, str):
            layer = self._locate(value)
            if layer is not None:
                yield layer
        elif isinstance(value, tuple):
            for item in value:
                yield from self._mentioned(item)
        elif is_dataclass(value) and not isinstance(value, (type, Group)):
            for f in fields(value):
                yield from self._mentioned(getattr(value, f.name))

    def _locate(self, name: str) -> Layer | None:
        for stack in self.stacks:
            found = stack.layer(name)
            if found is not None:
                return stack, found[0]
        return None


def _continues(run: list[Layer], layer: Layer) -> bool:
    """Whether a run over the layers of one stack, up or down, goes on."""
    stack, last = run[-1]
    step, so_far = layer[1] - last, last - run[0][1]
    return layer[0] is stack and step * so_far >= 0


def _move(stack: Stack, source: int, target: int) -> Callable[[str], str]:
    def rename(name: str) -> str:
        found = stack.layer(name)
        return _join(stack, target, found[1]) if found is not None and found[0] == source else name

    return rename


def _move_both(stack: Stack, source: int, targets: Sequence[int], target: int) -> Callable[[str], str]:
    """As `_move`, and the chosen layer before the source becomes the one before the target."""
    at, to = stack.chosen.index(source), targets.index(target)
    places = {source: target} | ({stack.chosen[at - 1]: targets[to - 1]} if at and to else {})

    def rename(name: str) -> str:
        found = stack.layer(name)
        return _join(stack, places[found[0]], found[1]) if found is not None and found[0] in places else name

    return rename


def _join(stack: Stack, index: int, rest: str) -> str:
    return f"{stack.path}.{index}.{rest}" if rest else f"{stack.path}.{index}"


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """Every name inside of a value changed: in strings, tuples, mappings and frozen dataclasses."""
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, Mapping):
        return {rename(k): _renamed(v, rename) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_renamed(v, rename) for v in value)
    if is_dataclass(value) and not isinstance(value, (type, Group)):
        return replace(value, **{f.name: _renamed(getattr(value, f.name), rename) for f in fields(value)})
    return value
