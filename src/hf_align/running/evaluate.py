"""Does it help? Losses along the straight line between two models, and the barrier in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_align.errors import MissingExtra
from hf_align.ondemand import Computed
from hf_align.running.data import with_labels
from hf_align.running.network import Batch, Network, batches

_BATCH = 64

Pair = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""The weights of A and of B, by name in memory."""


@dataclass(frozen=True)
class Path1D:
    """Losses (nats per label) along λ, where λ = 0 is A and λ = 1 is B."""

    lambdas: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def barrier(self) -> float:
        """The largest rise over the line between the endpoint losses (Frankle et al., arXiv 1912.05671)."""
        first, last = self.losses[0], self.losses[-1]
        return max(x - ((1 - t) * first + t * last) for t, x in zip(self.lambdas, self.losses, strict=True))

    @property
    def barrier_over_mean(self) -> float:
        """The largest rise over the mean of the endpoint losses."""
        return max(self.losses) - (self.losses[0] + self.losses[-1]) / 2

    def as_json(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "barrier": self.barrier, "barrier_over_mean": self.barrier_over_mean}


@dataclass(frozen=True)
class Comparison:
    """The two paths between A and B: as they are, and aligned.

    Attributes:
        features: by the weight that reads them, the mean correlation of A's features with B's, as they are and aligned.
    """

    naive: Path1D
    aligned: Path1D
    features: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def helps(self) -> bool:
        """Whether alignment lowered the barrier."""
        return self.aligned.barrier < self.naive.barrier

    def plot(self, axes: Any = None) -> Any:
        """Draw both paths with matplotlib, into these axes or new ones, which are returned.

        Raises:
            MissingExtra: matplotlib is not installed (`pip install 'hf-align[plots]'`).
        """
        if axes is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise MissingExtra("plots need matplotlib: pip install 'hf-align[plots]'") from error
            _, axes = pyplot.subplots()
        for name, path in (("as they are", self.naive), ("aligned", self.aligned)):
            axes.plot(path.lambdas, path.losses, marker="o", markersize=3, label=f"{name}, barrier {path.barrier:.3f}")
        axes.set(xlabel="share of B", ylabel="loss (nats)", title="Loss along the line from A to B")
        axes.legend()
        return axes

    def as_json(self) -> dict[str, Any]:
        """The contract of `hf-align evaluate --json`."""
        return {
            "loss_a": self.naive.losses[0],
            "loss_b": self.naive.losses[-1],
            "lambdas": list(self.naive.lambdas),
            "naive": self.naive.as_json(),
            "aligned": self.aligned.as_json(),
            "helps": self.helps,
            "features": {name: {"naive": x, "aligned": y} for name, (x, y) in self.features.items()},
        }


def lambdas(count: int) -> tuple[float, ...]:
    """`count` equally spaced mixing weights from 0 to 1."""
    return tuple(i / (count - 1) for i in range(count))


class Evaluator:
    """Losses of one architecture on held-out data.

    Args:
        network: the architecture.
        data: arguments of `forward`, [examples, ...]; without `labels`, the tokens themselves are predicted.
    """

    def __init__(self, network: Network, data: Batch) -> None:
        self.network = network
        self.data = with_labels(data)

    def path(
        self,
        a: Mapping[str, Tensor],
        b: Mapping[str, Tensor],
        at: Sequence[float],
        tick: Callable[[], object] | None = None,
    ) -> Path1D:
        """Losses of (1-λ)·a + λ·b; weights by name in memory."""
        losses = []
        for t in at:
            losses.append(self.loss(Computed(a, lambda n, t=t: torch.lerp(a[n].float(), b[n].float(), t))))  # type: ignore[misc]
            if tick is not None:
                tick()
        return Path1D(tuple(at), tuple(losses))

    def compare(self, raw: Pair, moved: Pair, points: int, tick: Callable[[], object] | None = None) -> Comparison:
        """Both paths between two models.

        Args:
            raw, moved: the weights of A and of B, as they are and aligned, on the device of the network.
            points: of λ, on each path.
        """
        at = lambdas(points)
        return Comparison(self.path(*raw, at, tick), self.path(*moved, at, tick))

    @torch.no_grad()
    def loss(self, weights: Mapping[str, Tensor]) -> float:
        """The model's own loss with these weights, averaged over the data."""
        device = self.network.device
        placed = self.network.placed(weights)
        total = count = 0.0
        for batch in batches(self.data, _BATCH):
            size = len(next(iter(batch.values())))
            total += float(self.network.loss(placed, {k: t.to(device) for k, t in batch.items()})) * size
            count += size
        return total / count
