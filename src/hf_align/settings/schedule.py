"""How long and how fast a descent on the merged loss goes, and where between the models it looks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from hf_align.errors import OptionError
from hf_align.settings.choices import LambdaSampling, checked, seed

if TYPE_CHECKING:
    from torch import Generator

Draw = Callable[["Generator"], float]


def _uniform(low: float, high: float) -> Draw:
    def draw(rng: Generator) -> float:
        import torch  # here, for the options of a command are read without it

        return low + (high - low) * float(torch.rand((), generator=rng))

    return draw


LAMBDA: dict[LambdaSampling, Draw] = {
    "near-midpoint": _uniform(0.4, 0.6),
    "midpoint": lambda rng: 0.5,
    "uniform": _uniform(0.0, 1.0),
}
"""Where on the line the loss is taken: around the middle, at the middle alone, or anywhere."""
_OF_ONE = {
    "learned": ("rate", "stretch_rate", "order_rate", "lambda_sampling"),
    "curve": ("offset_rate", "lambda_sampling"),
    "distil": ("weight_rate",),
}
"""Settings that only some descents use."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        rate: of matrices: radians by which every plane turns per step, about; warmed up, then down a cosine, as all.
        stretch_rate: of the logarithms of factors.
        order_rate: of the latent matrices of permutations; 0 leaves the permutations of the start.
        offset_rate: of curves: how far the entries of a weight go per step, for how far they are apart in A and B.
        weight_rate: of distillation: how far an entry of a weight goes in a step whose gradient is like those before.
        rows: examples for each step.
        lambda_sampling: where on the line the loss is taken.
        checkpoint_every: steps between two states on disk.

    Raises:
        OptionError: there is no such sampling, no step, or no seed of that size.
    """

    steps: int = 150
    rate: float = 0.07
    stretch_rate: float = 0.012
    order_rate: float = 0.0
    offset_rate: float = 0.007
    weight_rate: float = 1e-3
    rows: int = 16
    lambda_sampling: LambdaSampling = "near-midpoint"
    seed: int = 0
    warmup: int = 10
    checkpoint_every: int = 50

    @classmethod
    def of_method(cls, method: str, **given: Any) -> Self:
        """What is given, and what is best for a way to merge where nothing is: distillation takes long to pay, and from
        a good start long steps lead away first."""
        of_distillation = {"steps": 1000, "rows": 32, "weight_rate": 3e-4}
        return cls(**{**(of_distillation if method == "distil" else {}), **given})

    @classmethod
    def of_transport(cls, method: str, **given: Any) -> Self:
        """The same for a way to carry a fine-tune over, where a descent pays soon (`benchmarks/transport.py`)."""
        return cls(**{**({"steps": 200, "rows": 16} if method == "distil" else {}), **given})

    def __post_init__(self) -> None:
        checked("lambda_sampling", self.lambda_sampling, LambdaSampling), seed("seed", self.seed)
        if self.steps < 1:
            raise OptionError(f"steps is {self.steps}; there must be at least one")

    def used_by(self, *ways: str) -> dict[str, Any]:
        """The settings that some ways to match and to merge use; none if no one of them is a descent."""
        descents = [way for way in ways if way in _OF_ONE]
        idle = {name for names in _OF_ONE.values() for name in names} - {n for way in descents for n in _OF_ONE[way]}
        return {name: value for name, value in asdict(self).items() if descents and name not in idle}

    @property
    def stretching(self) -> float:
        """How far matrices stretch in a step, for what they turn: in a long run no further, all in all, than in one of
        400 steps. Turns come round; stretched on, what is short would be lost in the rounding of what is long."""
        return min(1.0, 400 / self.steps)

    def shares(self, count: int, rng: Generator) -> tuple[float, ...]:
        """Where the loss is taken: what each of so many models contributes, 1 in sum. It is 1-λ and λ for two; for
        more, as near to equal shares as λ is to a half."""
        draw = LAMBDA[self.lambda_sampling]
        if count == 2:
            at = draw(rng)
            return 1 - at, at
        drawn = [draw(rng) for _ in range(count)]
        return tuple(part / sum(drawn) for part in drawn)

    def pace(self, step: int) -> float:
        """The share of the rate at a step."""
        return min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
