"""Tangents of the groups at canonical weights: what a small step of a group changes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hf_align.symmetry.action import act
from hf_align.symmetry.certificate.random_copy import Weights
from hf_align.symmetry.elements import Matrix
from hf_align.symmetry.groups import Group
from hf_align.symmetry.spec import SymmetrySpec

_NO_STEP = 1e-9
"""A shorter step is rounding, and made longer it would lead anywhere."""
_TOGETHER = 256
"""Directions of a group in memory at once."""


def tangents(spec: SymmetrySpec, weights: Weights) -> Tensor:
    """[directions, parameters], of unit length; the parameters in the order of the weights."""
    start, total = {}, 0
    for name, weight in weights.items():
        start[name], total = total, total + weight.numel()
    rows = []
    for change in _group_directions(spec, weights):
        row = torch.zeros(total, dtype=torch.float64)
        for name, part in change.items():
            row[start[name] : start[name] + part.numel()] = part.reshape(-1)
        rows.append(row)
    moving = [row for row in rows if float(row.norm()) > _NO_STEP]
    return normalize(torch.stack(moving)) if moving else torch.zeros(0, total, dtype=torch.float64)


def _group_directions(spec: SymmetrySpec, weights: Weights) -> Iterator[Weights]:
    for space in spec.spaces.values():
        if space.group is None or not space.group.dimension:
            continue
        index = spec.index_shape(space.name)
        names = spec.uses(space.name)
        most = sum(weights[n].numel() for n in names)
        if not most:
            continue
        steps = _steps(space.group, index, most)
        changes = _derivatives(spec, space.name, index, steps, {n: weights[n] for n in names})
        yield from ({n: change[i] for n, change in changes.items()} for i in range(len(steps)))


def _steps(group: Group, index: tuple[int, ...], most: int) -> Tensor:
    """A basis of the tangents at every index, [steps, *index, *tangent]; of a group with more of them than the `most`
    numbers that it acts on, as many at random: they move those in as many directions."""
    one = group.identity(index)
    if isinstance(one, Matrix) and group.dimension * math.prod(index) > most:
        rng = torch.Generator().manual_seed(0)
        return group.algebra(torch.randn(most, *one.matrix.shape, generator=rng, dtype=torch.float64))
    tangents = group.tangents()
    places = torch.eye(math.prod(index), dtype=torch.float64).reshape(-1, *index, 1, 1)
    return (places * tangents.reshape(-1, 1, *(1,) * len(index), *tangents.shape[1:])).flatten(0, 1)


def _derivatives(spec: SymmetrySpec, space: str, index: tuple[int, ...], steps: Tensor, weights: Weights) -> Weights:
    """What 1 + tX makes of the weights, d/dt, for each of some X; [steps, *shape]."""
    group = spec.spaces[space].group
    assert group is not None
    one = group.identity(index)

    def derivative(step: Tensor, still: Weights) -> Weights:
        def moved(step: Tensor) -> Weights:
            element = one.shifted(step)
            return {n: act(w, n, spec, {space: element}) for n, w in still.items()}

        return torch.func.jvp(moved, (torch.zeros_like(step),), (step,))[1]

    copies = {n: w.expand(len(steps), *w.shape) for n, w in weights.items()}  # for an action may write into a copy
    return torch.func.vmap(derivative, chunk_size=_TOGETHER)(steps, copies)
