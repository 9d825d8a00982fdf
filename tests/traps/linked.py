"""Queries with a learned scale for each dimension, read through a softplus, and blocks whose values are scaled before
they are normalised.

Such a scale may go into the weights about it if these could be anything. Each part here that comes after the first of
its kind breaks that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, Attention, RMSNorm, TowerConfig, towers


class Linked(Attention):
    """Queries are scaled, and nothing turns them."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.scale = nn.Parameter(torch.ones(config.head_dim))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def factor(self) -> Tensor:
        return functional.softplus(self.scale) * 1.4

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return super().score(q * self.factor(), k, positions)


class LinkedTurned(Linked):
    """Queries and keys are turned behind the scale."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        q, k = (Attention.rotate(self, t, positions) for t in (q * self.factor(), k))
        return Attention.score(self, q, k, positions)


class LinkedBehind(Linked):
    """They are turned before."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return super().score(*(Attention.rotate(self, t, positions) for t in (q, k)), positions)


class LinkedVarying(Linked):
    """Beside the scale there is a factor for each dimension."""

    def factor(self) -> Tensor:
        return super().factor() * torch.arange(1, 1 + self.config.head_dim)


class LinkedShifted(Linked):
    """The scale is never less than one."""

    def factor(self) -> Tensor:
        return 1 + super().factor()


class LinkedTwice(Linked):
    """Keys are scaled through another link."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return super().score(q, k * self.scale.exp(), positions)


class LinkedShown(Linked):
    """The scale is seen in another place, too."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return super().mix(shares, v) * functional.softplus(self.scale).mean()


class LinkedMeasured(Linked):
    """The length of scaled queries is seen."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return (
            super().score(q, k, positions)
            + (q * self.factor()).square().sum(-1, keepdim=True) * positions[:, None, None]
        )


class LinkedNormed(Linked):
    """Queries and keys have norms with gains before."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return super().score(self.q_norm(q), self.k_norm(k), positions)


class LinkedNormedShown(LinkedNormed):
    """The gain of the queries is that of the values, too."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return super().mix(shares, self.q_norm(v))


class LinkedNormedBeside(LinkedNormed):
    """Something is added to the queries between both."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return Linked.score(self, self.q_norm(q) + 1.0, self.k_norm(k), positions)


class Weighed(MLP):
    """What two maps write is scaled and then normalised."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.other = nn.Linear(config.intermediate_size, config.intermediate_size)
        self.weight = nn.Parameter(torch.zeros(config.intermediate_size))

    def written(self, x: Tensor) -> Tensor:
        return self.up(x) + self.other(torch.tanh(self.gate(x)))

    def weighed(self, y: Tensor) -> Tensor:
        return y * (1.0 + self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.written(x))

    def read(self, y: Tensor) -> Tensor:
        y = self.weighed(y)
        return self.down(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5))


class WeighedBeside(Weighed):
    """What is not scaled is seen, too."""

    def read(self, y: Tensor) -> Tensor:
        return super().read(y) + self.down(torch.tanh(y))


class WeighedShifted(Weighed):
    """A number is added before."""

    def written(self, x: Tensor) -> Tensor:
        return super().written(x) + 1.0


class WeighedAgain(Weighed):
    """It is scaled twice."""

    def weighed(self, y: Tensor) -> Tensor:
        return super().weighed(super().weighed(y))


class WeighedRead(Weighed):
    """A map reads what is not scaled."""

    def read(self, y: Tensor) -> Tensor:
        return super().read(y) + self.down(self.other(y))


class Merged(MLP):
    """Blocks of units are normalised, each by itself with the same gain and bias, and read together."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.norm = nn.LayerNorm(config.intermediate_size // 2)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x).unflatten(-1, (2, -1))).flatten(-2)


class MergedBent(Merged):
    """They are bent before they are read."""

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(super().hidden(x))


class MergedBeside(Merged):
    """The first block is bent beside that."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(h) + torch.tanh(h[..., : h.shape[-1] // 2]).sum(-1, keepdim=True)


globals().update(towers(__name__, **{
    f"{part.__name__}Tower": part for part in list(globals().values())
    if isinstance(part, type) and issubclass(part, (Linked, Weighed, Merged))
}))  # fmt: skip
