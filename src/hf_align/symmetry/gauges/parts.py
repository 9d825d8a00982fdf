"""Weights that are stored in one piece and used in several: as of attention whose queries are read from elsewhere.

Gauges are found as if each part were a weight of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get
from hf_align.symmetry.gauges.index_provenance import moved, only_moves
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse, Value
from hf_align.tracing.ops import Trait, does


@dataclass(frozen=True)
class Part:
    """Rows of a weight, [start, stop), and what they are called."""

    weight: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.weight}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class OnParts(Gauge):
    """A gauge that knows parts of weights by names of their own."""

    gauge: Gauge
    parts: tuple[Part, ...]

    said = "a weight in one piece, as its parts are"

    @property
    def targets(self) -> tuple[str, ...]:
        whole = {part.name: part.weight for part in self.parts}
        return tuple(dict.fromkeys(whole.get(name, name) for name in self.gauge.targets))

    def fix(self, name: str, get: Get) -> Tensor:
        by_name = {part.name: part for part in self.parts}

        def seen(other: str) -> Tensor:
            part = by_name.get(other)
            return get(other) if part is None else get(part.weight)[part.start : part.stop]

        if name in self.gauge.targets:
            return self.gauge.fix(name, seen)
        weight = get(name)
        for part in (by_name[target] for target in self.gauge.targets if target in by_name):
            if part.weight == name:
                fixed = self.gauge.fix(part.name, seen)
                weight = torch.cat([weight[: part.start], fixed, weight[part.stop :]])
        return weight


def on_wholes(gauges: Iterable[Gauge], parts: tuple[Part, ...]) -> Iterator[Gauge]:
    """The gauges as of the weights that are stored; a gauge that only asks for parts changes some, too."""
    names = {part.name for part in parts}
    for gauge in gauges:
        yield gauge if names.isdisjoint(gauge.targets) else OnParts(gauge, parts)


def taken_apart(found: Interpretation) -> tuple[Interpretation, tuple[Part, ...]]:
    """The same with the parts in the place of the weights that are only ever used in parts, by linear maps."""
    program, values = found.program, found.values
    parts: dict[fx.Node, Part] = {}
    gone = set[fx.Node]()
    for node, name in program.parameters.items():
        apart = _parts_of(node, name, found) if list(program.parameters.values()).count(name) == 1 else {}
        if apart and all(isinstance(values.get(part), Value) for part in apart):
            parts |= apart
            gone.add(node)
    if not parts:
        return found, ()
    names = {node: part.name for node, part in parts.items()}
    parameters = {node: name for node, name in program.parameters.items() if node not in gone} | names
    weights = found.weights | {names[node]: values[node] for node in parts}
    shapes = program.shapes | {names[node]: tuple(node.meta["val"].shape) for node in parts}
    lost = {program.parameters[node] for node in gone}
    apart_program = replace(program, parameters=parameters, shapes={n: s for n, s in shapes.items() if n not in lost})
    uses = {use.node: use for node in parts for use in _uses_of(node, parameters)}
    return replace(
        found,
        program=apart_program,
        weights={n: w for n, w in weights.items() if n not in lost},
        linear_uses={n: u for n in program.graph.nodes if (u := uses.get(n, found.linear_uses.get(n))) is not None},
    ), tuple(dict.fromkeys(parts.values()))


def _parts_of(weight: fx.Node, name: str, found: Interpretation) -> dict[fx.Node, Part]:
    """The parts that a weight consists of, if it is used in no other way."""
    shape = weight.meta["val"].shape
    if len(shape) not in (1, 2):
        return {}
    rows = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    parts: dict[fx.Node, Part] = {}
    for user in weight.users:
        if not only_moves(user, [weight], found):
            return {}
        for node, shown in moved(user, {weight: rows}, found):
            whole = shown.dim() == len(shape) and shown.shape[1:] == shape[1:] and len(shown) > 0
            if not whole or not _is_affine(node):
                return {}
            start, stop = int(shown.min()), int(shown.max()) + 1
            if not torch.equal(shown, rows[start:stop]):
                return {}
            parts[node] = Part(name, start, stop)
    cuts = sorted({(part.start, part.stop) for part in parts.values()})
    starts, ends = [start for start, _ in cuts], [stop for _, stop in cuts]
    alone = len(cuts) > 1 and [*starts, shape[0]] == [0, *ends]
    return parts if alone else {}


def _is_affine(part: fx.Node) -> bool:
    """Whether linear maps use a value as their weight or bias, and nothing else does."""
    return bool(part.users) and all(
        does(user, Trait.OUTPUTS_FIRST)
        and does(user, Trait.AFFINE)
        and not user.kwargs
        and [i for i, a in enumerate(user.args) if a is part] in ([1], [2])
        for user in part.users
    )


def _uses_of(part: fx.Node, parameters: dict[fx.Node, str]) -> Iterator[LinearUse]:
    for user in part.users:
        value, weight, bias = (*user.args, None)[:3]
        if weight is part and isinstance(value, fx.Node) and value not in parameters:
            name = parameters.get(bias) if isinstance(bias, fx.Node) else None
            if bias is None or name is not None:
                yield LinearUse(user, value, parameters[part], 1, name)
