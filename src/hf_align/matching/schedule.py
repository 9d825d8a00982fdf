"""How long and how fast a descent on the merged loss goes, and where between the models it looks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator

Draw = Callable[[Generator], float]


def _uniform(low: float, high: float) -> Draw:
    return lambda rng: low + (high - low) * float(torch.rand((), generator=rng))


MIXING: dict[str, Draw] = {
    "narrow": _uniform(0.4, 0.6),
    "uniform": _uniform(0.0, 1.0),
    "middle": lambda rng: 0.5,
}
"""Where on the line the loss is taken: around the middle, anywhere, or at the middle alone."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        rate: of matrices: radians by which every plane turns per step, about; warmed up, then down a cosine, as all.
        stretch_rate: of the logarithms of factors.
        order_rate: of the latent matrices of permutations; 0 leaves the permutations of the start.
        bend_rate: of curves: how far the entries of a weight go per step, for how far they are apart in A and B.
        rows: examples for each step.
        mixing: a key of `MIXING`.
        checkpoint_every: steps between two states on disk.
    """

    steps: int = 150
    rate: float = 0.07
    stretch_rate: float = 0.012
    order_rate: float = 0.0
    bend_rate: float = 0.007
    rows: int = 16
    mixing: str = "narrow"
    seed: int = 0
    warmup: int = 10
    checkpoint_every: int = 50

    @property
    def stretching(self) -> float:
        """How far matrices stretch in a step, for what they turn: in a long run no further, all in all, than in one of
        400 steps. Turns come round; stretched on, what is short would be lost in the rounding of what is long."""
        return min(1.0, 400 / self.steps)

    def draw(self, rng: Generator) -> float:
        """A mixing weight."""
        return MIXING[self.mixing](rng)

    def pace(self, step: int) -> float:
        """The share of the rate at a step."""
        return min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
