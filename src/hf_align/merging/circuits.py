"""Merging what heads do, not how they do it: the mean of two circuits, split into two weights again.

A space under the general linear group, such as the queries and keys or the values of a head, is seen through the
product of what writes it and what reads it alone (Elhage et al., A Mathematical Framework for Transformer Circuits,
2021). The mean of two such products of rank n has rank 2n; the closest of rank n is a truncated singular value
decomposition (Eckart & Young 1936), computed from thin factors without ever forming the product.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.tensors import linear
from hf_align.symmetry.action import occurrences
from hf_align.symmetry.elements import DUAL, PRIMAL, Power
from hf_align.symmetry.groups import GeneralLinear, polar
from hf_align.symmetry.spec import Block, SymmetrySpec

_KEPT = 4
"""Splits in memory: the weights of one block share them."""


def circuit_mean(models: Aligned) -> Mix:
    """The mean of all circuits, split so that both weights are as close to their own means as they can be; every other
    entry is averaged."""
    inside = circuits(models.spec)

    @functools.lru_cache(_KEPT)
    def split(space: str, weight: float) -> dict[_Place, Tensor]:
        return _split(models, space, weight)

    def mix(name: str, weight: float) -> Tensor:
        merged = linear(models.a[name], models.b[name], weight)
        for number, block in enumerate(models.spec.blocks(name)):
            for axis, factor in enumerate(block.factors):
                if factor.space in inside:
                    merged = merged.contiguous()
                    rows = split(str(factor.space), weight)[_Place(name, number, axis)]
                    _put(merged, block, axis, block.index_axes(axis, str(factor.space)), rows)
        return merged

    return mix


def circuits(spec: SymmetrySpec) -> frozenset[str]:
    """The spaces under the general linear group that some weights write and others read, each of them a weight of no
    second such space."""
    found = {n for n, s in spec.spaces.items() if type(s.group) is GeneralLinear}
    sides: dict[str, set[Power]] = {n: set() for n in found}
    for name in spec.parameters:
        for block in spec.blocks(name):
            here = [f for f in block.factors if f.space in found]
            for factor in here:
                sides[str(factor.space)].add(factor.power if len(here) == 1 else ())
    return frozenset(n for n, powers in sides.items() if powers == {PRIMAL, DUAL})


@dataclass(frozen=True)
class _Place:
    """Where a space moves a parameter: the number of the block, and its axis there."""

    name: str
    block: int
    axis: int


def _places(spec: SymmetrySpec, space: str) -> Iterator[tuple[_Place, Power]]:
    """In the order of `occurrences`."""
    for name in spec.uses(space):
        for number, block in enumerate(spec.blocks(name)):
            for axis in block.occurrences(space):
                yield _Place(name, number, axis), block.factors[axis].powers[space]


def _split(models: Aligned, space: str, weight: float) -> dict[_Place, Tensor]:
    """What to put at every place of a space: rows [*index, n, rest]."""
    spec = models.spec
    places = list(_places(spec, space))
    rows = {
        side: [r.double() for n in spec.uses(space) for _, r in occurrences(weights[n], n, spec, space)]
        for side, weights in (("a", models.a), ("b", models.b))
    }
    ends = {
        power: [torch.cat([r for r, (_, p) in zip(rows[side], places, strict=True) if p == power], -1) for side in "ab"]
        for power in (PRIMAL, DUAL)
    }
    merged = dict(zip((PRIMAL, DUAL), best_split(ends[PRIMAL], ends[DUAL], weight), strict=True))
    taken = {PRIMAL: 0, DUAL: 0}
    found = {}
    for (place, power), like in zip(places, rows["a"], strict=True):
        start = taken[power]
        taken[power] = start + like.shape[-1]
        found[place] = merged[power][..., start : taken[power]]
    return found


def best_split(primal: list[Tensor], dual: list[Tensor], weight: float) -> tuple[Tensor, Tensor]:
    """P [*index, n, r] and D [*index, n, s] with Dᵀ P the closest of rank n to (1-t)·Daᵀ Pa + t·Dbᵀ Pb.

    Of all such pairs, the balanced one (P Pᵀ = D Dᵀ) that is closest to the mean of the weights.

    Args:
        primal: Pa and Pb [*index, n, r], float64.
        dual: Da and Db [*index, n, s], float64.
    """
    size = primal[0].shape[-2]
    tall_p, short_p = torch.linalg.qr(torch.cat([(1 - weight) * primal[0], weight * primal[1]], -2).mT)
    tall_d, short_d = torch.linalg.qr(torch.cat(dual, -2).mT)
    u, s, vh = torch.linalg.svd(short_d @ short_p.mT)
    roots = s[..., :size].sqrt()
    p = roots[..., None] * (vh[..., :size, :] @ tall_p.mT)
    d = roots[..., None] * (tall_d @ u[..., :size]).mT
    mean_p, mean_d = (torch.lerp(pair[0], pair[1], weight) for pair in (primal, dual))
    turn = polar(mean_p @ p.mT + mean_d @ d.mT)
    return turn @ p, turn @ d


def _put(tensor: Tensor, block: Block, axis: int, index: tuple[int, ...], rows: Tensor) -> None:
    """Write rows [*index, n, rest] to where `occurrences` read them."""
    view = block.factored(tensor)
    view = view.movedim([*index, axis], [*range(len(index) + 1)])
    view.copy_(rows.reshape(view.shape))
