"""Scores that a softmax over places makes of WA (γ ⊙ n + β), n a norm's output before its gain, A square.

The sum of n is zero, so that W + s hᵀ for h = A⁻ᵀ (1/γ) only adds s hᵀAβ to the scores of all places, which the softmax
does not see: as of heads that learn which places to pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape
from hf_align.symmetry.gauges.index_provenance import entries_of, follow, numbered, row_of
from hf_align.symmetry.gauges.kept_norms import KeptNorm
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import is_softmax, used_only_by
from hf_align.tracing.ops import Trait, does

_MOST = 1e3
"""How far a map may be from losing nothing: beyond, what W gains in length would round what it says."""


@dataclass(frozen=True)
class FreeScores(Gauge):
    """W - WAγ hᵀ/d replaces W, d the entries of h = A⁻ᵀ (1/γ), so that of WAγ nothing is left.

    Attributes:
        weight: W, [outputs, d, ones].
        first: A, [d, d/groups, ones].
    """

    weight: str
    first: str
    gain: str
    offset: float

    said = "scores without what a softmax over places never sees of a norm's output"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight,)

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return ()

    def fix(self, name: str, get: Get) -> Tensor:
        stored, gain, blocks = get(name), get(self.gain).double() + self.offset, get(self.first).double().flatten(1)
        first = torch.block_diag(*blocks.chunk(len(blocks) // blocks.shape[1]))
        inverse, failed = torch.linalg.inv_ex(first)
        row, column = inverse.mT @ (1 / gain), first @ gain
        if bool(failed) or not bool(row.norm() * column.norm() < _MOST * len(gain)):
            return stored
        weight = stored.double().flatten(1)
        kept = weight - (weight @ column).outer(row) / len(gain)
        return kept.reshape(stored.shape).to(stored.dtype)


def free_scores(norms: Mapping[fx.Node, KeptNorm], found: Interpretation) -> Iterator[FreeScores]:
    """The gauges of all such W.

    Args:
        norms: where a norm's output stands whose gain stays.
    """
    ways: dict[str, set[FreeScores]] = defaultdict(set)
    nodes: dict[str, set[fx.Node]] = defaultdict(set)
    for node, norm in norms.items():
        shape = node.meta["val"].shape
        for first in _readers({node: entries_of(node)}, shape[-1], found):
            if found.program.shapes[first.weight][0] != shape[-1]:
                continue
            for second in _readers({first.node: numbered(first)}, shape[-1], found):
                if second.bias is None and second.node in found.linear_uses and _are_scores(second, found):
                    ways[second.weight].add(FreeScores(second.weight, first.weight, norm.gain, norm.offset))
                    nodes[second.weight].add(second.node)
    for weight, gauges in ways.items():
        (gauge, *others) = gauges
        if not others and weight != gauge.first and used_only_by((weight,), nodes[weight], found.program):
            yield gauge


def _readers(starts: Mapping[fx.Node, Tensor], size: int, found: Interpretation) -> Iterator[LinearUse]:
    """What maps a vector, all its entries in order, place by place."""
    uses = found.linear_uses | found.grouped_uses
    for use in follow(starts, found):
        reading = uses.get(use.user)
        if reading is not None and reading.input is use.value and reading.in_axis == 1:
            alone = all(n == 1 for n in found.program.shapes[reading.weight][2:]) and not does(
                use.user, Trait.TRANSPOSED
            )
            if alone and row_of(reading, use.labels, found) == ((0, size),):
                yield reading


def _are_scores(reading: LinearUse, found: Interpretation) -> bool:
    """Whether each softmax sees one output of a map, at so many places, and nothing else sees any."""
    return all(
        any(
            is_softmax(use.user, axis) and bool((use.labels == use.labels.narrow(axis, 0, 1)).all())
            for axis in range(-use.labels.dim(), 0)
        )
        for use in follow({reading.node: numbered(reading)}, found)
    )
