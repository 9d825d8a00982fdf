"""Decoders with a LayerNorm between two streams that could turn without it, each for itself, and some that could not.

What is looked up is normalised before the first block, as in the images of CLIP, and every block reads the stream
behind a norm of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .biases import BiasedTower, Layer
from .tower import RMSNorm, Tower, TowerConfig


class StreamsBetweenTower(BiasedTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.first = nn.LayerNorm(config.hidden_size)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return Tower.run(self, self.enter(x + self.positions(positions)), positions, seen, cache)

    def enter(self, x: Tensor) -> Tensor:
        return self.first(x)


class Raw(Layer):
    """The block reads the stream as it is: linear maps see its mean."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return x + self.attn(x, positions, seen, cache)


class RawLeaning(Raw):
    """Its mean is a factor, too."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return x + self.attn(x, positions, seen, cache) * x.mean(-1, keepdim=True)


class RawEarly(Raw):
    """Its mean is a factor of what is read of the next stage."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        y = super().forward(x, positions, seen, cache)
        return x + self.mlp(y) * x.mean(-1, keepdim=True)


class Inner(Layer):
    """It reads more of what its norm writes, the larger the mean of the stream is."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return x + self.attn(self.attn_norm(x) * (1 + x.mean(-1, keepdim=True)), positions, seen, cache)


class StreamsRawTower(StreamsBetweenTower):
    """The last block does."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.layers.append(Raw(config, len(self.layers), self.attention, self.mlp))


class StreamsRawLaidTower(StreamsRawTower):
    """All tokens of the batch are laid behind each other, and apart again."""

    def enter(self, x: Tensor) -> Tensor:
        return super().enter(x).flatten(0, 1).unsqueeze(0).squeeze(0).unflatten(0, x.shape[:2])


class StreamsRawHalvesTower(StreamsRawTower):
    """One half of what a linear map writes is added."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.both = nn.Linear(config.hidden_size, 2 * config.hidden_size)

    def enter(self, x: Tensor) -> Tensor:
        first, second = self.both(x).chunk(2, -1)
        return super().enter(first) + second


class StreamsRawCrossedTower(StreamsRawTower):
    """The two halves of its channels are laid into each other, one from each in turn."""

    def enter(self, x: Tensor) -> Tensor:
        return super().enter(x).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class StreamsRawLeaningTower(StreamsBetweenTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.layers.append(RawLeaning(config, len(self.layers), self.attention, self.mlp))


class StreamsRawEarlyTower(StreamsBetweenTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.layers.append(RawEarly(config, len(self.layers), self.attention, self.mlp))


class StreamsRawInnerTower(StreamsBetweenTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        for block in (Inner, Raw):
            self.layers.append(block(config, len(self.layers), self.attention, self.mlp))


class StreamsShiftedTower(StreamsBetweenTower):
    """A number is added before the norm, and another one behind: neither stream may take another sign."""

    def enter(self, x: Tensor) -> Tensor:
        return super().enter(x + 0.5) - 0.25


class StreamsLeaningTower(StreamsBetweenTower):
    """The mean of the stream is a factor."""

    def enter(self, x: Tensor) -> Tensor:
        x = super().enter(x)
        return x * (1 + x.mean(-1, keepdim=True))


class Averaged(nn.LayerNorm):
    """What is read of it is taken over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y.mean(1, keepdim=True)


class StreamsAveragedTower(StreamsBetweenTower):
    """The gain of the last norm goes into the head, its bias does not."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.norm = Averaged(config.hidden_size)


class Merged(nn.LayerNorm):
    """What is read of it is read of two tokens at once."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.merge = nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        merged: Tensor = self.merge(torch.stack([y, y.roll(1, 1)], -2).flatten(-2))
        return merged


class StreamsMergedTower(StreamsBetweenTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.norm = Merged(config.hidden_size)


class StreamsUncentredTower(StreamsBetweenTower):
    """The last norm does not centre."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.norm = RMSNorm(config.hidden_size)


class StreamsBentTower(StreamsBetweenTower):
    """What is between no rotation goes through."""

    def enter(self, x: Tensor) -> Tensor:
        return torch.tanh(super().enter(x))


class StreamsBeforeTower(StreamsBetweenTower):
    """Nor through what is before."""

    def enter(self, x: Tensor) -> Tensor:
        return super().enter(torch.tanh(x))


class StreamsBesideTower(StreamsBetweenTower):
    """What goes in is added to what comes out: there is one stream."""

    def enter(self, x: Tensor) -> Tensor:
        return super().enter(x) + x


class StreamsTwoTower(StreamsBetweenTower):
    """Another gain stays in the stream behind."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.second = nn.LayerNorm(config.hidden_size)

    def enter(self, x: Tensor) -> Tensor:
        x = super().enter(x)
        return x + self.second(x)


class StreamsScaledTower(StreamsBetweenTower):
    """The gain is a factor elsewhere."""

    def enter(self, x: Tensor) -> Tensor:
        return super().enter(x) + x.mean(1, keepdim=True).detach() * 0 + self.first.weight
