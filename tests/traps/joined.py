"""Decoders whose text has two norms before its first block, one for each part, as a picture and the words behind it.

Every block is normalised behind its sums, so that the bias of a norm may go into what reads it and into the bias that
meets it in the sum: here that of all norms before the first block at once, or of none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .biases import BiasedTower, Layer
from .tower import Tower, TowerConfig


class Behind(Layer):
    """Norms stand behind the sums."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.attn_norm(x + self.attn(x, positions, seen, cache))
        return self.mlp_norm(x + self.mlp(x))


class JoinedTower(BiasedTower):
    """The words from the fifth on have a norm of their own."""

    block = Behind
    parts = (4, 6)

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.enter = nn.ModuleList(nn.LayerNorm(config.hidden_size) for _ in self.parts)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.join(x + self.positions(positions))
        return Tower.run(self, x, positions, seen, cache)

    def join(self, x: Tensor) -> Tensor:
        pieces = x.split([*self.parts[:-1], x.shape[1] - sum(self.parts[:-1])], 1)
        return torch.cat([norm(piece) for norm, piece in zip(self.enter, pieces, strict=True)], 1)


class JoinedThreeTower(JoinedTower):
    """Three parts have one each."""

    parts = (2, 3, 5)


class JoinedAgainTower(JoinedTower):
    """The first norm writes a third part, too, so that all places show one of two biases."""

    def join(self, x: Tensor) -> Tensor:
        first, second = self.enter
        return torch.cat([first(x[:, :3]), second(x[:, 3:6]), first(x[:, 6:])], 1)


class JoinedTwiceTower(JoinedTower):
    """One of them is twice as long where it is joined."""

    def join(self, x: Tensor) -> Tensor:
        first, second = self.enter
        return torch.cat([2 * first(x[:, :4]), second(x[:, 4:])], 1)


class JoinedTurnedTower(JoinedTower):
    """One of them has its entries the other way round."""

    def join(self, x: Tensor) -> Tensor:
        first, second = self.enter
        return torch.cat([first(x[:, :4]).flip(-1), second(x[:, 4:])], 1)


class JoinedBareTower(JoinedTower):
    """A third part has no norm before it."""

    def join(self, x: Tensor) -> Tensor:
        first, second = self.enter
        return torch.cat([first(x[:, :3]), x[:, 3:5], second(x[:, 5:])], 1)


class JoinedSeenTower(JoinedTower):
    """One of them is also seen by itself."""

    def join(self, x: Tensor) -> Tensor:
        first, second = (norm(piece) for norm, piece in zip(self.enter, x.split([4, x.shape[1] - 4], 1), strict=True))
        return torch.cat([first, second * first.sum((1, 2), keepdim=True).tanh()], 1)


class JoinedSumTower(JoinedTower):
    """They are added to each other at some places."""

    def join(self, x: Tensor) -> Tensor:
        first, second = self.enter
        both = first(x[:, :3]) + second(x[:, :3])
        return torch.cat([both, first(x[:, 3:6]), second(x[:, 6:])], 1)


class JoinedMarkTower(JoinedTower):
    """The first place shows a learned vector, as the end of a row of a picture does."""

    parts = (1,)

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.mark = nn.Parameter(torch.randn(config.hidden_size))

    def join(self, x: Tensor) -> Tensor:
        mark = self.mark.reshape(1, 1, -1).expand(len(x), 1, -1)
        return torch.cat([mark, self.enter[0](x[:, 1:])], 1)


class JoinedMarkSeenTower(JoinedMarkTower):
    """It is seen by itself, too."""

    def join(self, x: Tensor) -> Tensor:
        return super().join(x) * self.mark.tanh()


class JoinedMarkAcrossTower(JoinedMarkTower):
    """It is laid beside the entries of the others, not beside their places."""

    def join(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        mark = self.mark[:half].expand(*x.shape[:2], half)
        return torch.cat([self.enter[0](x)[..., :half], mark], -1)
