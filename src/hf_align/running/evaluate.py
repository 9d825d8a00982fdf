"""Does it help? Losses along the straight line between two models, and the barrier in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import HfAlignError, MissingExtra
from hf_align.running.data import with_labels
from hf_align.running.network import Batch, Loss, Network, Weights, batches
from hf_align.tracing.tokens import NO_LABEL

ROUNDING = 1e-4
"""How far two losses that are one may be from each other, relative: float32."""

_PLACES = (0, 1)
"""How many places ahead the labels may be that a model predicts."""

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

    @property
    def mean(self) -> float:
        """Of the losses."""
        return sum(self.losses) / len(self.losses)

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
        """Whether alignment lowered the barrier, or the mean loss on the way where there is none, by more than rounding
        changes a loss; None if nothing was aligned."""
        if not self.is_aligned:
            return None
        lower = self.naive.barrier - self.aligned.barrier if self.has_barrier else self.naive.mean - self.aligned.mean
        return lower > self._rounding

    @property
    def has_barrier(self) -> bool:
        """Whether the loss on one of the paths rises over the line between its ends, by more than rounding."""
        return max(self.naive.barrier, self.aligned.barrier) > self._rounding

    @property
    def _rounding(self) -> float:
        return ROUNDING * (abs(self.naive.losses[0]) + abs(self.naive.losses[-1])) / 2

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
        if self._ahead is None:
            self.loss(models[0])
        ahead = self._ahead
        if ahead is None:
            return None
        placed, mean = [self.network.placed(weights) for weights in models], _Mean()
        for here in self._batches():
            outputs = [self.network(weights, here) for weights in placed]
            told = sum(s * output.logits.log_softmax(-1) for s, output in zip(shares, outputs, strict=True))
            mean.add(_cross_entropy(told, here["labels"], ahead) or 0.0, _count(here["labels"], ahead))
        return mean.value

    @torch.no_grad()
    def loss(self, weights: Weights) -> float:
        """The model's own loss with these weights, averaged over the labels of the data: if it is seen to be their
        cross-entropy, or else over examples."""
        placed = self.network.placed(weights)
        own, by_example = {ahead: _Mean() for ahead in _PLACES}, _Mean()
        open_to = set(_PLACES) if self._ahead is None else {self._ahead}
        for here in self._batches():
            output = self.network(placed, here)
            found = float(output.loss if self.objective is None else self.objective(output, here))
            by_example.add(found, len(next(iter(here.values()))))
            if self.objective is None:
                for ahead in open_to:
                    own[ahead].add(found, _count(here["labels"], ahead))
                if self._ahead is None:
                    open_to = {ahead for ahead in open_to if _fits(output, here["labels"], ahead)}
        if self.objective is not None or not open_to:
            return by_example.value
        if len(open_to) == 1:
            self._ahead = min(open_to)
        return own[max(open_to)].value  # where both are open, both are the loss of every batch

    def _batches(self) -> Iterator[Batch]:
        """Those with something to predict: the mean over nothing is no number."""
        for batch in batches(self.data):
            if self.objective is not None or not bool((batch["labels"] == NO_LABEL).all()):
                yield {name: tensor.to(self.network.device) for name, tensor in batch.items()}


@dataclass
class _Mean:
    """Of what is known of one batch after another."""

    total: float = 0.0
    count: int = 0

    def add(self, found: float, count: int) -> None:
        """Of so many terms; the mean over none is no number."""
        self.total += found * count if count else 0.0
        self.count += count

    @property
    def value(self) -> float:
        if not self.count:
            raise HfAlignError("nothing in the data is left to predict")
        return self.total / self.count


def _fits(output: Any, labels: Tensor, ahead: int) -> bool:
    """Whether a model's own loss is the cross-entropy of the labels so many places ahead."""
    own = float(output.loss)
    if not _count(labels, ahead):
        return math.isnan(own)
    return _is_close(_cross_entropy(getattr(output, "logits", None), labels, ahead), own)


def _count(labels: Tensor, ahead: int) -> int:
    """How many terms the cross-entropy of labels so many places ahead is the mean of."""
    return int((_told(labels, ahead) != NO_LABEL).sum())


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
    return labels[:, ahead:] if ahead and labels.ndim > 1 else labels


def _is_close(found: float | None, expected: float) -> bool:
    return found is not None and abs(found - expected) <= ROUNDING * abs(expected)
