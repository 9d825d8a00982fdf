"""Where descent starts: from what two models share by construction.

Vocabulary rows, position rows, patch pixels and labels mean the same in both models, so every weight between such an
interface and a space is a set of corresponding points (Procrustes needs no more). Where these points do not span the
space, they are carried on through *circuits*, products of two weights in which every other space cancels, such as
value times output: a point and its image correspond as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_align.matching.cross import Weights, cross
from hf_align.symmetry.action import Block, blocks
from hf_align.symmetry.elements import PRIMAL, Element, Power, dual
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.spec import SymmetrySpec

_ROUNDS = 3
_WEIGHT = 1e-2


def anchored(spec: SymmetrySpec, space: str) -> list[str]:
    """The parameters in which a space meets only interfaces of the model, or nothing: tables, patches, biases."""

    def meets_nothing_else(name: str) -> bool:
        spaces = [f.space for axis in spec.parameters[name] for segment in axis for f in segment if f.space]
        return set(spaces) == {space} and len(spaces) == 1

    return [name for name in spec.uses(space) if meets_nothing_else(name)]


def start(spec: SymmetrySpec, space: str, a: Weights, b: Weights) -> Element | None:
    """The element that fits the anchors best, and their images under circuits where the anchors leave it open."""
    group, names = spec.spaces[space].group, anchored(spec, space)
    if group is None or not names or spec.spaces[space].index:
        return None
    points = cross(spec, space, a, b, {}, names)
    total = torch.stack(list(points.values())).sum(0)
    if not isinstance(group, ScaledPermutation):
        total = _extend(total, list(_circuits(spec, space, a)), list(_circuits(spec, space, b)))
    return group.nearest({PRIMAL: total})


def _extend(points: Tensor, of_a: list[Tensor], of_b: list[Tensor]) -> Tensor:
    """points + ε images + ε² images of images …, each scaled to the size of the points."""
    total, images = points, points
    for step in range(_ROUNDS if of_a else 0):
        images = torch.stack([x @ images @ y.T + x.T @ images @ y for x, y in zip(of_a, of_b, strict=True)]).sum(0)
        images = images * (points.norm() / images.norm().clamp_min(1e-300))
        total = total + _WEIGHT ** (step + 1) * images
    return total


def _circuits(spec: SymmetrySpec, space: str, weights: Weights) -> Iterator[Tensor]:
    """Maps [n, n] of a space into itself that no other space can change, of unit norm."""
    for inner in spec.spaces:
        if inner == space or spec.spaces[inner].group is None:
            continue
        sides = [(p, r) for name in spec.uses(inner) for p, r in _sides(spec, name, space, inner, weights[name])]
        free = isinstance(spec.spaces[inner].group, ScaledPermutation) and not spec.spaces[inner].group.has_gauge  # type: ignore[union-attr]
        for (p, x), (q, y) in itertools.combinations_with_replacement(sides, 2):
            if x.shape == y.shape and (p == dual(q) or free):
                circuit = (x @ y.T).double()
                yield circuit / circuit.norm().clamp_min(1e-300)


def _sides(spec: SymmetrySpec, name: str, space: str, inner: str, weight: Tensor) -> Iterator[tuple[Power, Tensor]]:
    """The weight between a space and an inner space as rows [n, index · m], other permuted axes summed out."""
    for block in blocks(spec, name):
        ours, theirs = list(block.occurrences(space)), list(block.occurrences(inner))
        if len(ours) != 1 or len(theirs) != 1:
            continue
        kept = [ours[0], *block.index_axes(spec, theirs[0]), theirs[0]]
        rest = [i for i in range(len(block.factors)) if i not in kept]
        if all(isinstance(_group(spec, block, i), ScaledPermutation) for i in rest):
            view = block.factored(weight).permute(*kept, *rest)
            view = view.reshape(*view.shape[: len(kept)], -1).sum(-1)
            yield block.factors[theirs[0]].power, view.reshape(view.shape[0], -1)


def _group(spec: SymmetrySpec, block: Block, axis: int) -> object:
    space = block.factors[axis].space
    return spec.spaces[space].group if space else None
