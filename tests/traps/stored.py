"""Decoders whose norms know their statistics, as PatchTST's: a constant of the stream is one behind them, too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .biases import BiasedTower
from .tower import Tower, TowerConfig


class StoredNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class BentNorm(StoredNorm):
    """What is behind the norm is no longer linear in the stream."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class StoredTower(BiasedTower):
    kind: type[StoredNorm] = StoredNorm

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        for layer in self.layers:
            layer.attn_norm, layer.mlp_norm = (self.kind(config.hidden_size) for _ in range(2))
        self.norm = nn.Identity()


class StoredBentTower(StoredTower):
    kind = BentNorm


class StoredTableTower(StoredTower):
    """Beside what a map writes from the tokens, the rows of a table are added in turn."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        del self.positions
        self.into = nn.Linear(config.hidden_size, config.hidden_size)
        self.places = nn.Parameter(torch.randn(1, 2, config.hidden_size))

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.into(x) + self.places.repeat(1, x.shape[1], 1)[:, : x.shape[1]]
        return Tower.run(self, x, positions, seen, cache)


class StoredBehindTower(BiasedTower):
    """A norm that knows its statistics multiplies what the units of a block read before they bend."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        for layer in self.layers:
            layer.mlp.norm, layer.mlp.hidden = StoredNorm(config.intermediate_size), partial(self.units, layer.mlp)

    def units(self, mlp: nn.Module, x: Tensor) -> Tensor:
        return functional.silu(mlp.norm(mlp.up(x)))


class StoredBehindSeenTower(StoredBehindTower):
    """What the norm reads is seen by itself."""

    def units(self, mlp: nn.Module, x: Tensor) -> Tensor:
        read = mlp.up(x)
        return functional.silu(mlp.norm(read)) * torch.sigmoid(read)


class StoredBehindTwiceTower(StoredBehindTower):
    """The norm reads other units, too."""

    def units(self, mlp: nn.Module, x: Tensor) -> Tensor:
        read = mlp.up(x)
        return functional.silu(mlp.norm(read)) + functional.silu(mlp.norm(read.tanh()))


class StoredBehindRolledTower(StoredBehindTower):
    """It reads them in another order."""

    def units(self, mlp: nn.Module, x: Tensor) -> Tensor:
        return functional.silu(mlp.norm(mlp.up(x).roll(1, -1)))


class StoredBehindHalfTower(StoredBehindTower):
    """Half of what it reads is none of them."""

    def units(self, mlp: nn.Module, x: Tensor) -> Tensor:
        read, half = mlp.up(x), mlp.up.out_features // 2
        return functional.silu(mlp.norm(torch.cat([read[..., :half], torch.tanh(read[..., half:])], -1)))
