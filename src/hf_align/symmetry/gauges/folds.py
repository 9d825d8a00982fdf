"""Gains and statistics that leave: into what reads a norm, or into the weight that writes what they multiply."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.errors import HfAlignError
from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape, along
from hf_align.symmetry.interpreter.spaces import Axis
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.links import Link


@dataclass(frozen=True)
class Read:
    """A weight that reads normalised vectors along `axis`, and the bias added to what it reads.

    Attributes:
        before, behind: of several vectors that it reads at once (patches that are merged), how many follow each other,
            and how many are interleaved.
        scaled: whether vectors are multiplied by numbers before it reads them, as by a mask: a constant of theirs is
            not the same at all places then.
    """

    weight: str
    axis: int
    bias: str | None
    before: int = 1
    behind: int = 1
    scaled: bool = False

    def spread(self, vector: Tensor) -> Tensor:
        """What all inputs read where each of the vectors is this one."""
        return vector.repeat_interleave(self.behind).repeat(self.before)

    def centred(self, weight: Tensor) -> Tensor:
        """The weight without its mean along each of the vectors."""
        parts = self._vectors(weight)
        return self._stored(parts - parts.mean(-2, keepdim=True))

    def means_that_read(self, weight: Tensor, constant: Tensor) -> Tensor:
        """What is added where a vector is read, so that a unit vector of ones gives what the weight makes of a
        constant: each vector what it gave by itself, where they are scaled; else all in equal shares."""
        parts = self._vectors(weight)
        made = (parts * constant[:, None]).sum(-2, keepdim=True)
        shares = made if self.scaled else made.mean((-3, -1), keepdim=True)
        return self._stored((shares / math.sqrt(len(constant))).expand_as(parts))

    def _vectors(self, weight: Tensor) -> Tensor:
        """What reads each of the vectors, [..., before, size, behind]."""
        return weight.movedim(self.axis, -1).unflatten(-1, (self.before, -1, self.behind))

    def _stored(self, vectors: Tensor) -> Tensor:
        """The same, laid out as the weight is."""
        return vectors.flatten(-3).movedim(-1, self.axis)


@dataclass(frozen=True)
class Carried:
    """A weight along what a norm writes: entries from `start` of one axis, as a reader (-1) or a writer (1).

    Attributes:
        before, behind: the sizes of the product of which that is a factor, outside of it and inside.
    """

    weight: str
    axis: int
    power: int
    start: int = 0
    before: int = 1
    behind: int = 1

    def scaled(self, tensor: Tensor, factors: Tensor) -> Tensor:
        """The tensor with those entries times factors."""
        every = torch.ones(tensor.shape[self.axis], dtype=factors.dtype, device=factors.device)
        repeated = factors.repeat_interleave(self.behind).repeat(self.before)
        every[self.start : self.start + len(repeated)] = repeated
        return along(tensor, self.axis, every)

    def turned(self, tensor: Tensor, turn: Tensor) -> Tensor:
        """The tensor with those entries turned, by [size, size]."""
        rows = tensor.movedim(self.axis, 0)
        stop = self.start + self.before * len(turn) * self.behind
        vectors = rows[self.start : stop].unflatten(0, (self.before, len(turn), self.behind))
        part = torch.tensordot(turn, vectors, ([1], [1])).movedim(0, 1).flatten(0, 2)
        return torch.cat([rows[: self.start], part, rows[stop:]]).movedim(0, self.axis)


def carriers(target: Axis, found: Interpretation) -> Iterator[Carried]:
    """The weights along a space, or a part of which is, or a factor of a part."""
    for name, value in found.weights.items():
        for i, axis in enumerate(value.axes):
            start = 0
            for part in axis.segments:
                if not part.size:
                    continue
                before = 1
                for factor in part.factors:
                    behind = part.size // (before * factor.size)
                    if factor.root.space is target.root.space:
                        power = 1 if factor.root.is_dual == target.root.is_dual else -1
                        yield Carried(name, i, power, start, before, behind)
                    before *= factor.size
                start += part.size


def all_carriers(target: Axis, found: Interpretation) -> tuple[Carried, ...] | None:
    """The weights along a space; none where some are along it in another way than `carriers` knows."""
    space = target.root.space
    along = [atom for v in found.weights.values() for a in v.axes for atom in a.atoms if atom.space is space]
    carried = tuple(carriers(target, found))
    return carried if len(carried) == len(along) and not any(atom.order for atom in along) else None


@dataclass(frozen=True)
class FoldNorm(Gauge):
    """W diag(γ) replaces W, one replaces γ, and the bias β leaves the norm.

    LayerNorm's normalised value n has mean zero, so a reader's mean along the axis is free. Where a reader has no
    bias of its own to take Wβ up, it is stored there: with β = 1/√d · 1 and Wγ centred, the mean direction of W
    contributes exactly Wβ to the output and nothing else. Of a reader of several such vectors at once, the mean along
    each of them is free, and they store the constant in equal shares, or each its own where they are scaled.

    Attributes:
        exclusive: the reads are all that ever happens to the normalised value; else β stays, as β/γ.
        centred: the norm subtracts the mean.
        offset: what the architecture adds to the stored gain (γ = 1 + w).
        link: by which it reads that (γ = f(w)).
        others: the weights on the target where they are no linear readers of it alone.
    """

    gain: str
    bias: str | None
    reads: tuple[Read, ...]
    others: tuple[Carried, ...]
    centred: bool
    exclusive: bool
    offset: float = 0.0
    link: Link = Link.SAME

    said = "a norm's gain and bias, moved into the weights around it"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        biases = [r.bias for r in self.reads if r.bias and self.bias]
        norm = [self.gain] + ([self.bias] if self.bias else [])
        return (*norm, *(r.weight for r in self.reads), *biases, *(c.weight for c in self.others))

    @property
    def keeps_constants(self) -> bool:
        """Whether a reader without a bias has the constant Wβ in its mean direction, and nothing else there."""
        return self.centred and self.exclusive and self.bias is not None

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.gain)[-1], *(shape(c.weight)[c.axis] for c in self.others)}

    def fix(self, name: str, get: Get) -> Tensor:
        stored = self.link.read(get(self.gain)) + self.offset
        if name == self.gain:
            return self.link.stored(torch.full_like(stored, 1 - self.offset))
        gain = stored.reshape(-1)
        if name == self.bias:
            return self._norm_bias(get(name), gain)
        for read in self.reads:
            if name == read.weight:
                return self._reader(read, get(name), gain, get)
            if name == read.bias:
                assert self.bias is not None
                constant = get(read.weight).movedim(read.axis, -1) @ read.spread(get(self.bias))
                return get(name) + (constant.flatten(1).sum(1) if constant.dim() > 1 else constant)
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
        folded = along(weight, read.axis, read.spread(gain))
        if not (self.centred and self.exclusive):
            return folded
        folded = read.centred(folded)
        if self.bias is None or read.bias is not None:
            return folded
        return folded + read.means_that_read(weight, get(self.bias))


@dataclass(frozen=True)
class FoldIntoWriter(Gauge):
    """diag(γ) W and γ b replace W and b, and one replaces γ: a gain on what a single weight writes."""

    gain: str
    weight: str
    axis: int
    bias: str | None

    said = "a gain, moved into what writes it"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.gain, self.weight, *([self.bias] if self.bias else []))

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.weight)[self.axis]}

    def fix(self, name: str, get: Get) -> Tensor:
        gain = get(self.gain).reshape(-1)
        if name == self.gain:
            return torch.ones_like(get(name))
        return along(get(name), self.axis if name == self.weight else 0, gain)


@dataclass(frozen=True)
class FoldStatistics(Gauge):
    """γ/√(σ²+ε) replaces γ and β - γμ/√(σ²+ε) replaces β; μ becomes 0 and σ² becomes 1 - ε."""

    gain: str
    bias: str
    mean: str
    variance: str
    eps: float

    said = "statistics of a norm, moved into its gain and bias"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.gain, self.bias, self.mean, self.variance)

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return ()

    def fix(self, name: str, get: Get) -> Tensor:
        if name == self.mean:
            return torch.zeros_like(get(name))
        if name == self.variance:
            return torch.full_like(get(name), 1 - self.eps)
        gain = get(self.gain) / (get(self.variance) + self.eps).sqrt()
        return gain if name == self.gain else get(name) - gain * get(self.mean)
