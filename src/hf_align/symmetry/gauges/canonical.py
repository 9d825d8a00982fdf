"""Gauges: choices of the weights that the function does not see, and one canonical choice for each.

Raw weights of two models differ in these for no reason; fixed, the models become comparable and the groups larger.
Every gauge rewrites single tensors, from a few others, so that a checkpoint is canonicalised tensor by tensor.

* the gain of a norm moves into its readers, and its bias into theirs; a gain on what one weight writes, into that;
* the bias of a norm whose gain stays moves into what reads it and what is added to it; its readers lose what they
  never see;
* the statistics of a BatchNorm move into its gain and bias;
* what writes a LayerNorm stream, or a head that is normalised, loses its mean, and so do the readers of its output,
  and what a softmax reads;
* the key bias is dropped (softmax does not see it), the value bias moves into the output bias (attention rows sum
  to one), or into that of what is added to the output; so do the constants that readers without bias keep.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.errors import HfAlignError
from hf_align.ondemand import OnDemand

Get = Callable[[str], Tensor]


class Gauge(ABC):
    """One choice, fixed: new values for `targets`, from the old values of some tensors."""

    @property
    @abstractmethod
    def targets(self) -> tuple[str, ...]: ...

    @abstractmethod
    def fix(self, name: str, get: Get) -> Tensor:
        """The new value of one target; `get` reads tensors as they were before this gauge."""


@dataclass(frozen=True)
class Read:
    """A weight that reads a normalised value along `axis`, and the bias added to what it reads."""

    weight: str
    axis: int
    bias: str | None


@dataclass(frozen=True)
class Carried:
    """A weight along what a norm writes: entries from `start` of one axis, as a reader (-1) or a writer (1)."""

    weight: str
    axis: int
    power: int
    start: int = 0

    def scaled(self, tensor: Tensor, factors: Tensor) -> Tensor:
        """The tensor with those entries times factors."""
        every = torch.ones(tensor.shape[self.axis], dtype=factors.dtype)
        every[self.start : self.start + len(factors)] = factors
        return _along(tensor, self.axis, every)


@dataclass(frozen=True)
class FoldNorm(Gauge):
    """W diag(γ) replaces W, one replaces γ, and the bias β leaves the norm.

    LayerNorm's normalised value n has mean zero, so a reader's mean along the axis is free. Where a reader has no
    bias of its own to take Wβ up, it is stored there: with β = 1/√d · 1 and Wγ centred, the mean direction of W
    contributes exactly Wβ to the output and nothing else.

    Attributes:
        exclusive: the reads are all that ever happens to the normalised value; else β stays, as β/γ.
        centred: the norm subtracts the mean.
        offset: what the architecture adds to the stored gain (γ = 1 + w).
        others: the weights on the target where they are no linear readers of it alone.
    """

    gain: str
    bias: str | None
    reads: tuple[Read, ...]
    others: tuple[Carried, ...]
    centred: bool
    exclusive: bool
    offset: float = 0.0

    @property
    def targets(self) -> tuple[str, ...]:
        biases = [r.bias for r in self.reads if r.bias and self.bias]
        norm = [self.gain] + ([self.bias] if self.bias else [])
        return (*norm, *(r.weight for r in self.reads), *biases, *(c.weight for c in self.others))

    @property
    def keeps_constants(self) -> bool:
        """Whether a reader without a bias has the constant Wβ in its mean direction, and nothing else there."""
        return self.centred and self.exclusive and self.bias is not None

    def fix(self, name: str, get: Get) -> Tensor:
        gain = get(self.gain) + self.offset
        if name == self.gain:
            return torch.full_like(gain, 1 - self.offset)
        if name == self.bias:
            return self._norm_bias(get(name), gain)
        for read in self.reads:
            if name == read.weight:
                return self._reader(read, get(name), gain, get)
            if name == read.bias:
                assert self.bias is not None
                return get(name) + get(read.weight).movedim(read.axis, -1) @ get(self.bias)
        folded = get(name)
        for carried in self.others:
            if carried.weight == name:
                folded = carried.scaled(folded, gain ** (-carried.power))
        return folded

    def _norm_bias(self, bias: Tensor, gain: Tensor) -> Tensor:
        if not self.exclusive:
            if bool((gain == 0).any()):
                raise HfAlignError(f"{self.gain} has entries that are exactly zero, so its bias cannot be folded")
            return bias / gain
        carried = any(r.bias is None for r in self.reads)
        return torch.full_like(bias, 1 / math.sqrt(len(bias)) if carried else 0.0)

    def _reader(self, read: Read, weight: Tensor, gain: Tensor, get: Get) -> Tensor:
        folded = _along(weight, read.axis, gain)
        if not (self.centred and self.exclusive):
            return folded
        folded = folded - folded.mean(read.axis, keepdim=True)
        if self.bias is None or read.bias is not None:
            return folded
        constant = weight.movedim(read.axis, -1) @ get(self.bias)
        return folded + constant.unsqueeze(read.axis) / math.sqrt(weight.shape[read.axis])


@dataclass(frozen=True)
class MoveNormBias(Gauge):
    """b + Wβ replaces the bias of every reader of γ ⊙ n + β, b + β that of what is added to it, and zero replaces β.

    Attributes:
        added: the biases along the norm that are added to it further on.
    """

    bias: str
    reads: tuple[Read, ...]
    added: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.bias, *(r.bias for r in self.reads if r.bias), *self.added)

    def fix(self, name: str, get: Get) -> Tensor:
        if name == self.bias:
            return torch.zeros_like(get(name))
        if name in self.added:
            return get(name) + get(self.bias)
        (read,) = (r for r in self.reads if r.bias == name)
        return get(name) + get(read.weight).movedim(read.axis, -1) @ get(self.bias)


@dataclass(frozen=True)
class FreeReader(Gauge):
    """W - u hᵀ replaces W for the u that makes Wh zero, and b + (hᵀβ) u replaces b: it reads γ ⊙ n + β, h = 1/γ."""

    weight: str
    axis: int
    bias: str | None
    gain: str
    norm_bias: str | None
    offset: float

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight, *([self.bias] if self.bias else []))

    def fix(self, name: str, get: Get) -> Tensor:
        row = _inverse(get(self.gain) + self.offset)
        weight = get(self.weight).movedim(self.axis, -1)
        unseen = weight @ row / row.square().sum()
        if name == self.weight:
            return (weight - unseen.unsqueeze(-1) * row).movedim(-1, self.axis)
        assert self.norm_bias is not None
        return get(name) + unseen * (get(self.norm_bias) @ row)


@dataclass(frozen=True)
class LevelTable(Gauge):
    """W - s 1 hᵀ replaces W for the s that makes the mean of Wh zero, and P + s 1 hᵀ replaces P.

    The tied head W reads γ ⊙ n + β, h = 1/γ, and a row of the table P is added wherever one of the table W is. What the
    head then adds to all its outputs, s hᵀβ, goes into its bias.
    """

    weight: str
    other: str
    bias: str | None
    gain: str
    norm_bias: str | None
    offset: float

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight, self.other, *([self.bias] if self.bias else []))

    def fix(self, name: str, get: Get) -> Tensor:
        row = _inverse(get(self.gain) + self.offset)
        share = (get(self.weight) @ row).mean() / row.square().sum()
        if name == self.bias:
            assert self.norm_bias is not None
            return get(name) + share * (get(self.norm_bias) @ row)
        return get(name) + (share if name == self.other else -share) * row


def _inverse(gain: Tensor) -> Tensor:
    """1/γ up to a factor, in the limit where some entries are zero: one for those, and zero for the others."""
    least = gain.abs().min()
    return torch.where(gain == 0, 1.0, 0.0).to(gain) if bool(least == 0) else least / gain


@dataclass(frozen=True)
class CentreWriter(Gauge):
    """w - mean(w) along the axis that it writes: every LayerNorm downstream subtracts the mean anyway."""

    parameter: str
    axis: int

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.parameter,)

    def fix(self, name: str, get: Get) -> Tensor:
        weight = get(name)
        return weight - weight.mean(self.axis, keepdim=True)


@dataclass(frozen=True)
class CentreRows(Gauge):
    """w - mean(w) over some entries of the axis that it writes, for each row of them that a norm centres by itself."""

    parameter: str
    axis: int
    rows: tuple[Runs, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.parameter,)

    def entries(self) -> Iterator[Tensor]:
        """The entries of each row."""
        for row in self.rows:
            yield torch.cat([torch.arange(start, stop) for start, stop in row])

    def fix(self, name: str, get: Get) -> Tensor:
        weight = get(name).clone()
        for row in self.entries():
            part = weight.index_select(self.axis, row)
            weight.index_copy_(self.axis, row, part - part.mean(self.axis, keepdim=True))
        return weight


@dataclass(frozen=True)
class FoldIntoWriter(Gauge):
    """diag(γ) W and γ b replace W and b, and one replaces γ: a gain on what a single weight writes."""

    gain: str
    weight: str
    axis: int
    bias: str | None

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.gain, self.weight, *([self.bias] if self.bias else []))

    def fix(self, name: str, get: Get) -> Tensor:
        gain = get(self.gain).reshape(-1)
        if name == self.gain:
            return torch.ones_like(get(name))
        return _along(get(name), self.axis if name == self.weight else 0, gain)


@dataclass(frozen=True)
class FoldStatistics(Gauge):
    """γ/√(σ²+ε) replaces γ and β - γμ/√(σ²+ε) replaces β; μ becomes 0 and σ² becomes 1 - ε."""

    gain: str
    bias: str
    mean: str
    variance: str
    eps: float

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.gain, self.bias, self.mean, self.variance)

    def fix(self, name: str, get: Get) -> Tensor:
        if name == self.mean:
            return torch.zeros_like(get(name))
        if name == self.variance:
            return torch.full_like(get(name), 1 - self.eps)
        gain = get(self.gain) / (get(self.variance) + self.eps).sqrt()
        return gain if name == self.gain else get(name) - gain * get(self.mean)


Runs = tuple[tuple[int, int], ...]
"""Entries of a vector as consecutive [start, stop) runs."""


@dataclass(frozen=True)
class Constant:
    """What a linear map adds to all that it writes: its bias, or Wβ for the β = 1/√d · 1 that a folded norm keeps.

    Attributes:
        parameter: the bias, or W.
        axis: along which W reads; None for a bias.
    """

    parameter: str
    axis: int | None = None

    def of(self, stored: Tensor) -> Tensor:
        """The constant, [outputs], from the stored parameter."""
        return stored if self.axis is None else stored.sum(self.axis) / math.sqrt(stored.shape[self.axis])

    def less(self, stored: Tensor, lost: Tensor) -> Tensor:
        """The stored parameter when `lost`, [outputs], is taken off the constant."""
        if self.axis is None:
            return stored - lost
        return stored - lost.unsqueeze(self.axis) / math.sqrt(stored.shape[self.axis])


@dataclass(frozen=True)
class DropKeyBias(Gauge):
    """Zero for some entries of a constant: q·b is the same for all keys, and softmax subtracts it."""

    constant: Constant
    entries: Runs

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.constant.parameter,)

    def fix(self, name: str, get: Get) -> Tensor:
        return _without(get(name), self.constant, self.entries)


@dataclass(frozen=True)
class MoveValueBias(Gauge):
    """b_o + W_o b_v replaces b_o and zero replaces b_v: the rows of attention sum to one.

    Attributes:
        entries: where b_v lies in the constant that holds it.
        read: the entry of that constant behind each input of W_o (query heads share a KV head's value), as runs.
        output_bias: added to what W_o writes, by W_o or by what is added to that.
    """

    constant: Constant
    entries: Runs
    read: Runs
    weight: str
    axis: int
    output_bias: str

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.constant.parameter, self.output_bias)

    def fix(self, name: str, get: Get) -> Tensor:
        if name == self.constant.parameter:
            return _without(get(name), self.constant, self.entries)
        values = self.constant.of(get(self.constant.parameter))
        moved = torch.cat([values[start:stop] for start, stop in self.read])
        return get(name) + get(self.weight).movedim(self.axis, -1) @ moved


def _without(stored: Tensor, constant: Constant, entries: Runs) -> Tensor:
    """What is stored, with some entries of the constant taken off."""
    every, lost = constant.of(stored), torch.zeros_like(constant.of(stored))
    for start, stop in entries:
        lost[start:stop] = every[start:stop]
    return constant.less(stored, lost)


def _along(tensor: Tensor, axis: int, factors: Tensor) -> Tensor:
    shape = [1] * tensor.dim()
    shape[axis] = -1
    return tensor * factors.reshape(shape)


class CanonicalWeights(OnDemand):
    """Weights with every gauge fixed, computed from `raw` tensor by tensor as they are asked for."""

    def __init__(self, raw: Mapping[str, Tensor], gauges: tuple[Gauge, ...]) -> None:
        super().__init__(raw)
        self._raw = raw
        self._gauges = gauges
        self._moves: dict[str, list[int]] = {}
        for i, gauge in enumerate(gauges):
            for name in gauge.targets:
                self._moves.setdefault(name, []).append(i)

    def __getitem__(self, name: str) -> Tensor:
        return self._before(name, len(self._gauges))

    def _before(self, name: str, stage: int) -> Tensor:
        earlier = [i for i in self._moves.get(name, ()) if i < stage]
        if not earlier:
            return self._raw[name]
        last = earlier[-1]
        return self._gauges[last].fix(name, lambda other: self._before(other, last))
