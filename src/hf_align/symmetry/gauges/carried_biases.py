"""Biases of norms whose gain stays, where a reader without bias sees them: it can carry any constant by itself.

hᵀ(γ ⊙ n) = 0 for h = 1/γ and n of mean zero. So W⊥ + k hᵀ/(hᵀβ) makes of γ ⊙ n + β the same as W⊥ does, and k beside
it: whatever β is, such readers can be given back what they have lost. Where biases take β up behind all else that sees
it, β is therefore free; where all else is blind to its mean, its mean is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape
from hf_align.symmetry.gauges.constants import Ways, passed_on, taken_up
from hf_align.symmetry.gauges.index_provenance import NOBODY, LosesMean, entries_of, follow, numbered, row_of
from hf_align.symmetry.gauges.kept_norms import KeptNorm, VectorUse, inverse, norms_that_stay, vector_uses
from hf_align.symmetry.gauges.moves import Taken
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import is_sum, multiplies_by_one, used_only_by

_LEAST = 0.1
"""For the sum of h/|h|, by which the mean of β is divided: gains of both signs may make it zero."""


@dataclass(frozen=True)
class CarryBias(Gauge):
    """β' replaces β with hᵀβ' = |h|, and W - uhᵀ replaces W for the u that leaves what it makes of β as it was.

    β' is h/|h| if biases take β - β' up. Else it is β + Σ Vk + c1: values k, what W makes of β for some W, are zero
    afterwards, since all that reads them is V, whose outputs are added where β is.

    Attributes:
        readers: each W, and along which axis it reads.
        taken: the biases that take up what β loses; nothing need to if only its mean moves.
        given: how β takes up what some W make of it, by W; none if `taken` are.
    """

    gain: str
    bias: str
    offset: float
    readers: tuple[tuple[str, int], ...]
    taken: tuple[Taken, ...] | None
    given: tuple[tuple[str, Taken], ...] = ()

    said = "a bias of a norm, as its readers can carry it"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.bias, *(weight for weight, _ in self.readers), *(t.bias for t in self.taken or ()))

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.gain)[-1]}

    def fix(self, name: str, get: Get) -> Tensor:
        row = inverse(get(self.gain) + self.offset)
        row, before = row / row.norm(), get(self.bias)
        after = self._after(before, row, get)
        if after is None or name == self.bias:
            return get(name) if after is None else after
        for taken in self.taken or ():
            if name == taken.bias:
                return taken.plus(before - after, get)
        axis = dict(self.readers)[name]
        weight = get(name).movedim(axis, -1)
        apart = weight - torch.outer(weight @ row, row)
        made = torch.zeros_like(weight[:, 0]) if name in dict(self.given) else weight @ before
        return (apart + torch.outer(made - apart @ after, row)).movedim(-1, axis)

    def _after(self, before: Tensor, row: Tensor, get: Get) -> Tensor | None:
        """The new bias; none if the mean is hardly seen along h."""
        if self.taken is not None:
            return row
        after = before
        for weight, taken in self.given:
            after = after + taken.plus(get(weight).movedim(dict(self.readers)[weight], -1) @ before, get) - before
        return after + (1 - after @ row) / row.sum() if bool(row.sum().abs() > _LEAST) else None


def carried_biases(
    found: Interpretation,
    gone: Collection[str],
    zero: Collection[str],
    still: Collection[fx.Node],
    loses_mean: LosesMean,
) -> Iterator[CarryBias]:
    """The gauges of all such norms.

    Args:
        gone, zero: as for `kept_norms`.
        still: as for `moved_constants`.
    """
    ways = Ways(found, still)
    places: dict[KeptNorm, list[fx.Node]] = defaultdict(list)
    for node, norm in norms_that_stay(found, gone, zero).items():
        places[norm].append(node)
    for norm, nodes in places.items():
        if norm.bias is None or not used_only_by((norm.bias,), nodes, found.program):
            continue
        uses = [use for node in nodes for use in vector_uses(node, found)]
        readings = [u.reading for u in uses if u.reading is not None and u.reading.bias is None]
        readers = tuple(sorted({(r.weight, r.in_axis) for r in readings}))
        weights, at = dict(readers), {r.node for r in readings}
        if not readers or len(weights) < len(readers) or not used_only_by(weights, at, found.program):
            continue
        taken = _taken(norm.bias, nodes, weights, at, ways)
        others = [u for u in uses if u.user not in at]
        if taken is not None:
            yield CarryBias(norm.gain, norm.bias, norm.offset, readers, taken)
        elif all(u.reading is None and loses_mean(u.user, u.value) for u in others):
            given = tuple(_given(norm.bias, readings, others, found))
            yield CarryBias(norm.gain, norm.bias, norm.offset, readers, None, given)


def _taken(
    bias: str, nodes: Collection[fx.Node], weights: Collection[str], at: Collection[fx.Node], ways: Ways
) -> tuple[Taken, ...] | None:
    """The biases that take up all of a norm's behind all else that sees it, if there are such."""
    starts = {node: entries_of(node) for node in nodes}
    fates = list(ways.fates(starts, {bias, *weights}, blind=at))
    free, taken = taken_up(next(iter(starts.values())).shape[-1], fates, ways)
    return taken if bool(free.all()) else None


def _given(
    bias: str, readings: list[LinearUse], others: list[VectorUse], found: Interpretation
) -> Iterator[tuple[str, Taken]]:
    """The readers whose constant is mapped to where the norm's bias is added, and how."""
    sums = {u.user for u in others}
    if len(sums) != len(others) or not all(is_sum(user) for user in sums):
        return
    weights = {r.weight for r in readings}
    for weight in sorted(weights):
        way = _way({r.node: numbered(r) for r in readings if r.weight == weight}, sums, found)
        if way is not None and way[0].weight not in weights:
            yield weight, Taken(bias, (), way[0].weight, way[0].in_axis, way[1])


def _way(
    starts: Mapping[fx.Node, Tensor], sums: Collection[fx.Node], found: Interpretation
) -> tuple[LinearUse, tuple[tuple[int, int], ...]] | None:
    """The one map without bias that alone reads values, if all its outputs are only ever added in these sums, in order,
    and which value each of its inputs shows."""

    def goes_on(user: fx.Node, node: fx.Node, labels: Tensor) -> Tensor | None:
        if user in sums:
            return None
        return labels if multiplies_by_one(user, node, found.program) else passed_on(found.program, user, node, labels)

    maps: dict[fx.Node, LinearUse] = {}
    ways = set()
    for use in follow(starts, found, goes_on):
        reading = found.reading(use.user, use.value)
        if reading is None or reading.bias is not None:
            return None
        maps[reading.node] = reading
        ways.add((reading.weight, reading.in_axis, row_of(reading, use.labels, found)))
    if len(ways) != 1 or (row := ways.pop()[2]) is None or any(start == NOBODY for start, _ in row):
        return None
    met = list(follow({node: numbered(r) for node, r in maps.items()}, found, goes_on))
    if sorted(u.user for u in met) != sorted(sums):
        return None
    if not all(torch.equal(u.labels, torch.arange(u.user.meta["val"].shape[-1]).expand_as(u.labels)) for u in met):
        return None
    return next(iter(maps.values())), row
