"""A curve in place of the line: halfway it passes where the loss is low, and at its ends it is A and B.

Between two aligned models runs a parabola, the quadratic Bézier curve of Garipov et al. (arXiv 1802.10026, section 3);
aligned models are joined by better ones (Tatro et al., arXiv 2009.02439). What is learned is by how much every weight
leaves the line halfway. Of three models and more it is a simplex in place of the line: it bulges over its centre, and
stays at the models and on all faces as it was. The loss is the distance from what every model predicts on its own
inputs, so that a curve needs neither labels nor data. Its middle is trained: what it gains over the mean is no property
of the models alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from hf_align.checkpoints.ondemand import Computed
from hf_align.matching.descent import Descent, Moving, Progress, State
from hf_align.matching.objectives import Objective
from hf_align.matching.steepest import Steepest, as_matrices
from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.regression import mean_of
from hf_align.merging.tensors import linear
from hf_align.running.network import Network, Weights
from hf_align.settings.schedule import Schedule


def along(models: Aligned, offsets: Mapping[str, Tensor]) -> Mix:
    """(1-t)·a + t·b + 4t(1-t)·offset: the curve at t, the weight of B; the mean plus the offset at a half.

    Args:
        offsets: of the weights that leave the line, float32, each in the shape of its weight.
    """

    def mix(name: str, weight: float) -> Tensor:
        a = models.a[name]
        straight = linear(a, models.b[name], weight)
        offset = offsets.get(name)
        if offset is None:
            return straight
        return torch.add(straight, offset.to(straight.device), alpha=4 * weight * (1 - weight)).to(a)

    return mix


def bulging(mean: Weights, offsets: Mapping[str, Tensor]) -> Weights:
    """The centre of a simplex: the mean of its models, and what was learned there."""

    def centre(name: str) -> Tensor:
        plain = mean[name]
        return plain if name not in offsets else (plain + offsets[name].to(plain.device)).to(plain)

    return Computed(mean, centre)


def learn_curve(
    models: Sequence[Weights],
    network: Network,
    objective: Objective,
    schedule: Schedule,
    *,
    state: State | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The midpoint offsets [shape of the weight, float32, CPU] at which the loss between models is low, by weight.

    Steps are steepest in the spectral norm of each matrix, and as long as the models are apart in it: a weight that all
    share stays as it is.

    Args:
        models: weights of aligned models by name in memory, placed for the network.

    Raises:
        HfAlignError: the loss is not finite.
    """
    first = models[0]
    found = {n: _Offset.between(*(model[n] for model in models)) for n in sorted(network.trained & first.keys())}
    offsets = {n: offset for n, offset in found.items() if offset is not None}

    def loss(rng: Generator) -> Tensor:
        shares = schedule.shares(len(models), rng)
        bulge = len(shares) ** len(shares) * math.prod(shares)
        mean = mean_of(models, shares)
        merged = {n: mean[n] if first[n].is_floating_point() else first[n] for n in first}
        merged |= {n: merged[n] + bulge * offset.value for n, offset in offsets.items()}
        return objective.loss(network, merged, schedule.rows, rng)

    if offsets:
        steepest = Steepest([{"params": [offset.steps for offset in offsets.values()], "rate": schedule.offset_rate}])
        Descent(list(offsets.values()), [steepest], schedule, state).run(loss, progress)
    return {n: offset.value.detach().cpu() for n, offset in offsets.items()}


@dataclass(frozen=True)
class _Offset(Moving):
    """How far one weight leaves the line.

    Attributes:
        steps: as matrices [*, n, k], in units of `unit`.
        unit: for which a matrix of spectral norm one has entries of the size by which those of the models differ.
    """

    kept: ClassVar[tuple[str, ...]] = ("steps",)
    steps: Tensor
    unit: Tensor
    shape: torch.Size

    @classmethod
    def between(cls, a: Tensor, *others: Tensor) -> _Offset | None:
        """None where the models do not differ."""
        apart = torch.stack([(other - a).square().mean() for other in others]).mean().sqrt()
        if not apart:
            return None
        matrices = as_matrices(a)  # of weights that were moved strides may be any
        steps = torch.zeros_like(matrices, memory_format=torch.contiguous_format, requires_grad=True)
        return cls(steps, apart * max(matrices.shape[-2:]) ** 0.5, a.shape)

    @property
    def value(self) -> Tensor:
        return self.unit * self.steps.view(self.shape)
