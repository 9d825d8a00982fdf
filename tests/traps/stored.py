"""Decoders whose norms know their statistics, as PatchTST's: a constant of the stream is one behind them, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
