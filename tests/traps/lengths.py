"""Decoders that do something else where the text is longer, or far along."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, Attention, Block, Tower, towers


def fold(h: Tensor) -> Tensor:
    """Neighbouring channels are multiplied: they are no set any more."""
    return h * h.roll(1, -1)


class Above(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return fold(h) if h.shape[1] > self.config.limit else functional.silu(h)


class Below(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return fold(h) if h.shape[1] < 4 else functional.silu(h)


class Even(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return fold(h) if h.shape[1] % 2 == 0 else functional.silu(h)


class Single(MLP):
    """One token on its own, as with a cache, but without one."""

    def activate(self, h: Tensor) -> Tensor:
        return fold(h) if h.shape[1] == 1 else functional.silu(h)


class LateTerm(MLP):
    """A term whose factor is zero up to the ninth position."""

    def activate(self, h: Tensor) -> Tensor:
        late = (torch.arange(h.shape[1]) - 8).clamp(min=0).to(h.dtype) / 8
        return functional.silu(h) + late[:, None] * fold(h)


class LateFactor(MLP):
    """Channels are weighted from the ninth position on."""

    def activate(self, h: Tensor) -> Tensor:
        channels = torch.linspace(0.5, 1.5, h.shape[-1], dtype=h.dtype)
        late = (torch.arange(h.shape[1]) > 8)[:, None]
        return functional.silu(h) * torch.where(late, channels, 1.0)


class LateMask(MLP):
    """The first channels are off from the ninth position on."""

    def activate(self, h: Tensor) -> Tensor:
        off = (torch.arange(h.shape[1]) > 8)[:, None] & (torch.arange(h.shape[-1]) < 4)
        return functional.silu(h).masked_fill(off, 0.0)


def bent_from(h: Tensor, place: int) -> Tensor:
    """Units are linear up to a place, and bent from there on; no branch says so."""
    return torch.cat([h[:, :place], h[:, place:].tanh()], 1)


class CutAtLimit(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return bent_from(h, self.config.limit)


class CutAtTwice(MLP):
    """A place that stands nowhere."""

    def activate(self, h: Tensor) -> Tensor:
        return bent_from(h, 2 * self.config.limit)


class CutAtNumber(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return bent_from(h, 700)


class CutAtSize(MLP):
    """As far as a table reaches."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.table = nn.Parameter(torch.ones(config.limit, 1))

    def activate(self, h: Tensor) -> Tensor:
        return bent_from(h, len(self.table)) * self.table.mean()


class PowerOfLength(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return h ** (1 + h.shape[1] // self.config.limit)


class PowerOfRoot(MLP):
    """By a number that stands nowhere, of a length that is no size any more."""

    def activate(self, h: Tensor) -> Tensor:
        return h ** (1 + int(h.shape[1] ** 0.5) // 50)


class RolledFrom(MLP):
    """A table of whole numbers says from which place on units are rolled."""

    def activate(self, h: Tensor) -> Tensor:
        limit, places = self.config.limit, torch.arange(h.shape[1])
        which = torch.tensor([0] * limit + [1] * limit)[: h.shape[1]]
        return torch.stack([h, h.roll(1, -1)])[which, :, places].transpose(0, 1)


class Chunked(MLP):
    """Pairs of chunks of eight: what is left over goes another way."""

    def hidden(self, x: Tensor) -> Tensor:
        whole = x.shape[1] // 8 * 8
        parts = [super().hidden(x[:, whole:])]
        if whole:
            chunks = x[:, :whole].unflatten(1, (-1, 8))
            parts.insert(0, torch.tanh(self.gate(chunks)).flatten(1, 2) * fold(self.up(x[:, :whole])))
        return torch.cat(parts, 1)


class Window(Attention):
    """Keys that are further back than eight are read by their absolute values."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        far = positions[:, None, :, None] - torch.arange(k.shape[2]) >= 8
        return torch.where(far, q.abs() @ k.abs().transpose(-1, -2), super().score(q, k, positions)) / 2


class Scaled(Attention):
    """Queries grow with the logarithm of their position: nothing that a symmetry would see."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        scale = (positions + 1).log2().clamp(min=3.0) / 3
        return super().score(q * scale[:, None, :, None].to(q.dtype), k, positions)


class Stretched(Attention):
    """Beyond sixteen positions all planes turn by another angle."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        longest = int(positions.max()) + 1
        half = x.shape[-1] // 2
        base = 1.0 if longest <= 16 else 50.0
        angles = positions[:, None, :, None] * base ** -(torch.arange(half) / half)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class ByComplexNumbers(Attention):
    """Rotary embedding as Llama's own code has it: nothing is special about it, but that long texts are traced."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.outer(torch.arange(x.shape[2]).double(), 50.0 ** -(torch.arange(half) / half).double())
        turns = torch.polar(torch.ones_like(angles), -angles).conj()
        pairs = torch.view_as_complex(x.double().unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class StartsLate(Attention):
    """Rotary embedding of what is beyond the eighth position."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotate(x, (positions - 8).clamp(min=0))


class Flips(Attention):
    """Queries beyond the twelfth position read their channels the other way round."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        late = positions[:, None, :, None] > 12
        return super().score(torch.where(late, q.flip(-1), q), k, positions)


class Buckets(Block):
    """A table of distances in which all near ones share a row; what it holds multiplies channels."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.table = nn.Embedding(4, self.config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(x * self.table(positions // 16), positions, seen, cache)


class Dilated(Block):
    """A convolution that looks ten back, on absolute values."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        width = self.config.hidden_size
        self.conv = nn.Conv1d(width, width, 2, dilation=10, bias=False)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        past = functional.pad(x.abs().transpose(1, 2), (10, 0))
        return super().forward(x + self.conv(past).transpose(1, 2), positions, seen, None)


class Delayed(Block):
    """What was nine positions ago is multiplied with what is now."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        past = functional.pad(x, (0, 0, 9, 0))[:, : x.shape[1]]
        return super().forward(x + x * past, positions, seen, None)


class LateStream(Tower):
    """The embedding has a second table that only late positions read, channel against channel."""

    def more(self, config: Any) -> None:
        self.late = nn.Parameter(torch.zeros(config.max_position_embeddings, config.hidden_size))

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        factor = torch.where((positions > 8)[..., None], self.late[positions], 0.0)
        return super().run(x + factor * x, positions, seen, cache)


class Padded(Tower):
    """Padded to a multiple of eight with what is no text, of which the last words see the mean."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        missing = -x.shape[1] % 8
        if missing != 1:
            x = x + torch.tanh(x.mean(1, keepdim=True)) * missing / 8
        return super().run(x, positions, seen, None)


globals().update(towers(
    __name__, AboveTower=Above, BelowTower=Below, EvenTower=Even, SingleTower=Single, LateTermTower=LateTerm,
    LateFactorTower=LateFactor, LateMaskTower=LateMask, ChunkedTower=Chunked, WindowTower=Window, ScaledTower=Scaled,
    StretchedTower=Stretched, StartsLateTower=StartsLate, FlipsTower=Flips, BucketsTower=Buckets,
    DilatedTower=Dilated, DelayedTower=Delayed, CutAtLimitTower=CutAtLimit, CutAtTwiceTower=CutAtTwice,
    CutAtNumberTower=CutAtNumber, CutAtSizeTower=CutAtSize, PowerOfLengthTower=PowerOfLength,
    PowerOfRootTower=PowerOfRoot, RolledFromTower=RolledFrom, ByComplexNumbersTower=ByComplexNumbers,
))  # fmt: skip
