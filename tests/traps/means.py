"""Decoders whose head reads the stream as it is, and all else behind LayerNorms: only the head sees its mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .biases import BiasedTower, Layer
from .tower import MLP, Attention, RMSNorm, TowerConfig


class Scaled(nn.Linear):
    """A head that reads the stream a second time, half as large."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(0.5 * x)


class MeansTower(BiasedTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.norm = nn.Identity()
        self.head = nn.Linear(config.hidden_size, config.vocab_size)


class MeansUnbiasedTower(MeansTower):
    """The head has no bias that could take a mean up."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class MeansTwiceTower(MeansTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.head = Scaled(config.hidden_size, config.vocab_size)


class Joined(nn.Linear):
    """A head that reads the stream, and a second map that also reads what a norm makes of it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.both = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(self.beside(x)).split(x.shape[1], 1)
        return super().forward(x) + first + second.tanh()

    def beside(self, x: Tensor) -> Tensor:
        return torch.cat((x, nn.functional.layer_norm(x, x.shape[-1:])), 1)


class Shifted(Joined):
    """The second map reads the stream and a number."""

    def beside(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), 1) + 1


class MeansJoinedTower(MeansTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.head = Joined(config.hidden_size, config.vocab_size)


class MeansShiftedTower(MeansTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.head = Shifted(config.hidden_size, config.vocab_size)


class MeansUncentredTower(MeansTower):
    """A norm does not centre."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.layers[0].mlp_norm = RMSNorm(config.hidden_size)


class MeansBentTower(MeansTower):
    """The head reads what no mean goes through."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.norm = nn.Tanh()


class MeansFactorTower(MeansTower):
    """The mean is a factor in the end."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = super().run(x, positions, seen, cache)
        return x * (1 + torch.tanh(x.mean(-1, keepdim=True)))


class Reused(Layer):
    """A norm behind attention that the layer reads once more, as an adapter does."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.attn_norm(self.join(x, self.attn(x, positions, seen, cache)))
        return self.join(x, self.mlp(self.attn_norm(x)))


class MeansReusedTower(BiasedTower):
    """Keys read the mean of a norm's bias, and nothing is left of what their own bias takes up."""

    block = Reused


class Narrow(nn.Module):
    """A head that sees little of the stream."""

    def __init__(self, config: TowerConfig, size: int) -> None:
        super().__init__()
        self.read = nn.Linear(config.hidden_size, size)
        self.out = nn.Linear(size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.gelu(self.read(x)))


class NarrowBeside(Narrow):
    """And more of it behind a norm."""

    def __init__(self, config: TowerConfig, size: int) -> None:
        super().__init__(config, size)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.beside = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.beside(self.norm(x))


class MeansNarrowTower(MeansTower):
    kind, size = Narrow, 3

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.head = self.kind(config, self.size)


class MeansWideTower(MeansNarrowTower):
    size = 64


class MeansBesideTower(MeansNarrowTower):
    kind = NarrowBeside


class MeansWrittenTower(MeansTower):
    """A norm writes into the stream."""

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.first = nn.LayerNorm(config.hidden_size)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(self.first(x), positions, seen, cache)


class Doubled(nn.Linear):
    """A head that first adds the stream to itself, many times over: there are 2^24 ways through."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(24):
            x = x + x.unsqueeze(0).squeeze(0)
        return super().forward(x)


class MeansDoubledTower(MeansTower):
    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.head = Doubled(config.hidden_size, config.vocab_size)


class Pressed(nn.Linear):
    """A head behind a norm that centres what one map makes of another: it loses a part of what the first one writes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(6, outputs)
        self.first, self.second = nn.Linear(inputs, 6), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.second(self.between(self.first(x)))))

    def between(self, y: Tensor) -> Tensor:
        return y


class MeansPressedTower(BiasedTower):
    kind: type[Pressed] = Pressed

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.head = self.kind(config.hidden_size, config.vocab_size)


class Mixed(Pressed):
    """Half of what the second map reads is of other tokens."""

    def between(self, y: Tensor) -> Tensor:
        there, here = y.chunk(2, -1)
        return torch.cat((there[:, 1:], here[:, :-1]), -1)


class MeansMixedTower(MeansPressedTower):
    kind = Mixed


class Skewed(Pressed):
    """Each entry of what the second map reads is of another token."""

    def between(self, y: Tensor) -> Tensor:
        rows, length, size = y.shape
        return y.contiguous().as_strided((rows, length - size + 1, size), (length * size, size, size + 1))


class MeansSkewedTower(MeansPressedTower):
    kind = Skewed


class Gained(Layer):
    """What each block writes has a gain of its own."""

    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, attention, mlp)
        self.attn_gain, self.mlp_gain = (nn.Parameter(torch.linspace(0.5, 1.5, config.hidden_size)) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.join(x, self.attn_gain * self.attn(self.attn_norm(x), positions, seen, cache))
        return self.join(x, self.mlp_gain * self.mlp(self.mlp_norm(x)))


class MeansGainedTower(MeansTower):
    block = Gained


class GainedCopies(Gained):
    """A gain is copied before it is a factor."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.join(x, self.attn_gain.clone() * self.attn(self.attn_norm(x), positions, seen, cache))
        return self.join(x, self.mlp(self.mlp_norm(x)) * self.mlp_gain.to(torch.float64).to(x.dtype))


class MeansGainedCopiesTower(MeansTower):
    block = GainedCopies


class GainedViews(Gained):
    """A gain is a view of what is stored."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.join(x, self.attn_gain[None, None] * self.attn(self.attn_norm(x), positions, seen, cache))
        return self.join(x, self.mlp(self.mlp_norm(x)) * self.mlp_gain.view(1, 1, -1))


class MeansGainedViewsTower(MeansTower):
    block = GainedViews


class GainedTwice(Gained):
    """A gain is read where nothing is written, too."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y * (1 + self.attn_gain.tanh().sum())


class MeansGainedTwiceTower(MeansTower):
    block = GainedTwice


class Behind(nn.Conv1d):
    """A head that reads each token and the two before it, and before the first one, that one."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.padded(x.mT)).mT

    def padded(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (2, 0), "replicate")


class MeansPaddedTower(MeansTower):
    kind: type[Behind] = Behind

    def more(self, config: TowerConfig) -> None:
        super().more(config)
        self.head = self.kind(config)


class BehindCopies(Behind):
    def padded(self, x: Tensor) -> Tensor:
        return torch.cat((torch.ones(*x.shape[:2], 2, dtype=x.dtype) * x[..., :1], x), -1)


class MeansCopiedTower(MeansPaddedTower):
    kind = BehindCopies


class BehindBent(Behind):
    """Before the first token lies what no mean goes through."""

    def padded(self, x: Tensor) -> Tensor:
        return torch.cat((x[..., :1].tanh(), x[..., :1].tanh(), x), -1)


class MeansBentBeforeTower(MeansPaddedTower):
    kind = BehindBent


class BehindScaled(Behind):
    """Before the first token it lies once more, and twice as large."""

    def padded(self, x: Tensor) -> Tensor:
        return torch.cat((torch.tensor([1.0, 2.0], dtype=x.dtype) * x[..., :1], x), -1)


class MeansScaledBeforeTower(MeansPaddedTower):
    kind = BehindScaled
