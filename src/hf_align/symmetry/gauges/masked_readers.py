"""Readers of m ⊙ (γ ⊙ n + β), m a mask, some of whose outputs nobody sees where m is zero: as of queries and keys.

Where m is one, W + u hᵀ adds (hᵀβ) u for h = 1/γ, as in `kept_norms.py`, and where it is zero, nothing. Entries of u
are free if a bias takes that up or nothing sees it, and if nothing sees what the bias adds where m is zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape, Slices
from hf_align.symmetry.gauges.constants import Ways, taken_up
from hf_align.symmetry.gauges.idle_masks import Mask, hides_unseen, masks
from hf_align.symmetry.gauges.index_provenance import NOBODY, Passing, entries_of, follow, numbered, slices_of
from hf_align.symmetry.gauges.kept_norms import KeptNorm, inverse
from hf_align.symmetry.gauges.moves import Taken
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import multiplies_by_one, used_only_by


@dataclass(frozen=True)
class MaskedReader(Gauge):
    """W - u hᵀ replaces W for the u that makes Wh zero in some rows, and is zero in the others.

    Attributes:
        rows: of W, as it stands if it is read along its second axis.
        taken: the biases that take (hᵀβ) u up.
    """

    weight: str
    axis: int
    gain: str
    norm_bias: str
    offset: float
    rows: Slices
    taken: tuple[Taken, ...]

    said = "without what it never sees of a norm's output, which a mask hides in part"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight, *(t.bias for t in self.taken))

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return ()

    def fix(self, name: str, get: Get) -> Tensor:
        row = inverse(get(self.gain) + self.offset)
        weight = get(self.weight).movedim(self.axis, -1)
        unseen = torch.zeros_like(weight[:, 0])
        for start, stop in self.rows:
            unseen[start:stop] = weight[start:stop] @ row / row.square().sum()
        if name == self.weight:
            return (weight - unseen.unsqueeze(-1) * row).movedim(-1, self.axis)
        (taken,) = (t for t in self.taken if t.bias == name)
        return taken.plus(unseen * (get(self.norm_bias) @ row), get)


@dataclass(frozen=True)
class _Reading:
    """What reads a norm's output, and the product by a mask in between, if there is one."""

    use: LinearUse
    product: fx.Node | None


def masked_readers(
    norms: Mapping[fx.Node, KeptNorm], found: Interpretation, still: Collection[fx.Node]
) -> Iterator[MaskedReader]:
    """The gauges of all such readers.

    Args:
        norms: where a norm's output stands whose gain stays.
        still: as for `moved_constants`.
    """
    hiding = {node: m for node, m in masks(found).items() if node not in found.program.idle}
    if not hiding:
        return
    ways = Ways(found, still)
    readers: dict[str, dict[tuple[KeptNorm, int], list[_Reading]]] = defaultdict(lambda: defaultdict(list))
    for node, norm in norms.items():
        for reading in _readings(node, None, hiding, found):
            readers[reading.use.weight][norm, reading.use.in_axis].append(reading)
    for weight, kinds in readers.items():
        ((norm, axis), readings), *others = kinds.items()
        alone = not others and used_only_by((weight,), {r.use.node for r in readings}, found.program)
        if norm.bias is None or not alone or all(r.product is None for r in readings):
            continue
        rows, taken = _free(readings, hiding, ways)
        if bool(rows.any()):
            yield MaskedReader(weight, axis, norm.gain, norm.bias, norm.offset, slices_of(rows.nonzero()[:, 0]), taken)


def _readings(
    node: fx.Node, product: fx.Node | None, hiding: Mapping[fx.Node, Mask], found: Interpretation
) -> Iterator[_Reading]:
    """The linear maps that read whole vectors of a value where they stand, but for one mask."""
    for use in follow({node: entries_of(node)}, found, _passed(found)):
        if not torch.equal(use.labels, entries_of(use.value)):
            continue
        if (reading := found.reading_by_matrix(use.user, use.value)) is not None:
            yield _Reading(reading, product)
        elif product is None and use.user in hiding and hiding[use.user].value is use.value:
            yield from _readings(use.user, use.user, hiding, found)


def _passed(found: Interpretation) -> Passing:
    return lambda user, node, labels: labels if multiplies_by_one(user, node, found.program) else None


def _free(readings: list[_Reading], hiding: Mapping[fx.Node, Mask], ways: Ways) -> tuple[Tensor, tuple[Taken, ...]]:
    """The outputs that are free, and what takes up what they add."""
    first, taken = readings[0].use, list[Taken]()
    every = torch.zeros(numbered(first).shape[first.out_axis], dtype=torch.bool)
    for rows, taker in _groups([r.use for r in readings], len(every), ways):
        if bool(rows.any()) and all(_is_unseen(rows, r, hiding, ways.found) for r in readings):
            every |= rows
            taken += [taker] if taker is not None else []
    return every, tuple(taken)


def _groups(uses: list[LinearUse], size: int, ways: Ways) -> Iterator[tuple[Tensor, Taken | None]]:
    """The outputs whose constants one bias takes up, or nothing sees."""
    starts, (first, *others) = {use.node: numbered(use) for use in uses}, uses
    if first.bias is not None:
        if all(use.bias == first.bias for use in others) and used_only_by((first.bias,), starts, ways.found.program):
            yield torch.ones(size, dtype=torch.bool), Taken(first.bias)
        return
    fates = list(ways.fates(starts, {first.weight}, within=first))
    lost, takers = taken_up(size, fates, ways)
    for taker in takers:
        rows = torch.zeros_like(lost)
        rows[torch.cat([fate.entries for fate in fates if fate.taken == taker])] = True
        yield rows & lost, taker
        lost = lost & ~rows
    yield lost, None


def _is_unseen(rows: Tensor, reading: _Reading, hiding: Mapping[fx.Node, Mask], found: Interpretation) -> bool:
    """Whether nothing sees some outputs of a map where a mask hides what it reads."""
    product, use = reading.product, reading.use
    if product is None:
        return True

    def reached(hidden: Tensor) -> dict[fx.Node, Tensor]:
        ways = follow({product: hidden.long() + NOBODY}, found, _passed(found))
        (read,) = (way.labels > NOBODY for way in ways if way.user is use.node and way.value is use.input)
        return {use.node: read.any(-1, keepdim=True) & rows}

    return hides_unseen(product, hiding[product], found, reached)
