"""Every continuous symmetry direction at canonical weights: what a small step of a group or a gauge changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hf_align.symmetry.action import act
from hf_align.symmetry.certificate.degrees import degrees
from hf_align.symmetry.certificate.linked import free_rotations, linked_rotations
from hf_align.symmetry.certificate.random_copy import Weights
from hf_align.symmetry.certificate.shared_readers import shared_readers
from hf_align.symmetry.certificate.shears import Streams
from hf_align.symmetry.certificate.translations import translations
from hf_align.symmetry.elements import Matrix
from hf_align.symmetry.gauges.canonical import (
    Carried,
    CentreRows,
    CentreWriter,
    FoldIntoWriter,
    FoldNorm,
    FoldStatistics,
)
from hf_align.symmetry.groups import Group
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.trace import Program

_NOTHING = 1e-9
"""A shorter step is rounding, and made longer it would lead anywhere."""
_TOGETHER = 256
"""Directions of a group in memory at once."""


def directions(spec: SymmetrySpec, program: Program, weights: Weights) -> Tensor:
    """[directions, parameters], of unit length; the parameters in the order of the weights."""
    return _rows(generate(spec, program, weights), weights)


def _rows(changes: Iterable[Weights], weights: Weights) -> Tensor:
    start, total = {}, 0
    for name, weight in weights.items():
        start[name], total = total, total + weight.numel()
    rows = []
    for change in changes:
        row = torch.zeros(total, dtype=torch.float64)
        for name, part in change.items():
            row[start[name] : start[name] + part.numel()] = part.reshape(-1)
        rows.append(row)
    moving = [row for row in rows if float(row.norm()) > _NOTHING]
    return normalize(torch.stack(moving)) if moving else torch.zeros(0, total, dtype=torch.float64)


def tangents(spec: SymmetrySpec, weights: Weights) -> Tensor:
    """Those of the groups alone, as `directions`."""
    return _rows(_group_directions(spec, weights), weights)


def generate(spec: SymmetrySpec, program: Program, weights: Weights) -> Iterator[Weights]:
    """Every continuous symmetry direction at canonical weights, as changes of some parameters."""
    yield from _group_directions(spec, weights)
    for gauge in spec.gauges:
        if isinstance(gauge, FoldNorm):
            yield from _gain_directions(gauge, weights)
        elif isinstance(gauge, FoldIntoWriter):
            yield from _writer_directions(gauge, weights)
        elif isinstance(gauge, FoldStatistics):
            yield from _statistics_directions(gauge, weights)
        elif isinstance(gauge, CentreWriter):
            yield from _mean_directions(gauge, weights)
        elif isinstance(gauge, CentreRows):
            yield from _row_directions(gauge, weights)
    yield from translations(program, weights)
    streams = Streams.of(program)
    yield from streams.directions(weights)
    yield from linked_rotations(streams, weights)
    yield from free_rotations(streams, weights)
    yield from shared_readers(streams, weights)
    yield from degrees(program, weights)


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


def _gain_directions(gauge: FoldNorm, weights: Weights) -> Iterator[Weights]:
    """γ by c, its readers by 1/c, channel by channel."""
    carriers = [Carried(gauge.gain, 0, 1), *(Carried(r.weight, r.axis, -1) for r in gauge.reads), *gauge.others]
    if gauge.bias and gauge.bias not in [c.weight for c in carriers]:
        carriers.append(Carried(gauge.bias, 0, 1))
    for one in torch.eye(len(weights[gauge.gain]), dtype=weights[gauge.gain].dtype):
        change: Weights = {}
        for carried in carriers:
            value = weights[carried.weight] + (gauge.offset if carried.weight == gauge.gain else 0.0)
            part = value - carried.scaled(value, 1 - carried.power * one)
            change[carried.weight] = change.get(carried.weight, 0) + part
        yield change


def _writer_directions(gauge: FoldIntoWriter, weights: Weights) -> Iterator[Weights]:
    """γ by c, what writes by 1/c, channel by channel."""
    written = [(gauge.weight, gauge.axis), *([(gauge.bias, 0)] if gauge.bias else [])]
    for channel in range(weights[gauge.gain].numel()):
        gain = torch.zeros_like(weights[gauge.gain])
        gain.view(-1)[channel] = weights[gauge.gain].view(-1)[channel]
        change = {gauge.gain: gain}
        for name, axis in written:
            change[name] = torch.zeros_like(weights[name])
            change[name].select(axis, channel).copy_(-weights[name].select(axis, channel))
        yield change


def _statistics_directions(gauge: FoldStatistics, weights: Weights) -> Iterator[Weights]:
    """At μ = 0 and σ² + ε = 1: μ by t and β by γt; σ² by t and γ by γt/2."""
    for one in torch.eye(len(weights[gauge.gain]), dtype=weights[gauge.gain].dtype):
        yield {gauge.mean: one, gauge.bias: one * weights[gauge.gain]}
        yield {gauge.variance: one, gauge.gain: one * weights[gauge.gain] / 2}


def _mean_directions(gauge: CentreWriter, weights: Weights) -> Iterator[Weights]:
    """w + 1 vᵀ along the axis that is written."""
    weight = weights[gauge.parameter]
    others = weight.numel() // weight.shape[gauge.axis]
    for row in torch.eye(others, dtype=weight.dtype):
        shape = [n for i, n in enumerate(weight.shape) if i != gauge.axis]
        yield {gauge.parameter: row.reshape(shape).unsqueeze(gauge.axis).expand_as(weight)}


def _row_directions(gauge: CentreRows, weights: Weights) -> Iterator[Weights]:
    """w + 1_r vᵀ along the axis that is written."""
    weight = weights[gauge.parameter]
    for row in gauge.entries():
        ones = torch.zeros(weight.shape[gauge.axis], dtype=weight.dtype).index_fill(0, row, 1.0)
        for other in torch.eye(weight.numel() // len(ones), dtype=weight.dtype):
            direction = torch.outer(ones, other)
            yield {gauge.parameter: (direction if gauge.axis == 0 else direction.T).reshape(weight.shape)}
