"""Decoders that add what a map reads of a norm, each of whose vectors is multiplied by a number first, as by a mask.

The constant of the norm is multiplied, too, so that no bias may take it up; a map keeps it as long as it has room for
it, which only a norm that centres leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import interpolate

from .tower import Tower, TowerConfig


def _long(x: Tensor) -> Tensor:
    """The vectors that are longer than most of the text, [batch, length, 1]."""
    lengths = x.square().mean(-1, keepdim=True)
    return lengths > lengths.mean(1, keepdim=True)


class ScaledTower(Tower):
    """By a number that depends on the text."""

    biased = False

    def more(self, config: TowerConfig) -> None:
        size = config.hidden_size
        self.enter, self.read = self.normed(size), nn.Linear(size, size, bias=self.biased)

    def normed(self, size: int) -> nn.Module:
        return nn.LayerNorm(size)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = super().run(x, positions, seen, cache)
        return x + self.added(x)

    def added(self, x: Tensor) -> Tensor:
        return self.read(self.scaled(self.enter(x), x))

    def scaled(self, normed: Tensor, x: Tensor) -> Tensor:
        return normed * x.square().mean(-1, keepdim=True)


class ScaledBiasedTower(ScaledTower):
    """The map has a bias, which is not multiplied."""

    biased = True


class ScaledFilledTower(ScaledTower):
    """By zero at some places, and by one at others."""

    def scaled(self, normed: Tensor, x: Tensor) -> Tensor:
        return normed.masked_fill(_long(x), 0.0)


class ScaledThroughTower(ScaledTower):
    """Another map with a bias reads what it reads: the constant is no constant there."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.after = nn.Linear(config.hidden_size, config.hidden_size)

    def added(self, x: Tensor) -> Tensor:
        return self.after(super().added(x))


class ScaledCentredTower(ScaledTower):
    """What is centred is filled with ones before it has its gain."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.enter.bias = None

    def added(self, x: Tensor) -> Tensor:
        centred = (x - x.mean(-1, keepdim=True)).masked_fill(_long(x), 1.0)
        return self.read(centred * self.enter.weight)


class ScaledOnesTower(ScaledTower):
    """Some places are filled with ones."""

    def scaled(self, normed: Tensor, x: Tensor) -> Tensor:
        return normed.masked_fill(_long(x), 1.0)


class ScaledSomeTower(ScaledTower):
    """Each channel is filled at places of its own."""

    def scaled(self, normed: Tensor, x: Tensor) -> Tensor:
        return normed.masked_fill(x > 0, 0.0)


class ScaledItselfTower(ScaledTower):
    """By the mean of what the norm writes, which is that of its bias."""

    def scaled(self, normed: Tensor, x: Tensor) -> Tensor:
        return normed * normed.mean(-1, keepdim=True)


class ScaledInverseTower(ScaledTower):
    """What is divided is the number."""

    def scaled(self, normed: Tensor, x: Tensor) -> Tensor:
        return x.square().mean(-1, keepdim=True) / (normed + 10)


class ScaledTwiceTower(ScaledTower):
    """The same map reads it as it is, too."""

    biased = True

    def added(self, x: Tensor) -> Tensor:
        return super().added(x) + self.read(self.enter(x))


class ScaledStatisticsTower(ScaledTower):
    """A norm that knows its statistics does not centre: no map has room for its constant."""

    def normed(self, size: int) -> nn.Module:
        return nn.BatchNorm1d(size)

    def added(self, x: Tensor) -> Tensor:
        return super().added(x.flatten(0, 1)).reshape(x.shape)


class BareStatisticsTower(ScaledStatisticsTower):
    """Nor where nothing is multiplied."""

    def scaled(self, normed: Tensor, x: Tensor) -> Tensor:
        return normed


class BiasedStatisticsTower(BareStatisticsTower):
    """A bias takes it up."""

    biased = True


class ScaledNoConstantTower(ScaledTower):
    """There is none, and every part of the map but its mean is seen."""

    def normed(self, size: int) -> nn.Module:
        return nn.LayerNorm(size, bias=False)

    def scaled(self, normed: Tensor, x: Tensor) -> Tensor:
        return torch.mul(normed, x.square().mean(-1, keepdim=True))


class ResampledTower(ScaledTower):
    """A map with a bias reads means of two places, and between any two of them."""

    biased = True

    def added(self, x: Tensor) -> Tensor:
        return self.read(self.between(self.enter(x)))[:, ::2]

    def between(self, normed: Tensor) -> Tensor:
        wide = interpolate(normed.mT.unsqueeze(-1), (2 * normed.shape[1], 1), mode="bilinear")
        return self.seen(wide).squeeze(-1).mT

    def seen(self, wide: Tensor) -> Tensor:
        return wide


class ResampledBentTower(ResampledTower):
    """What is read of them is not linear."""

    def seen(self, wide: Tensor) -> Tensor:
        return torch.tanh(wide)


class ResampledAcrossTower(ResampledTower):
    """The entries of a vector are mixed with each other."""

    def between(self, normed: Tensor) -> Tensor:
        size = normed.shape[2]
        wide = interpolate(normed.unsqueeze(1), (2 * normed.shape[1], 2 * size), mode="bilinear")
        return wide.squeeze(1)[..., size // 2 : size // 2 + size]


class ResampledLinearTower(ResampledTower):
    """What is resampled comes from a map with a bias."""

    def normed(self, size: int) -> nn.Module:
        return nn.Linear(size, size)


class ResampledLinearPaddedTower(ResampledLinearTower):
    """Zeros stand beside it when it is resampled."""

    def between(self, normed: Tensor) -> Tensor:
        return super().between(functional.pad(normed, (0, 0, 0, 2)))[:, :-4]


class ResampledLinearBentTower(ResampledLinearTower):
    """What is read of it is not linear."""

    def seen(self, wide: Tensor) -> Tensor:
        return torch.tanh(wide)
