"""Decoders that add to the stream what a map reads of a mean of it, with factors that sum to one, or nearly so."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .tower import Tower, TowerConfig


class MaskedTower(Tower):
    def more(self, config: TowerConfig) -> None:
        self.pooled = nn.LayerNorm(config.hidden_size)
        self.read = nn.Linear(config.hidden_size, config.hidden_size)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = super().run(x, positions, seen, cache)
        return x + self.pool(self.pooled(x), self.factors(x))

    def factors(self, x: Tensor) -> Tensor:
        return x.square().mean(-1)

    def pool(self, x: Tensor, factors: Tensor) -> Tensor:
        total = (x * factors.unsqueeze(-1)).sum(1, keepdim=True)
        return self.read(total / self.count(factors)[:, None, None])

    def count(self, factors: Tensor) -> Tensor:
        return factors.sum(1)


class MaskedClampedTower(MaskedTower):
    """The divisor is kept from being small."""

    def count(self, factors: Tensor) -> Tensor:
        return super().count(factors).clamp(min=100)


class MaskedOtherwiseTower(MaskedTower):
    """Other factors are counted."""

    def count(self, factors: Tensor) -> Tensor:
        return super().count(factors.square())


class MaskedPartlyTower(MaskedTower):
    """Not all of them are counted."""

    def count(self, factors: Tensor) -> Tensor:
        return super().count(factors[:, 1:])


class MaskedTotalTower(MaskedTower):
    """The sum is seen, too."""

    def pool(self, x: Tensor, factors: Tensor) -> Tensor:
        total = (x * factors[..., None]).sum(1, keepdim=True)
        return self.read(total / self.count(factors)[:, None, None]) + total


class MaskedRoundedTower(MaskedTower):
    """What is counted is shown or not, but more or less of it is summed."""

    def count(self, factors: Tensor) -> Tensor:
        return super().count(factors.bool())


class MaskedWideTower(MaskedTower):
    """Each channel has factors of its own."""

    def factors(self, x: Tensor) -> Tensor:
        return x.square()

    def pool(self, x: Tensor, factors: Tensor) -> Tensor:
        return self.read((x * factors).sum(1, keepdim=True) / factors.sum(1, keepdim=True))


class MaskedItselfTower(MaskedTower):
    """A constant changes the factors as well."""

    def pool(self, x: Tensor, factors: Tensor) -> Tensor:
        return self.read((x * x).sum(1, keepdim=True) / x.sum(1, keepdim=True))
