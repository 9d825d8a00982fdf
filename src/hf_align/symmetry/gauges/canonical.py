"""Gauges: choices of the weights that the function does not see, and one canonical choice for each.

Raw weights of two models differ in these for no reason; fixed, the models become comparable and the groups larger.
Every gauge rewrites single tensors, from a few others, so that a checkpoint is canonicalised tensor by tensor.

* the gain of a norm moves into its readers, and its bias into theirs; a gain on what one weight writes, into that;
* a constant that only biases and softmaxes see, such as the bias of keys, of values, or of a norm whose gain stays,
  is dropped, or moves into these;
* the readers of a norm whose gain stays, or of what a narrower value was mapped to, lose what they never see;
* the statistics of a BatchNorm move into its gain and bias;
* what writes a LayerNorm stream, or a head that is normalised, loses its mean, and so do the readers of its output,
  and what a softmax reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

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

    The tied head W reads γ ⊙ n + β, h = 1/γ, and a row of one of the tables P is added wherever one of the table W is.
    What the head then adds to all its outputs, s hᵀβ, goes into its bias.

    Attributes:
        paired: a row of W, and another table and its row, which is added wherever that one is, and nowhere else. They
            have an s of their own, for which the row times h is zero.
    """

    weight: str
    others: tuple[str, ...]
    bias: str | None
    gain: str
    norm_bias: str | None
    offset: float
    paired: tuple[int, str, int] | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        beside = [self.paired[1]] if self.paired is not None else []
        return (self.weight, *self.others, *beside, *([self.bias] if self.bias else []))

    def fix(self, name: str, get: Get) -> Tensor:
        row = _inverse(get(self.gain) + self.offset)
        shares = get(self.weight) @ row / row.square().sum()
        apart, beside, at = self.paired or (-1, None, -1)
        alone = torch.arange(len(shares), device=shares.device) == apart
        share = shares[~alone].mean()
        shares = torch.where(alone, shares, share)
        if name == self.bias:
            assert self.norm_bias is not None
            return get(name) + shares * (get(self.norm_bias) @ row)
        if name == self.weight:
            return get(name) - shares[:, None] * row
        if name == beside:
            here = torch.arange(len(get(name)), device=row.device) == at
            return get(name) + torch.where(here, shares[apart] - share, 0.0)[:, None] * row
        return get(name) + share * row


def _inverse(gain: Tensor) -> Tensor:
    """1/γ up to a factor, in the limit where some entries are zero: one for those, and zero for the others."""
    least = gain.abs().min()
    return torch.where(gain == 0, 1.0, 0.0).to(gain) if bool(least == 0) else least / gain


@dataclass(frozen=True)
class NarrowReader(Gauge):
    """W A B⁺ replaces each W that reads x = A n, and B replaces A, for x has more entries than n has dimensions.

    B = ΠA, A less the mean of its columns, where nothing but W sees the mean of x; else B = A. Of all weights that read
    the same of B n, this is the smallest.

    Attributes:
        writer: A, and the axis along which it reads n.
        readers: each W, and the axis along which it reads x.
        centred: whether the mean of x is lost.
        reads_no_mean: whether A has lost its own along n, whose mean is zero.
    """

    writer: tuple[str, int]
    readers: tuple[tuple[str, int], ...]
    centred: bool
    reads_no_mean: bool

    @property
    def targets(self) -> tuple[str, ...]:
        readers = tuple(weight for weight, _ in self.readers)
        return (self.writer[0], *readers) if self.centred else readers

    def fix(self, name: str, get: Get) -> Tensor:
        weight, axis = self.writer
        written = get(weight).movedim(axis, -1).double()
        shown = written - written.mean(0) if self.centred else written
        if name == weight:
            return shown.movedim(-1, axis).to(get(name).dtype)
        axis = dict(self.readers)[name]
        seen = shown.mT @ shown
        if self.reads_no_mean:
            seen = seen + seen.diagonal().mean() / len(seen)
        inverse = torch.linalg.solve(seen, shown.mT)
        return (get(name).movedim(axis, -1).double() @ written @ inverse).movedim(-1, axis).to(get(name).dtype)


@dataclass(frozen=True)
class ShearAlongMean(Gauge):
    """W (I + c 1 hᵀ)⁻¹ replaces what reads x, and (I + c 1 hᵀ) A what writes it: nothing else sees the mean of x.

    Beside what A writes, x may be γ ⊙ n, h = 1/γ, which does not change. Of all c, the one for which W 1 has entries of
    mean square one.

    Attributes:
        writers: each A, and the axis along which it writes x; biases of norms, too.
        readers: each W, and the axis along which it reads x.
        shifted: weights that read γ ⊙ n + β alone, for the β among the writers that is named here, their axes, and
            their biases, which take the change of β up.
    """

    gain: str
    offset: float
    writers: tuple[tuple[str, int], ...]
    readers: tuple[tuple[str, int], ...]
    shifted: tuple[tuple[str, int, str, str], ...]

    @property
    def targets(self) -> tuple[str, ...]:
        return (*(n for n, _ in (*self.writers, *self.readers)), *(bias for *_, bias in self.shifted))

    def fix(self, name: str, get: Get) -> Tensor:
        row = _inverse(get(self.gain).double() + self.offset)
        means = [get(weight).double().sum(axis) for weight, axis in self.readers]
        length = torch.cat(means).square().mean().sqrt()
        if bool(row.sum().abs() < _NEARLY_ORTHOGONAL * row.norm() * math.sqrt(len(row))) or not bool(length):
            return get(name)
        share = (length - 1) / row.sum()
        for weight, axis in self.writers:
            if name == weight:
                written = get(name).movedim(axis, 0).double()
                return (written + share * (row @ written)).movedim(0, axis).to(get(name).dtype)
        for weight, axis in self.readers:
            if name == weight:
                read = get(name).movedim(axis, -1).double()
                return (read - share / length * torch.outer(read.sum(-1), row)).movedim(-1, axis).to(get(name).dtype)
        ((weight, axis, beta, _),) = (shifted for shifted in self.shifted if shifted[-1] == name)
        return get(name) - (share * (row @ get(beta).double()) * get(weight).double().sum(axis)).to(get(name).dtype)


_NEARLY_ORTHOGONAL = 1e-3
"""Below this cosine between 1/γ and the all-ones vector a shear cannot be told from what changes nothing."""


@dataclass(frozen=True)
class LevelNorm(Gauge):
    """γ/l and (β - m)/l replace γ and β, lW replaces W, and b + mW1 replaces b, for what reads W (γ_c n_c + β_c 1) + b.

    l is the root mean square of γ. m is the mean of β, or zero where some W has no bias.

    Attributes:
        levelled: β, if its mean goes.
        bias: β.
    """

    gain: str
    levelled: str | None
    bias: str | None
    offset: float
    reads: tuple[Read, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        taken = [r.bias for r in self.reads if r.bias is not None and self.levelled is not None]
        norm = (self.gain, self.bias) if self.bias is not None else (self.gain,)
        return (*norm, *(r.weight for r in self.reads), *taken)

    def fix(self, name: str, get: Get) -> Tensor:
        gain = get(self.gain) + self.offset
        length = gain.square().mean().sqrt()
        if not bool(length):
            return get(name)
        if name == self.gain:
            return gain / length - self.offset
        mean = get(self.levelled).mean() if self.levelled is not None else 0.0
        if name == self.bias:
            return (get(name) - mean) / length
        for read in self.reads:
            if name == read.weight:
                return get(name) * length
            if name == read.bias:
                return get(name) + mean * get(read.weight).sum(read.axis)
        raise KeyError(name)


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
    rows: tuple[Slices, ...]

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


Slices = tuple[tuple[int, int], ...]
"""Entries of a vector as consecutive [start, stop) runs."""


class Stored(Enum):
    """Where a constant is: it is a vector; W β for the β = 1/√d · 1 that a folded norm keeps; the mean of the rows of
    a table that is added."""

    VECTOR = "vector"
    READER = "reader"
    TABLE = "table"


@dataclass(frozen=True)
class Constant:
    """What a weight adds to a value at all of its places.

    Attributes:
        axis: along which a reader reads.
    """

    parameter: str
    stored: Stored = Stored.VECTOR
    axis: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """The constant, [entries], from the parameter."""
        if self.stored is Stored.VECTOR:
            return tensor.flatten()
        if self.stored is Stored.TABLE:
            return tensor.mean(0)
        return tensor.sum(self.axis) / math.sqrt(tensor.shape[self.axis])

    def less(self, tensor: Tensor, lost: Tensor) -> Tensor:
        """The parameter when `lost`, [entries], is taken off the constant."""
        if self.stored is Stored.READER:
            return tensor - lost.unsqueeze(self.axis) / math.sqrt(tensor.shape[self.axis])
        return tensor - (lost if self.stored is Stored.TABLE else lost.reshape(tensor.shape))


@dataclass(frozen=True)
class Taken:
    """A bias that takes a constant up: b + c replaces b, or b + Wc.

    Attributes:
        shown: what b is added to: these entries of c, or of Wc; all of them in order if there are none.
        weight, axis: W, and along which axis it reads.
        read: the entries of c that the inputs of W show; of each group of them where W reads groups.
    """

    bias: str
    shown: Slices = ()
    weight: str | None = None
    axis: int = 0
    read: Slices = ()

    def plus(self, constant: Tensor, get: Get) -> Tensor:
        """The new bias."""
        if self.weight is not None:
            weight = get(self.weight).movedim(self.axis, -1)
            groups = _chosen(constant, self.read).unflatten(0, (-1, weight.shape[-1]))
            mapped = torch.cat([part @ inputs for part, inputs in zip(weight.chunk(len(groups)), groups, strict=True)])
            constant = mapped.flatten(1).sum(1) if mapped.dim() > 1 else mapped
        bias = get(self.bias)
        return bias + (_chosen(constant, self.shown) if self.shown else constant).reshape(bias.shape)


@dataclass(frozen=True)
class MoveConstant(Gauge):
    """Zero for some entries of a constant: a softmax subtracts them (q·b is the same for all keys), or a bias takes
    them up: that of what reads them, or one that is added where they are, or behind attention (its rows sum to one).

    Attributes:
        alike: constants of other values that the same weights read: they lose the same.
    """

    source: Constant
    entries: Slices
    taken: tuple[Taken, ...]
    alike: tuple[Constant, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        return (*(c.parameter for c in (self.source, *self.alike)), *(t.bias for t in self.taken))

    def fix(self, name: str, get: Get) -> Tensor:
        every = self.source.of(get(self.source.parameter))
        lost = torch.zeros_like(every)
        for start, stop in self.entries:
            lost[start:stop] = every[start:stop]
        for constant in (self.source, *self.alike):
            if name == constant.parameter:
                return constant.less(get(name), lost)
        (taken,) = (t for t in self.taken if t.bias == name)
        return taken.plus(lost, get)


@dataclass(frozen=True)
class ShortenConstant(Gauge):
    """c - z replaces the entries c of a constant that only W reads, where Wz = 0: W has as many inputs as outputs or
    more, and its outputs have lost their mean.

    Attributes:
        entries: of the constant, those that W reads.
        read: the entry that each input of W shows.
    """

    source: Constant
    entries: Slices
    weight: str
    axis: int
    read: Slices

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source.parameter,)

    def fix(self, name: str, get: Get) -> Tensor:
        stored = get(name)
        every = self.source.of(stored)
        places = torch.cat([torch.arange(start, stop) for start, stop in self.entries])
        shown = _chosen(torch.arange(len(every)), self.read)
        weight = get(self.weight).movedim(self.axis, -1)
        seen = torch.zeros(len(weight), len(every), dtype=weight.dtype, device=weight.device)
        seen = seen.index_add(1, shown.to(weight.device), weight)[1:, places]  # the first row is less all the others
        basis = torch.linalg.qr(seen.mT.double())[0]
        constant = every[places].double()
        lost = torch.zeros_like(every)
        lost[places] = (constant - basis @ (basis.mT @ constant)).to(lost.dtype)
        return self.source.less(stored, lost)


def _chosen(vector: Tensor, entries: Slices) -> Tensor:
    """Entries in another order; zero where there is none."""
    return torch.cat([vector[start:stop] if start >= 0 else vector.new_zeros(stop - start) for start, stop in entries])


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
