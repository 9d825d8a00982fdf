"""Decoders with biases everywhere and LayerNorms, as GPT-2: what may move from one bias to another, and what may not.

Between the norms and the sums that they read, constants may move: the bias of values joins that of outputs if the
shares of attention sum to one, that of keys has no effect if shares are a softmax, means of all that writes the stream
may go if every reader centres. Each part here breaks one of these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, Attention, Block, RMSNorm, Tower, TowerConfig


class Biased(Attention):
    """Attention without positions, with biases."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        for name in "qkvo":
            plain = getattr(self, name)
            setattr(self, name, nn.Linear(plain.in_features, plain.out_features))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


class Plain(MLP):
    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        del self.gate
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def hidden(self, x: Tensor) -> Tensor:
        return functional.gelu(self.up(x))


class Layer(Block):
    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, attention, mlp)
        self.attn_norm, self.mlp_norm = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.join(x, self.attn(self.attn_norm(x), positions, seen, cache))
        return self.join(x, self.mlp(self.mlp_norm(x)))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class BiasedTower(Tower):
    """All of it plain, with learned positions."""

    attention, mlp, block = Biased, Plain, Layer

    def more(self, config: TowerConfig) -> None:
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + self.positions(positions), positions, seen, cache)


class Alpha(Layer):
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, alpha=2)


class SubAlpha(Layer):
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sub(x, y, alpha=-0.5)


class Addcmul(Layer):
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.addcmul(x, y, torch.ones_like(y), value=3)


class Lerp(Layer):
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(x, y, 0.3)


class StackSum(Layer):
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack((x, y, y)).sum(0)


class Slopes(Layer):
    """The second summand fades with the position."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


class Clamped(Layer):
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y).clamp(-4, 4)


class Gated(Layer):
    """A gate for each branch, from the mean of the stream, which no norm sees."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y * torch.sigmoid(x.mean(-1, keepdim=True))


class Unbiased(Biased):
    """Values and outputs without bias: the bias of the norm adds a constant to values."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        for name in "vo":
            plain = getattr(self, name)
            setattr(self, name, nn.Linear(plain.in_features, plain.out_features, bias=False))


class UnbiasedSeen(Unbiased):
    """The length of values is seen as well."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        length = self.v(x).norm(dim=-1, keepdim=True)
        return super().forward(x, positions, seen, cache) * torch.sigmoid(length)


class UnbiasedBent(Unbiased):
    """Outputs are bent: their mean is seen."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return torch.tanh(super().forward(x, positions, seen, cache))


class Beside(Layer):
    """Attention and the MLP read together; the constant of values may go into the bias of the MLP."""

    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, Unbiased, mlp)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        read = self.attn_norm(x)
        return self.sum(x, self.attn(read, positions, seen, cache), self.mlp(read))

    def sum(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + (y + z)


class Fainter(Beside):
    """The bias of the MLP counts half."""

    def sum(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + (y + 0.5 * z)


class Doubled(Beside):
    """The bias of the MLP counts twice."""

    def sum(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x + z) + (y + z)


class Measured(Beside):
    """The length of what the MLP writes is seen as well."""

    def sum(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + (y + z) * torch.sigmoid(z.norm(dim=-1, keepdim=True))


class Behind(Layer):
    """Norms after the blocks, which read the stream as it is: a constant of the positions may go into their biases."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.attn_norm(self.join(x, self.attn(self.read(x), positions, seen, cache)))
        return self.mlp_norm(self.join(x, self.mlp(self.read(x))))

    def read(self, x: Tensor) -> Tensor:
        return x


class BehindHalf(Behind):
    """Half of the stream goes past a block, and so half of the constant."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * x + y


class BehindSlopes(Behind):
    """What blocks read of the stream, and of a constant, grows with the position."""

    def read(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.arange(x.shape[1], dtype=x.dtype)[:, None])


class BehindShifted(Behind):
    """A block reads the stream of the position before, and of the first one nothing."""

    def read(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :-1], (0, 0, 1, 0))


class PlainEps(Layer):
    """An epsilon that is no rounding: the scale of the stream matters."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.attn_norm.eps = self.mlp_norm.eps = 2.0


class Mixed(Layer):
    """One of the two norms does not centre."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.mlp_norm = RMSNorm(self.config.hidden_size)


class Addmm(Plain):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.hidden(x).flatten(0, 1)
        return torch.addmm(self.down.bias, flat, self.down.weight.mT, beta=2, alpha=0.5).view_as(x)


class Bilinear(Plain):
    """A product of two affine maps: the bias of one scales the weights of the other."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.side = nn.Linear(config.hidden_size, config.intermediate_size)

    def hidden(self, x: Tensor) -> Tensor:
        return self.up(x) * self.side(x)


class Dead(Plain):
    """Weights that are multiplied by zero."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.side = nn.Linear(config.hidden_size, config.intermediate_size)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + 0.0 * self.side(x)


class Sink(Biased):
    """Shares that sum to less than one."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(x, positions, seen, cache)

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return (shares - 0.1).relu() @ v


class Sigmoid(Biased):
    """Shares that are not normalised: the bias of keys counts."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return functional.logsigmoid(q @ k.transpose(-1, -2)) * 3

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return shares @ v


class Faded(Biased):
    """Shares that fade with the distance, after the softmax."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(v.shape[2]) - v.shape[2] + 1
        return (shares * (0.9**-distance).to(v.dtype)) @ v


class OverHeads(Biased):
    """A second softmax, over heads."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return (3 * shares).softmax(1) @ v


class Talking(Biased):
    """Shares are mixed between heads, by rows that do not sum to one."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.talk = nn.Linear(config.num_attention_heads, config.num_attention_heads, bias=False)

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return self.talk(shares.transpose(1, -1)).transpose(1, -1) @ v


class Capped(Biased):
    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return 2 * torch.tanh(super().score(q, k, positions) / 2)


class NormedKeys(Biased):
    """Keys are normalised after their bias."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return super().score(functional.normalize(q, dim=-1), functional.normalize(k, p=1.0, dim=-1), positions) * 3


class Distances(Biased):
    """Keys by their distance from queries."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return -torch.cdist(q, k.expand(-1, q.shape[1], -1, -1))


class Bounded(Biased):
    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return (shares @ v).clamp(min=-1.0, max=1.0)


class Hardmax(Biased):
    """Only the largest share counts, with its size."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return (shares * (shares >= shares.amax(-1, keepdim=True))) @ v


class Halved(Biased):
    """Half of the channels of values is read from the token itself."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        mixed = shares @ v
        own = v[:, :, -mixed.shape[2] :].expand_as(mixed)
        return torch.cat((mixed[..., :2], own[..., 2:] * mixed[..., :2]), -1)


class Grouped(Behind):
    """Values read the stream in two groups of channels: its constant goes into their bias."""

    kernel = 1

    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, attention, mlp)
        sizes = self.attn.v.in_features, self.attn.v.out_features, self.kernel
        self.attn.v = _InPlaces(*sizes, groups=2, padding=self.kernel // 2)


class GroupedThroughout(Grouped):
    """So are queries and keys; their one pair of heads meets the groups of the stream twice in one product."""

    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, attention, mlp)
        for name in "qk":
            plain = getattr(self.attn, name)
            setattr(self.attn, name, _InPlaces(plain.in_features, plain.out_features, self.kernel, groups=2))


class GroupedPadded(Grouped):
    """They also read the places beside, and zeros at the ends."""

    kernel = 3


class GroupedBent(Grouped):
    """The stream is bent before they read it."""

    def read(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class GroupedSlopes(Grouped):
    """What they read of the stream, and of its constant, grows with the position."""

    read = BehindSlopes.read


class _InPlaces(nn.Conv1d):
    """A convolution over places, of a value with channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Channels(Plain):
    """Units are normalised over channels and places, and then read in place."""

    kernel = 1

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.norm = nn.GroupNorm(1, config.intermediate_size)
        size = config.intermediate_size
        self.places = nn.Conv1d(size, size, self.kernel, padding=self.kernel // 2)

    def hidden(self, x: Tensor) -> Tensor:
        return functional.gelu(self.places(self.between(self.norm(super().hidden(x).transpose(1, 2)))).transpose(1, 2))

    def between(self, x: Tensor) -> Tensor:
        return x


class ChannelsPadded(Channels):
    """With zeros beside the ends."""

    kernel = 3


class ChannelsBent(Channels):
    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class ChannelsSlopes(Channels):
    """What is read grows with the place."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[-1], device=x.device).to(x.dtype)


def _towers() -> dict[str, type[Tower]]:
    found: dict[str, type[Tower]] = {}
    for part in list(globals().values()):
        for place, base in (("attention", Biased), ("mlp", Plain), ("block", Layer)):
            if isinstance(part, type) and issubclass(part, base) and part is not base:
                label = f"{part.__name__}Tower"
                found[label] = type(label, (BiasedTower,), {place: part, "__module__": __name__})
    return found


PARTS = tuple(_towers())
globals().update(_towers())
