"""A curve in place of the line: halfway it passes where the loss is low, and at its ends it is A and B.

Between two aligned models runs a parabola, the quadratic Bézier curve of Garipov et al. (arXiv 1802.10026, section 3);
aligned models are joined by better ones (Tatro et al., arXiv 2009.02439). What is learned is by how much every weight
leaves the line halfway. The loss is the distance from what either model predicts on its own inputs, so that a curve
needs neither labels nor data. Its middle is trained: what it gains over the mean is no property of A and B alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hf_align.matching.descent import Descent, Progress, State
from hf_align.matching.objectives import Objective
from hf_align.matching.steepest import Steepest, as_matrices
from hf_align.merging.aligned import Aligned, Mix, Weights
from hf_align.merging.tensors import linear
from hf_align.running.network import Network
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


def learn_curve(
    a: Weights,
    b: Weights,
    network: Network,
    objective: Objective,
    schedule: Schedule,
    *,
    state: State | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The midpoint offsets [shape of the weight, float32, CPU] at which the loss between two models is low, by weight.

    Steps are steepest in the spectral norm of each matrix, and as long as A and B are apart in it: a weight that both
    share stays as it is.

    Args:
        a, b: weights of aligned models by name in memory, placed for the network.
        state: an interrupted run resumes from there.
        progress: called after each step with its number and the loss.

    Raises:
        HfAlignError: the loss is not finite.
    """
    offsets = {
        n: offset for n in sorted(network.trained & a.keys()) if (offset := _Offset.between(a[n], b[n])) is not None
    }

    def loss(rng: Generator) -> Tensor:
        at = schedule.draw(rng)
        merged = {n: linear(a[n], b[n], at) if a[n].is_floating_point() else a[n] for n in a}
        merged |= {n: merged[n] + 4 * at * (1 - at) * offset.value for n, offset in offsets.items()}
        return objective.loss(network, merged, schedule.rows, rng)

    if offsets:
        steepest = Steepest([{"params": [offset.steps for offset in offsets.values()], "rate": schedule.offset_rate}])
        Descent(list(offsets.values()), [steepest], schedule, state).run(loss, progress)
    return {n: offset.value.detach().cpu() for n, offset in offsets.items()}


@dataclass(frozen=True)
class _Offset:
    """How far one weight leaves the line.

    Attributes:
        steps: as matrices [*, n, k], in units of `unit`.
        unit: for which a matrix of spectral norm one has entries of the size by which those of A and B differ.
    """

    steps: Tensor
    unit: Tensor
    shape: torch.Size

    @classmethod
    def between(cls, a: Tensor, b: Tensor) -> _Offset | None:
        """None where A and B do not differ."""
        apart = (b - a).square().mean().sqrt()
        if not apart:
            return None
        matrices = as_matrices(a)  # of weights that were moved strides may be any
        steps = torch.zeros_like(matrices, memory_format=torch.contiguous_format, requires_grad=True)
        return cls(steps, apart * max(matrices.shape[-2:]) ** 0.5, a.shape)

    @property
    def value(self) -> Tensor:
        return self.unit * self.steps.view(self.shape)

    def retract(self) -> None:
        """It is where the optimiser took it."""

    def state(self) -> dict[str, Tensor]:
        return {"steps": self.steps.detach()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.steps.copy_(state["steps"])
