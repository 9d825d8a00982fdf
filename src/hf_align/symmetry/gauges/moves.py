"""Constants that leave, or lose what nothing sees of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape, Slices


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
            return tensor.flatten(0, -2).mean(0)
        return tensor.sum(self.axis) / math.sqrt(tensor.shape[self.axis])

    def less(self, tensor: Tensor, lost: Tensor) -> Tensor:
        """The parameter when `lost`, [entries], is taken off the constant."""
        if self.stored is Stored.READER:
            return tensor - lost.unsqueeze(self.axis) / math.sqrt(tensor.shape[self.axis])
        return tensor - (lost if self.stored is Stored.TABLE else lost.reshape(tensor.shape))


@dataclass(frozen=True)
class Taken:
    """A bias that takes a constant up: b + c replaces b, or b + Wc, or b + γ ⊙ c.

    Attributes:
        shown: what b is added to: these entries of c, or of Wc; all of them in order if there are none.
        weight, axis: W, and along which axis it reads.
        read: the entries of c that the inputs of W show; of each group of them where W reads groups.
        gain: γ, of a norm that multiplies by no more than that.
    """

    bias: str
    shown: Slices = ()
    weight: str | None = None
    axis: int = 0
    read: Slices = ()
    gain: str | None = None

    def plus(self, constant: Tensor, get: Get) -> Tensor:
        """The new bias."""
        if self.weight is not None:
            weight = get(self.weight).movedim(self.axis, -1)
            groups = _chosen(constant, self.read).unflatten(0, (-1, weight.shape[-1]))
            mapped = torch.cat([part @ inputs for part, inputs in zip(weight.chunk(len(groups)), groups, strict=True)])
            constant = mapped.flatten(1).sum(1) if mapped.dim() > 1 else mapped
        bias = get(self.bias)
        added = (_chosen(constant, self.shown) if self.shown else constant).reshape(bias.shape)
        return bias + (added if self.gain is None else get(self.gain) * added)


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

    said = "a constant, dropped where softmax is blind to it, or moved into the biases that see it"

    @property
    def targets(self) -> tuple[str, ...]:
        return (*(c.parameter for c in (self.source, *self.alike)), *(t.bias for t in self.taken))

    @property
    def given(self) -> set[str]:
        """The biases that take something up."""
        return {t.bias for t in self.taken}

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.source.parameter)[-1]}

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
class MoveMean(Gauge):
    """c - m1 replaces a constant c, for its mean m, and b + mW1 the biases b of the maps W that read it: nothing else
    sees its mean."""

    source: Constant
    taken: tuple[Taken, ...]

    said = "the mean of a constant, moved into the biases that see it"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source.parameter, *(t.bias for t in self.taken))

    @property
    def given(self) -> set[str]:
        """The biases that take something up."""
        return {t.bias for t in self.taken}

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.source.parameter)[-1]}

    def fix(self, name: str, get: Get) -> Tensor:
        every = self.source.of(get(self.source.parameter))
        lost = every.mean().expand_as(every)
        if name == self.source.parameter:
            return self.source.less(get(name), lost)
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

    said = "a constant without what the weight that reads it loses"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source.parameter,)

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.source.parameter)[-1]}

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
