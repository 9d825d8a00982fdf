"""Streams that no norm writes, and that linear maps W read as they are.

Where all else is blind to the mean of x, it may become x + 1 uᵀx for any u, as W becomes W (I + 1 uᵀ)⁻¹. And where
nothing but W sees what a weight A has written, A may write any that W loses: W has fewer outputs than inputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get
from hf_align.symmetry.gauges.constants import passed_on
from hf_align.symmetry.gauges.index_provenance import (
    NOBODY,
    LosesMean,
    entries_of,
    every_entry,
    follow,
    in_order,
    numbered,
)
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import is_sum, used_only_by
from hf_align.tracing.ops import Trait, does

_NEARLY_LOST = 1e-8
"""Of a reader, the share of the mean direction below which it does not see the mean."""

_Along = tuple[str, int]
"""A weight, and one of its axes."""


@dataclass(frozen=True)
class ShearStream(Gauge):
    """(I + 1 uᵀ) A replaces what writes x, and W (I + 1 uᵀ)⁻¹ what reads it; nothing else sees the mean of x.

    Of all u, the one for which W 1 has entries of mean square one, and is orthogonal to the rest of W.

    Attributes:
        writers: each A, and the axis along which it writes x; biases, too.
        readers: each W, and the axis along which it reads x.
    """

    writers: tuple[_Along, ...]
    readers: tuple[_Along, ...]

    said = "scaled along the mean, which only linear maps see"

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(name for name, _ in (*self.writers, *self.readers))

    def fix(self, name: str, get: Get) -> Tensor:
        read = _stacked(self.readers, get)
        means = read.sum(1)
        if not bool(means.norm() > _NEARLY_LOST * read.norm()):
            return get(name)
        length = means.square().mean().sqrt()
        leaning = means @ read / means.square().sum()
        row = length * (leaning - leaning.mean()) + (length - 1) / read.shape[1]
        for weight, axis in self.writers:
            if name == weight:
                written = get(name).double()
                return (written + torch.tensordot(row, written, ([0], [axis])).unsqueeze(axis)).to(get(name).dtype)
        axis = dict(self.readers)[name]
        kept = get(name).double().movedim(axis, -1)
        return (kept - kept.sum(-1, keepdim=True) * row / length).movedim(-1, axis).to(get(name).dtype)


@dataclass(frozen=True)
class ShortenWriter(Gauge):
    """PA replaces A, P the projection to what W sees, for W alone reads what A writes.

    Attributes:
        written: A, and the axis along which it writes; its bias, too.
        readers: each W, and the axis along which it reads.
        lost: so many rows of W are less all the others, as those of its first output where it has lost their mean.
    """

    written: tuple[_Along, ...]
    readers: tuple[_Along, ...]
    lost: int

    said = "without what the weights that read it lose"

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.written)

    def fix(self, name: str, get: Get) -> Tensor:
        seen = _stacked(self.readers, get)[self.lost :]
        basis = torch.linalg.qr(seen.mT)[0]
        axis = dict(self.written)[name]
        rows = get(name).double().movedim(axis, 0)
        kept = torch.tensordot(basis, torch.tensordot(basis, rows, ([0], [0])), 1)
        return kept.movedim(0, axis).to(get(name).dtype)


def _stacked(readers: tuple[_Along, ...], get: Get) -> Tensor:
    """What is read, one row for each output and cell of a kernel."""
    return torch.cat([get(name).double().movedim(axis, -1).flatten(0, -2) for name, axis in readers])


@dataclass(frozen=True)
class _Fate:
    """What becomes of something that is written into a stream.

    Attributes:
        sums: where it meets other terms.
        blind: whether something else sees it, but not its mean.
    """

    readings: tuple[LinearUse, ...]
    sums: tuple[fx.Node, ...]
    blind: bool


class Streams:
    """The terms of streams, and their fates.

    Attributes:
        ones: products by gains that are one by the time that streams are changed, and what is multiplied there.
    """

    def __init__(self, found: Interpretation, loses_mean: LosesMean, ones: Mapping[fx.Node, fx.Node]) -> None:
        self.found, self.loses_mean, self.ones = found, loses_mean, ones
        self.fates: dict[fx.Node, _Fate | None] = {}
        uses = defaultdict[str, list[fx.Node]](list)
        for node in found.program.graph.nodes:
            if node in found.linear_uses or _is_lookup(node, found):
                uses[self.written(node)[0][0]].append(node)
        self.uses = dict(uses)

    def fate(self, term: fx.Node) -> _Fate | None:
        """What becomes of a term; none if something sees its mean that is no linear map, or sees it in parts."""
        if term not in self.fates:
            self.fates[term] = self._fate(term)
        return self.fates[term]

    def _fate(self, term: fx.Node) -> _Fate | None:
        use, sums = self.found.linear_uses.get(term), list[fx.Node]()
        labels = numbered(use) if use is not None else entries_of(term)
        size = term.meta["val"].shape[-1 if use is None else use.out_axis]

        def goes_on(user: fx.Node, node: fx.Node, labels: Tensor) -> Tensor | None:
            if is_sum(user):
                sums.append(user)
            if self._shows(user, node):
                return torch.broadcast_to(labels, user.meta["val"].shape)
            is_shifted = does(user, Trait.SUBTRACTS | Trait.ADDS) and not is_sum(user)
            return None if is_shifted else passed_on(self.found.program, user, node, labels)

        readings, blind = list[LinearUse](), False
        for end in follow({term: labels}, self.found, goes_on):
            if (reading := self.found.reading(end.user, end.value)) is not None:
                if NOBODY in end.labels or not _is_whole(end.labels, reading.out_axis, size):
                    return None  # it reads what is beside the stream, too
                readings.append(reading)
            elif _is_whole(end.labels, -1, size) and self.loses_mean(end.user, end.value):
                blind = True
            else:
                return None
        return _Fate(tuple(readings), tuple(dict.fromkeys(sums)), blind)

    def is_seen_whole(self, term: fx.Node) -> bool:
        """Whether all that sees a term takes whole vectors of one place, and not some entries of each of two tokens."""
        use = self.found.linear_uses.get(term)
        axis = -1 if use is None else use.out_axis
        size = term.meta["val"].shape[axis]

        def goes_on(user: fx.Node, node: fx.Node, labels: Tensor) -> Tensor | None:
            if self._shows(user, node) or is_sum(user):
                return torch.broadcast_to(labels, user.meta["val"].shape)
            if _axis_of_vectors(labels, size) is None:
                return None
            entries = passed_on(self.found.program, user, node, _entries(labels, size))
            return None if entries is None else _numbered_anew(entries, size)

        for end in follow({term: every_entry(term, axis)}, self.found, goes_on):
            reading = self.found.reading(end.user, end.value)
            if not _are_vectors(end.labels, -1 if reading is None else reading.out_axis, size):
                return False
        return True

    def terms(self, node: fx.Node) -> set[fx.Node] | None:
        """The linear maps, rows of tables and weights that a value is the sum of, or consists of; none if there is
        anything else."""
        names = self.found.program.parameters
        found, seen, waiting = set[fx.Node](), {node}, [node]
        while waiting:
            value = waiting.pop()
            is_vector = value in names and value.meta["val"].dim() > 0
            if value in self.found.linear_uses or is_vector or _is_lookup(value, self.found):
                found.add(value)
            elif parts := self._parts(value):
                waiting += [part for part in parts if part not in seen]
                seen.update(parts)
            else:
                return None
        return found

    def _parts(self, value: fx.Node) -> list[fx.Node]:
        """What a value is a sum of, or consists of; nothing if it is neither."""
        operands = value.all_input_nodes
        moves = does(value, Trait.MOVES | Trait.ROLLS | Trait.AVERAGES | Trait.SAME) and len(operands) == 1
        if moves or is_sum(value) or does(value, Trait.JOINS):
            return operands
        return [a for a in operands if self._shows(value, a)]

    def _shows(self, product: fx.Node, value: fx.Node) -> bool:
        """Whether a product shows a value as it is, perhaps several times: by ones, or by a gain that is one."""
        if product in self.ones:
            return value is self.ones[product]
        if not does(product, Trait.MULTIPLIES) or product.kwargs or product.args.count(value) != 1:
            return False
        return all(self.found.program.is_always(a, 1) for a in product.args if a is not value)

    def is_read_alone(self, term: fx.Node) -> bool:
        """Whether nothing but linear maps sees a term, and they read vectors as they were written."""
        use = self.found.linear_uses.get(term)
        axis = -1 if use is None else use.out_axis
        size = term.meta["val"].shape[axis]
        for end in follow({term: every_entry(term, axis)}, self.found):
            reading = self.found.reading(end.user, end.value)
            if reading is None or NOBODY in end.labels or not _are_vectors(end.labels, reading.out_axis, size):
                return False
        return True

    def together(self, reading: LinearUse) -> dict[fx.Node, _Fate] | None:
        """All terms that meet what a linear map ever reads, or each other; none if one sees more than it may."""
        waiting, met = self._read_by(reading.weight), dict[fx.Node, _Fate]()
        while waiting:
            term = waiting.pop()
            fate = self.fate(term)
            beside = [self.terms(node) for node in fate.sums] if fate is not None else [None]
            beside += [self._read_by(r.weight) for r in fate.readings] if fate is not None else []
            if fate is None or None in beside:
                return None
            met[term] = fate
            beside.append(set(self.uses.get(self.written(term)[0][0], ())))
            waiting |= {t for terms in beside for t in terms or () if t not in met}
        return met

    def _read_by(self, weight: str) -> set[fx.Node] | None:
        """The terms of all that a weight reads; none where it is looked up, too."""
        uses = [self.found.linear_uses.get(node) for node in self.uses[weight]]
        terms = [self.terms(use.input) if use is not None else None for use in uses]
        return None if None in terms else {t for found in terms for t in found or ()}

    def is_turning(self, reading: LinearUse) -> bool:
        """Whether norms see what a linear map reads, so that lengths in it are given."""
        return any(fate.blind for fate in (self.together(reading) or {}).values())

    def written(self, term: fx.Node) -> tuple[_Along, ...]:
        """The weights of a term, and the axes along which they write."""
        names, use = self.found.program.parameters, self.found.linear_uses.get(term)
        if use is not None:
            return ((use.weight, 1 - use.in_axis), *([(use.bias, 0)] if use.bias is not None else []))
        name = names[term] if term in names else names[term.all_input_nodes[0]]
        return ((name, len(self.found.program.shapes[name]) - 1),)


def _is_lookup(node: fx.Node, found: Interpretation) -> bool:
    """Whether it gives rows of a table that is a weight as it is."""
    return does(node, Trait.LOOKS_UP_ROWS) and node.all_input_nodes[0] in found.program.parameters


def _is_whole(labels: Tensor, axis: int, size: int) -> bool:
    """Whether all entries of a stream lie along an axis, in order, wherever some do."""
    return in_order(labels, axis) and labels.shape[axis] == size


def _entries(labels: Tensor, size: int) -> Tensor:
    """Which entry of its vector each is, of vectors that are numbered one after the other."""
    return labels.where(labels == NOBODY, labels % size)


def _are_vectors(labels: Tensor, axis: int, size: int) -> bool:
    """As `_is_whole`, of entries of one vector each, where vectors are numbered one after the other."""
    if not _is_whole(_entries(labels, size), axis, size):
        return False
    vectors = labels.movedim(axis, -1) // size
    return bool((vectors == vectors[..., :1]).all())


def _axis_of_vectors(labels: Tensor, size: int) -> int | None:
    return next((axis for axis in reversed(range(labels.dim())) if _are_vectors(labels, axis, size)), None)


def _numbered_anew(entries: Tensor, size: int) -> Tensor | None:
    """All entries by number, of the vectors that an op makes of others."""
    axis = _axis_of_vectors(entries, size)
    if axis is None:
        return None
    last = entries.movedim(axis, -1)
    vectors = torch.arange(math.prod(last.shape[:-1])).reshape(*last.shape[:-1], 1)
    return last.where(last == NOBODY, last + size * vectors).movedim(-1, axis)


def sheared_streams(streams: Streams, taken: Collection[str]) -> Iterator[ShearStream]:
    """The gauges of all streams whose mean only linear maps see.

    Args:
        taken: weights that other gauges of such means have changed.
    """
    found, done = streams.found, set[str]()
    for use in found.linear_uses.values():
        met = streams.together(use) if use.weight not in done else None
        if not met or not any(fate.blind for fate in met.values()):
            continue
        read = {r for fate in met.values() for r in fate.readings}
        writers = tuple(sorted({w for term in met for w in streams.written(term)}))
        readers = tuple(sorted({(r.weight, r.in_axis) for r in read}))
        gauge = ShearStream(writers, readers)
        apart = len(set(gauge.targets)) == len(gauge.targets) and not {*taken, *done} & set(gauge.targets)
        followed = apart and _are_followed(gauge.targets, {*met, *(r.node for r in read)}, found)
        if followed and all(map(streams.is_seen_whole, met)):
            done |= set(gauge.targets)
            yield gauge


def _are_followed(names: Collection[str], nodes: Collection[fx.Node], found: Interpretation) -> bool:
    """Whether weights are only used by some nodes, or are all among them, as what is added itself."""
    stored = {name for node, name in found.program.parameters.items() if node in nodes}
    every = all(node in nodes for node, name in found.program.parameters.items() if name in stored)
    return every and used_only_by(set(names) - stored, nodes, found.program)


def shortened_writers(streams: Streams, centred: Collection[_Along]) -> Iterator[ShortenWriter]:
    """The gauges of all weights of which linear maps lose a part that nothing else sees.

    Args:
        centred: weights, and the axes along which they have lost their mean.
    """
    found = streams.found
    for weight, nodes in streams.uses.items():
        fates = [fate for node in nodes if (fate := streams.fate(node)) is not None]
        read = [r for fate in fates for r in fate.readings]
        written = tuple(dict.fromkeys(along for node in nodes for along in streams.written(node)))
        ends = len(fates) == len(nodes) and all(fate.readings and not fate.blind for fate in fates)
        if not (ends and used_only_by((name for name, _ in written), nodes, found.program)):
            continue
        readers = tuple(sorted({(r.weight, r.in_axis) for r in read}))
        rows = [_rows(*reader, found) for reader in readers]
        whole = len(readers) == 1 and (readers[0][0], 1 - readers[0][1]) in centred
        lost = rows[0] // found.program.shapes[readers[0][0]][1 - readers[0][1]] if whole else 0
        narrow = sum(rows) - lost < found.program.shapes[weight][dict(written)[weight]]
        names = [name for name, _ in (*written, *readers)]
        if not (narrow and len(set(names)) == len(names)):
            continue
        given = all(fate.sums for fate in fates) and streams.is_turning(read[0])
        if (given and all(map(streams.is_seen_whole, nodes))) or all(streams.is_read_alone(node) for node in nodes):
            yield ShortenWriter(written, readers, lost)


def _rows(weight: str, axis: int, found: Interpretation) -> int:
    """How often a weight reads a whole vector along an axis."""
    shape = found.program.shapes[weight]
    return math.prod(shape) // shape[axis]
