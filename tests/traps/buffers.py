"""Decoders that save more than parameters: masks, permutations, switches, counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, Attention, Block, Tower, towers


class Mask(MLP):
    """Channels that are off: all are on when the model is built."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("kept", torch.ones(config.intermediate_size, dtype=torch.bool))

    def activate(self, h: Tensor) -> Tensor:
        return functional.silu(h).masked_fill(~self.kept, 0.0)


class StreamMask(Block):
    """The same on the residual stream, as bytes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("kept", torch.ones(self.config.hidden_size, dtype=torch.uint8))

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(torch.where(self.kept.bool(), x, 0.0), positions, seen, cache)


class Order(Block):
    """An order of channels: none when the model is built."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("order", torch.arange(self.config.hidden_size))

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(x + torch.tanh(x[..., self.order]), positions, seen, cache)


class HeadOrder(Attention):
    """Which keys each query head reads: in order when the model is built."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("of", torch.arange(config.num_attention_heads))

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return shares @ v[:, self.of]


class Switch(MLP):
    """A switch that is off when the model is built."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("on", torch.tensor(False))

    def activate(self, h: Tensor) -> Tensor:
        return torch.where(self.on, h * h.roll(1, -1), functional.silu(h))


class Branch(MLP):
    """The same switch, as a branch of Python."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("on", torch.tensor(False))

    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1) if self.on else functional.silu(h)


class Count(MLP):
    """How many steps were trained: the exponent grows with them."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("steps", torch.tensor(0))

    def activate(self, h: Tensor) -> Tensor:
        return functional.silu(h) + self.steps * h * h.roll(1, -1)


class Limits(MLP):
    """Limits of each unit, which nothing reaches when the model is built."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("least", torch.full((config.intermediate_size,), -torch.inf))
        self.register_buffer("most", torch.full((config.intermediate_size,), torch.inf))

    def activate(self, h: Tensor) -> Tensor:
        return torch.clamp(functional.silu(h), self.least, self.most)


class Zero(MLP):
    """A float that is zero when the model is built."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("strength", torch.tensor(0.0))

    def activate(self, h: Tensor) -> Tensor:
        return functional.silu(h) + self.strength * h * h.roll(1, -1)


class Statistics(Block):
    """A batch norm: its statistics are those of channels."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.norm = nn.BatchNorm1d(self.config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2), positions, seen, cache)


class HiddenStatistics(MLP):
    """Running means and scales of hidden units, saved as buffers."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("mean", torch.zeros(config.intermediate_size))
        self.register_buffer("scale", torch.ones(config.intermediate_size))

    def activate(self, h: Tensor) -> Tensor:
        return functional.silu((h - self.mean) * self.scale)


class Largest(MLP):
    """A buffer that every call writes to: the largest entry that was ever seen."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("largest", torch.ones(()))

    def activate(self, h: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, h.detach().abs().max()))
        return functional.relu(h) / self.largest


class Frequencies(Attention):
    """Rotary frequencies that are saved, and not those of the config."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("frequencies", torch.ones(config.head_dim // 2))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, :, None] * self.frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Slopes(Attention):
    """A slope for each head, all alike when the model is built."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.register_buffer("slopes", torch.ones(config.num_attention_heads))

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        distance = torch.arange(k.shape[2]) - positions[:, None, :, None]
        return super().score(q, k, positions) + distance * self.slopes[:, None, None]


class Rotation(Block):
    """A fixed rotation of the stream around an activation, as quantised models have: none when the model is built."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("rotation", torch.eye(self.config.hidden_size))

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(x + torch.tanh(x @ self.rotation) @ self.rotation.T, positions, seen, cache)


class Words(Tower):
    """Words that stand for others, and words that the head never writes."""

    def more(self, config: Any) -> None:
        self.register_buffer("stands_for", torch.arange(config.vocab_size))
        self.register_buffer("written", torch.ones(config.hidden_size, dtype=torch.int32))

    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        return super().forward(self.stands_for[input_ids], **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x, positions, seen, cache) * (self.written > 0)


class Unsaved(Block):
    """A table that is computed and not saved, from which channels differ."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("table", torch.linspace(0.5, 1.5, self.config.hidden_size), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(x * self.table, positions, seen, cache)


class UnsavedTower(Tower):
    block = Unsaved

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Unsaved):
            module.table.copy_(torch.linspace(0.5, 1.5, self.config.hidden_size))


globals().update(towers(
    __name__, MaskTower=Mask, StreamMaskTower=StreamMask, OrderTower=Order, HeadOrderTower=HeadOrder,
    SwitchTower=Switch, BranchTower=Branch, CountTower=Count, LimitsTower=Limits, ZeroTower=Zero,
    StatisticsTower=Statistics, HiddenStatisticsTower=HiddenStatistics, FrequenciesTower=Frequencies,
    SlopesTower=Slopes, LargestTower=Largest, RotationTower=Rotation,
))  # fmt: skip
