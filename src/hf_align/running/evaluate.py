"""Does it help? Losses along the straight line between two models, and the barrier in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import HfAlignError, MissingExtra
from hf_align.running.data import NO_LABEL, with_labels
from hf_align.running.network import Batch, Loss, Network, Weights, batches

ROUNDING = 1e-4
"""How far two losses that are one may be from each other, relative: float32."""

Pair = tuple[Weights, Weights]
"""Those of A and of B."""


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
        is_aligned: whether B was moved at all; if not, nothing is known of what alignment would do.
    """

    naive: Path1D
    aligned: Path1D
    features: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    is_aligned: bool = True

    @property
    def helps(self) -> bool | None:
        """Whether alignment lowered the barrier, by more than rounding changes a loss; None if nothing was aligned."""
        if not self.is_aligned:
            return None
        rounding = ROUNDING * (abs(self.naive.losses[0]) + abs(self.naive.losses[-1])) / 2
        return self.naive.barrier - self.aligned.barrier > rounding

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
        objective: a mean over examples, in the place of the model's own loss.

    Raises:
        HfAlignError: there is nothing to predict.
    """

    def __init__(self, network: Network, data: Batch, objective: Loss | None = None) -> None:
        self.network = network
        self.objective = objective
        self.data = data if objective is not None else with_labels(data)
        if objective is None and bool((self.data["labels"] == NO_LABEL).all()):
            raise HfAlignError(f"all labels of the data are {NO_LABEL}, which stands for none")
        self._ahead: int | None = None

    def path(self, a: Weights, b: Weights, at: Sequence[float], tick: Callable[[], object] | None = None) -> Path1D:
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
    def ensemble(self, models: Sequence[Weights], shares: Sequence[float]) -> float | None:
        """The loss of the mean of the models' log-probabilities, weighted by their shares.

        None where the models' own loss is not seen to be the cross-entropy of the labels, or of those one place on.
        """
        placed = [self.network.placed(weights) for weights in models]
        total = count = 0.0
        for here in self._batches():
            outputs = [self.network(weights, here) for weights in placed]
            size = self._size(outputs[0], here)
            if self._ahead is None:
                return None
            told = sum(s * output.logits.log_softmax(-1) for s, output in zip(shares, outputs, strict=True))
            total += (_cross_entropy(told, here["labels"], self._ahead) or 0.0) * size if size else 0.0
            count += size
        return total / count

    @torch.no_grad()
    def loss(self, weights: Weights) -> float:
        """The model's own loss with these weights, averaged over the labels of the data."""
        placed = self.network.placed(weights)
        total = count = 0.0
        for here in self._batches():
            output = self.network(placed, here)
            if self.objective is not None:
                size = len(next(iter(here.values())))
                total, count = total + float(self.objective(output, here)) * size, count + size
                continue
            size = self._size(output, here)
            total += float(output.loss) * size if size else 0.0
            count += size
        return total / count

    def _batches(self) -> Iterator[Batch]:
        """Those with something to predict: the mean over nothing is no number."""
        for batch in batches(self.data):
            if self.objective is not None or not bool((batch["labels"] == NO_LABEL).all()):
                yield {name: tensor.to(self.network.device) for name, tensor in batch.items()}

    def _size(self, output: Any, batch: Batch) -> int:
        """How many terms the loss of a batch is the mean of: labels, if it is seen to be their cross-entropy, or else
        examples."""
        labels = batch["labels"]
        if self._ahead is None:
            logits, own = getattr(output, "logits", None), float(output.loss)
            fits = [n for n in (0, 1) if _is_close(_cross_entropy(logits, labels, n), own)]
            self._ahead = fits[0] if len(fits) == 1 else None
        if self._ahead is None:
            return len(labels)
        return int((_told(labels, self._ahead) != NO_LABEL).sum())


def _cross_entropy(logits: Any, labels: Tensor, ahead: int) -> float | None:
    """Of labels so many places ahead; None where they do not go with the logits."""
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape or labels.ndim <= ahead:
        return None
    if labels.is_floating_point() or int(labels.max()) >= logits.shape[-1]:
        return None
    logits = logits[:, :-ahead] if ahead else logits
    return float(cross_entropy(logits.flatten(0, -2), _told(labels, ahead).flatten().long(), ignore_index=NO_LABEL))


def _told(labels: Tensor, ahead: int) -> Tensor:
    """The labels that something is predicted for, so many places ahead."""
    return labels[:, ahead:] if ahead else labels


def _is_close(found: float | None, expected: float) -> bool:
    return found is not None and abs(found - expected) <= ROUNDING * abs(expected)
