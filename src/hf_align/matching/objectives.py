"""What learned matching lowers: a loss of the merged network, with labels or with none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hf_align.running.network import Batch, Network, Weights, predictions


class Objective(ABC):
    """A loss of weights on random rows of some inputs."""

    @abstractmethod
    def loss(self, network: Network, merged: Weights, rows: int, rng: Generator) -> Tensor:
        """The loss (nats where the model predicts classes) of the merged weights on `rows` random rows."""


@dataclass(frozen=True)
class OnLabels(Objective):
    """The model's own loss on labelled data."""

    data: Batch

    def loss(self, network: Network, merged: Weights, rows: int, rng: Generator) -> Tensor:
        return network.loss(merged, drawn(self.data, rows, rng, network.device))


@dataclass(frozen=True)
class TowardsSources(Objective):
    """Distillation towards each model on its inputs: no labels, and no data if the inputs are the models' own.

    Cross-entropy to the source's prediction for classes; the squared distance for predictions of any other kind.
    """

    sources: tuple[Weights, ...]
    inputs: tuple[Batch, ...]

    def loss(self, network: Network, merged: Weights, rows: int, rng: Generator) -> Tensor:
        each = max(1, rows // len(self.sources))
        pairs = zip(self.sources, self.inputs, strict=True)
        return torch.stack([_towards(network, merged, s, drawn(x, each, rng, network.device)) for s, x in pairs]).mean()


def _towards(network: Network, merged: Weights, source: Weights, batch: Batch) -> Tensor:
    with torch.no_grad():
        taught = network(source, batch)
    target, found = predictions(taught), predictions(network(merged, batch))
    if getattr(taught, "logits", None) is None:
        return (found - target).square().mean() / target.square().mean()
    return -(target.softmax(-1) * found.log_softmax(-1)).sum(-1).mean()


def drawn(data: Batch, rows: int, rng: Generator, device: torch.device) -> Batch:
    """Random rows, placed."""
    chosen = torch.randint(len(next(iter(data.values()))), (rows,), generator=rng)
    return {name: tensor[chosen].to(device) for name, tensor in data.items()}
