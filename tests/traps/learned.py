"""Decoders that add to the stream what scores of all places, that two maps make of a norm's output, choose of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .tower import RMSNorm, Tower, TowerConfig


class LearnedTower(Tower):
    kind: type[nn.Module] = nn.LayerNorm
    padding = 0
    narrower = 1
    bias = False

    def more(self, config: TowerConfig) -> None:
        size = config.hidden_size
        self.first_norm = self.kind(size)
        kernel = 1 + 2 * self.padding
        self.first = nn.Conv1d(size, size // self.narrower, kernel, padding=self.padding, groups=2, bias=self.bias)
        self.second = nn.Conv1d(size // self.narrower, 3, 1, bias=False)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = super().run(x, positions, seen, cache)
        normed = self.first_norm(x)
        return x + (self.score(normed.mT) @ normed.tanh()).sum(1, keepdim=True)

    def score(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).softmax(-1)


class LearnedBiasedTower(LearnedTower):
    """A constant between the maps is one of the scores."""

    bias = True


class LearnedUncentredTower(LearnedTower):
    kind = RMSNorm


class LearnedPaddedTower(LearnedTower):
    padding = 1


class LearnedWiderTower(LearnedTower):
    """The first map reads two places at once."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.first = nn.Conv1d(config.hidden_size, config.hidden_size, 2, bias=False)

    def score(self, x: Tensor) -> Tensor:
        return super().score(torch.cat([x, x[..., :1]], -1))


class LearnedSomeTower(LearnedTower):
    """The second map reads half of what the first one makes."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.first = nn.Conv1d(config.hidden_size, 2 * config.hidden_size, 1, bias=False)

    def score(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[:, : x.shape[1]]).softmax(-1)


class LearnedNarrowTower(LearnedTower):
    narrower = 2


class LearnedBentTower(LearnedTower):
    def score(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).softmax(-1)


class LearnedAcrossTower(LearnedTower):
    """A softmax over the scores of one place."""

    def score(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).softmax(1)


class LearnedBesideTower(LearnedTower):
    """The scores are seen, too."""

    def score(self, x: Tensor) -> Tensor:
        scores = self.second(self.first(x))
        return scores.softmax(-1) + 0.1 * scores


class LearnedTwiceTower(LearnedTower):
    """The second map reads the norm, too."""

    def score(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).softmax(-1) + self.second(x).softmax(-1)
