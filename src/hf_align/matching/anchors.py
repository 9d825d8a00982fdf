"""Where descent starts: from what two models share by construction.

Vocabulary rows, position rows, patch pixels and labels mean the same in both models, so every weight between such an
interface and a space is a set of corresponding points (Procrustes needs no more). Where these points do not span the
space, they are carried on through *circuits*, products of two weights in which every other space cancels, such as
value times output: a point and its image correspond as well.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import nearest
from hf_align.running.network import Weights
from hf_align.symmetry.elements import PRIMAL, Element, Power, dual
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.spec import Block, SymmetrySpec

_ROUNDS = 3
"""Steps away from the anchors that evidence is carried over."""
_WEIGHT = 1e-2
"""Of each further step: what is nearer decides, and what is farther breaks ties."""


def anchored(spec: SymmetrySpec, space: str) -> list[str]:
    """The parameters in which a space meets only interfaces of the model, or nothing: tables, patches, biases."""
    return [name for name in spec.uses(space) if spec.carried(name) == [space]]


def start(models: Balanced, space: str, points: Mapping[Power, Tensor]) -> Element:
    """The element that fits the anchors best, and their images under circuits where the anchors leave it open.

    Args:
        points: what the anchors say, cross matrices [n, n] by power.
    """
    group = models.spec.group(space)
    if not isinstance(group, ScaledPermutation) and _rows(models.spec, space) < group.size:
        points = {PRIMAL: _extend(models, space, torch.stack(list(points.values())).sum(0))}
    return models.processes.by_the_first(lambda: nearest(group, points, models.device))


def _rows(spec: SymmetrySpec, space: str) -> int:
    """How many points the anchors are."""
    return sum(math.prod(spec.shape(name)) for name in anchored(spec, space)) // spec.spaces[space].size


def _extend(models: Balanced, space: str, points: Tensor) -> Tensor:
    """points + ε images + ε² images of images …, each scaled to the size of the points.

    Circuits are computed again in each round: of all layers together they may be larger than the models.
    """
    total, images = points, points
    inner = [name for name, s in models.spec.spaces.items() if name != space and s.group is not None]
    for step in range(_ROUNDS):
        seen: Tensor | None = None
        for image in models.processes.in_order(inner, functools.partial(_image, models, space, images)):
            if image is not None:
                seen = image if seen is None else seen + image
        if seen is None:
            return total
        images = seen * (points.norm() / seen.norm().clamp_min(1e-300))
        total = total + _WEIGHT ** (step + 1) * images
    return total


def _image(models: Balanced, space: str, points: Tensor, inner: str) -> Tensor | None:
    """What the circuits through an inner space make of points, both ways; None where there are none.

    In float32, for it is most of the work and only says where to start.
    """
    seen: Tensor | None = None
    of_a, of_b = (_circuits(models.spec, space, inner, weights) for weights in (models.a, models.b))
    for x, y in zip(of_a, of_b, strict=True):
        points = points.to(x)
        image = x @ points @ y.T + x.T @ points @ y
        seen = image if seen is None else seen + image
    return None if seen is None else seen.cpu().double()


def _circuits(spec: SymmetrySpec, space: str, inner: str, weights: Weights) -> Iterator[Tensor]:
    """Maps [n, n] of a space into itself, through an inner one, that nothing else changes; of unit norm, float32."""
    sides = [(p, r.float()) for name in spec.uses(inner) for p, r in _sides(spec, name, space, inner, weights[name])]
    free = isinstance(spec.group(inner), ScaledPermutation) and not spec.group(inner).has_gauge
    for (p, x), (q, y) in itertools.combinations_with_replacement(sides, 2):
        if x.shape == y.shape and (p == dual(q) or free):
            circuit = x @ y.T
            yield circuit / circuit.norm().clamp_min(1e-30)


def _sides(spec: SymmetrySpec, name: str, space: str, inner: str, weight: Tensor) -> Iterator[tuple[Power, Tensor]]:
    """The weight between a space and an inner space as rows [n, index · m], other permuted axes summed out."""
    for block in spec.blocks(name):
        ours, theirs = list(block.occurrences(space)), list(block.occurrences(inner))
        if len(ours) != 1 or len(theirs) != 1:
            continue
        kept = [ours[0], *block.index_axes(theirs[0], inner), theirs[0]]
        rest = [i for i in range(len(block.factors)) if i not in kept]
        if all(isinstance(_group(spec, block, i), ScaledPermutation) for i in rest):
            view = block.factored(weight).permute(*kept, *rest)
            view = view.reshape(*view.shape[: len(kept)], -1).sum(-1)
            yield block.factors[theirs[0]].powers[inner], view.reshape(view.shape[0], -1)


def _group(spec: SymmetrySpec, block: Block, axis: int) -> object:
    space = block.factors[axis].space
    return spec.spaces[space].group if space else None
