"""Decoders that add to the stream what a learned probe finds in it, as heads that pool do: its query is no input's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import Tower, TowerConfig

_HEADS = 2


class Pool(nn.Module):
    probes = 1

    def __init__(self, size: int) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(self.probes, size))
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part) for part in (self.query(x), self.keys(x), self.values(x)))
        mixed = self.score(q, k).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2)).mean(1, keepdim=True)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (_HEADS, -1)).transpose(1, 2)

    def query(self, x: Tensor) -> Tensor:
        return self.q(self.probe.expand(len(x), -1, -1))

    def keys(self, x: Tensor) -> Tensor:
        return self.k(x)

    def values(self, x: Tensor) -> Tensor:
        return self.v(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return 0.5 * q @ k.transpose(-1, -2)


class TwoProbes(Pool):
    probes = 2


class KeysSeen(Pool):
    """Values are keys, too."""

    def values(self, x: Tensor) -> Tensor:
        return self.v(x) + self.k(x)


class QueriesRead(Pool):
    """The map that reads the probe reads the stream elsewhere."""

    def values(self, x: Tensor) -> Tensor:
        return self.v(x) + self.q(x)


class ProbeSeen(Pool):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.probe


class KeysShared(Pool):
    """Both heads have the keys of the first: these meet two queries."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k[:, :1].repeat(1, _HEADS, 1, 1))


class KeysNormed(Pool):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, functional.normalize(k, dim=-1))


class QueriesUneven(Pool):
    """Part of the query is twice as large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.cat((2 * q[..., :2], q[..., 2:]), -1) @ k.transpose(-1, -2)


class ScoresBent(Pool):
    """What reaches the softmax depends on the input as well."""

    def query(self, x: Tensor) -> Tensor:
        return super().query(x) * x.mean((1, 2), keepdim=True)


class Fused(Pool):
    """As torch's own attention stores its weights."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        del self.q, self.k, self.v
        self.weight, self.bias = nn.Parameter(torch.randn(3 * size, size)), nn.Parameter(torch.randn(3 * size))

    def rows(self, at: int) -> tuple[Tensor, Tensor]:
        size = self.probe.shape[-1]
        weights, biases = (stored.split([size, 2 * size]) for stored in (self.weight, self.bias))
        return weights[at], biases[at]

    def query(self, x: Tensor) -> Tensor:
        return functional.linear(self.probe.expand(len(x), -1, -1), *self.rows(0))

    def keys(self, x: Tensor) -> Tensor:
        return functional.linear(x, *self.rows(1)).chunk(2, -1)[0]

    def values(self, x: Tensor) -> Tensor:
        return functional.linear(x, *self.rows(1)).chunk(2, -1)[1]


class FusedMeasured(Fused):
    """The weight is seen as a whole, too."""

    def values(self, x: Tensor) -> Tensor:
        return super().values(x) * self.weight.square().mean()


class PooledTower(Tower):
    pool: type[Pool] = Pool

    def more(self, config: TowerConfig) -> None:
        self.pooled = self.pool(config.hidden_size)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = super().run(x, positions, seen, cache)
        return x + self.pooled(x)


class PooledTwoProbesTower(PooledTower):
    pool = TwoProbes


class PooledKeysSeenTower(PooledTower):
    pool = KeysSeen


class PooledQueriesReadTower(PooledTower):
    pool = QueriesRead


class PooledProbeSeenTower(PooledTower):
    pool = ProbeSeen


class PooledKeysSharedTower(PooledTower):
    pool = KeysShared


class PooledKeysNormedTower(PooledTower):
    pool = KeysNormed


class PooledQueriesUnevenTower(PooledTower):
    pool = QueriesUneven


class PooledScoresBentTower(PooledTower):
    pool = ScoresBent


class PooledFusedTower(PooledTower):
    pool = Fused


class PooledFusedMeasuredTower(PooledTower):
    pool = FusedMeasured
