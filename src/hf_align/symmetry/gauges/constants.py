"""Constants: what a weight adds to a value at all of its places, followed to where it is lost or taken up by a bias.

A bias, the bias of a norm, the mean of a table's rows, what a reader without bias keeps of its norm's: each is a vector
whose entries go through views, sums, averages and attention (its rows sum to one) unchanged. If all that ever happens
to some of them is that a softmax subtracts them, or that a linear map with a bias reads them, or that they meet a bias
in a sum, then they may be zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.constant_sources import Starts, is_added, is_vector, sources
from hf_align.symmetry.gauges.index_provenance import (
    NOBODY,
    Use,
    follow,
    moved_alone,
    numbered,
    present,
    row_of,
    shown,
    slices_along,
    slices_of,
)
from hf_align.symmetry.gauges.masked_means import is_in_masked_mean
from hf_align.symmetry.gauges.moves import Constant, MoveConstant, Taken
from hf_align.symmetry.gauges.softmax_shift import reaches_softmax
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse, Statistics
from hf_align.symmetry.rules.patterns import is_sum, multiplies_by_one, sums_to_one, used_only_by
from hf_align.tracing.ops import Trait, does, factors_of
from hf_align.tracing.program import Program


@dataclass(frozen=True)
class Fate:
    """What becomes of some entries of a constant at one place: lost if neither taken nor seen.

    Attributes:
        taken: how a bias takes them up, and the node at which that bias is added.
        joined: what sees them in a value that has none of them at other places, as where a text follows a picture.
    """

    entries: Tensor
    taken: Taken | None = None
    at: fx.Node | None = None
    seen: bool = False
    joined: fx.Node | None = None


@dataclass(frozen=True)
class _Bias:
    """A bias on its way: its name, the node that adds it first, and its entries by number."""

    name: str
    start: fx.Node
    labels: Tensor


def moved_constants(
    found: Interpretation, kept: Collection[Constant], gone: Collection[str], still: Collection[fx.Node]
) -> Iterator[MoveConstant]:
    """The gauges of all constants that need not be where they are, each where the one before it has moved already.

    Args:
        kept: the constants that readers without bias keep of their norm's.
        gone: biases of norms whose readers have taken them up.
        still: norms that have become sums with a constant: neither gains nor stored statistics are left.
    """
    ways = Ways(found, still)
    waiting: list[MoveConstant] = []
    left: list[_Left] = []
    for source, starts in sources(found, kept, gone):
        fates = list(ways.fates(starts, {source.parameter}))
        moved = _moved(source, _size(starts), fates, ways)
        if moved is not None:
            waiting.append(moved)
        else:
            taken = frozenset(f.taken for f in fates if f.taken is not None)
            left.append(_Left(source, starts, taken, frozenset(f.joined for f in fates if f.joined is not None)))
    waiting += _moved_together(left, ways)
    waiting += _moved_onward(left, waiting, ways)
    while waiting:
        given = {name for gauge in waiting for name in gauge.given}
        first = next((g for g in waiting if g.source.parameter not in given), waiting[0])
        waiting.remove(first)
        yield first


@dataclass(frozen=True)
class _Left:
    """A constant that does not move by itself, all that would take it up, and all that sees it joined to others."""

    source: Constant
    starts: Starts
    taken: frozenset[Taken]
    joined: frozenset[fx.Node]

    def meets(self, other: _Left) -> bool:
        """Whether the same biases could take up both, each alone or both together."""
        together = self.taken & other.taken or self.joined & other.joined
        return bool(together) and _size(self.starts) == _size(other.starts)


def _moved_together(left: list[_Left], ways: Ways) -> Iterator[MoveConstant]:
    """Constants that the same biases take up, as of layers that share their weights, or of a picture and the text
    behind it: what one of them loses, the others do, too."""
    while left:
        first, *left = left
        near = [other for other in left if first.meets(other)]
        for others in (*([other] for other in near), *([near] if len(near) > 1 else [])):
            starts = {node: labels for item in (first, *others) for node, labels in item.starts.items()}
            fates = list(ways.fates(starts, {item.source.parameter for item in (first, *others)}))
            moved = _moved(first.source, _size(starts), fates, ways)
            if moved is not None:
                left = [item for item in left if item not in others]
                yield replace(moved, alike=tuple(item.source for item in others))
                break


def _moved_onward(left: list[_Left], moving: list[MoveConstant], ways: Ways) -> Iterator[MoveConstant]:
    """Constants that only change their place in a sum, but meet one there that moves on, and not to them."""
    known = {c.parameter for gauge in moving for c in (gauge.source, *gauge.alike)}
    for item in left:
        name = item.source.parameter
        onward = {g.source.parameter for g in moving if name not in g.given}
        if name not in known and any(taken.bias in onward for taken in item.taken):
            moved = _moved(item.source, _size(item.starts), list(ways.fates(item.starts, {name})), ways, onward)
            if moved is not None and all(taken.bias in onward for taken in moved.taken):
                yield moved


def _size(starts: Starts) -> int:
    return max((int(labels.max()) + 1 for labels in starts.values() if labels.numel()), default=0)


def _moved(
    source: Constant, size: int, fates: list[Fate], ways: Ways, onward: Collection[str] = ()
) -> MoveConstant | None:
    """The entries that nothing sees, and all that takes them up; none if they only change their place in a sum.

    Args:
        onward: what meets a constant in a sum, but moves on.
    """
    free, taken = taken_up(size, fates, ways)
    lost = any(f.taken is None and bool(free[f.entries].any()) for f in fates)
    if not (lost or any(t.weight or t.gain or t.bias in onward for t in taken)):
        return None
    return MoveConstant(source, slices_of(free.nonzero()[:, 0]), taken)


def taken_up(size: int, fates: list[Fate], ways: Ways) -> tuple[Tensor, tuple[Taken, ...]]:
    """Which entries of a constant nothing sees, and all that takes them up."""
    met, seen = torch.zeros(2, size, dtype=torch.bool)
    takers: dict[str, list[Fate]] = defaultdict(list)
    for fate in fates:
        met[fate.entries] = True
        if fate.seen:
            seen[fate.entries] = True
        if fate.taken is not None:
            takers[fate.taken.bias].append(fate)
    for name, alike in takers.items():
        once = sorted(f.at for f in alike if f.at is not None) == sorted(ways.starts[name])
        alone = used_only_by((name,), ways.starts[name], ways.found.program)
        if len({f.taken for f in alike}) > 1 or not once or not alone:
            for fate in alike:
                seen[fate.entries] = True
    free = met & ~seen
    taken = (alike[0] for alike in takers.values() if bool(free[alike[0].entries].any()))
    return free, tuple(f.taken for f in taken if f.taken is not None)


class Ways:
    """The ways of constants through a program."""

    def __init__(self, found: Interpretation, still: Collection[fx.Node]) -> None:
        self.found, self.still = found, still
        self.uses = found.linear_uses | found.grouped_uses

    @cached_property
    def starts(self) -> dict[str, list[fx.Node]]:
        """Where each bias is added to something."""
        nodes: dict[str, list[fx.Node]] = defaultdict(list)
        for biases in self.arriving.values():
            for bias in biases.values():
                if bias.start not in nodes[bias.name]:
                    nodes[bias.name].append(bias.start)
        for node, statistics in self._by_statistics.items():
            nodes[statistics.bias].append(node)
        return nodes

    @cached_property
    def _by_statistics(self) -> dict[fx.Node, Statistics]:
        """The norms that know their statistics: by the time that constants move, these are zero and one."""
        known, names = {s.gain: s for s in self.found.statistics}, self.found.program.parameters
        nodes = (n for n in self.found.program.graph.nodes if does(n, Trait.STORED_STATISTICS) and n not in self.still)
        gains = {node: names.get(node.args[1]) for node in nodes}
        return {node: known[gain] for node, gain in gains.items() if gain in known}

    @cached_property
    def arriving(self) -> dict[fx.Node, dict[fx.Node, _Bias]]:
        """By sum and operand, the bias that comes into it, and is seen nowhere else."""
        program = self.found.program
        sums: dict[fx.Node, dict[fx.Node, _Bias]] = defaultdict(dict)
        for node in program.graph.nodes:
            reading = self.uses.get(node)
            if reading is not None and reading.bias is not None and used_only_by(
                (reading.bias,), [r.node for r in self.uses.values() if r.bias == reading.bias], program
            ):  # fmt: skip
                first = _Bias(reading.bias, node, numbered(reading))
                sums[node][node] = first
                self._walk(node, first, sums)
            elif node in program.parameters and is_vector(node) and is_added(node):
                for user in node.users:
                    shape = node.meta["val"].shape
                    labels = torch.arange(shape[-1]).reshape(shape)
                    self._walk(node, _Bias(program.parameters[node], user, labels), sums, user)
        return sums

    def _walk(
        self, node: fx.Node, bias: _Bias, sums: dict[fx.Node, dict[fx.Node, _Bias]], first: fx.Node | None = None
    ) -> None:
        """Follow a bias through moves and sums, as long as nothing else sees the value that it is in."""
        labels, users = bias.labels, [first] if first is not None else list(node.users)
        apart = first is not None
        while len(users) == 1:
            (user,) = users
            if is_sum(user):
                if apart:
                    bias, apart = replace(bias, start=user), False
                labels = torch.broadcast_to(labels, user.meta["val"].shape)
                sums[user][node] = replace(bias, labels=labels)
            else:
                after = moved_alone(user, node, labels, self.found)
                if after is None:
                    return
                labels = after
            node, users = user, list(user.users)

    def fates(
        self,
        starts: Mapping[fx.Node, Tensor],
        own: Collection[str],
        *,
        within: LinearUse | None = None,
        blind: Collection[fx.Node] = (),
    ) -> Iterator[Fate]:
        """What becomes of a constant, place by place.

        Args:
            own: the parameters that hold it, which cannot take it up.
            within: the reader without bias whose result it is.
            blind: what changes with it so that it gives the same.
        """

        def goes_on(user: fx.Node, node: fx.Node, labels: Tensor) -> Tensor | None:
            if is_sum(user) and self._beside(user, node, own) is not None:
                return None
            by_one = multiplies_by_one(user, node, self.found.program) or user in self.still
            return labels if by_one else passed_on(self.found.program, user, node, labels)

        for use in follow(starts, self.found, goes_on):
            if use.user not in blind:
                joined = use.user if bool((use.labels == NOBODY).any()) else None
                yield from (replace(fate, joined=joined) for fate in self._fates_at(use, own, within))

    def _beside(self, user: fx.Node, node: fx.Node, own: Collection[str]) -> _Bias | None:
        """The bias that a sum brings to a value."""
        arriving = self.arriving[user].items() if user in self.arriving else ()
        bias = next((b for a, b in arriving if a is not node and a is not user), None)
        return bias if bias is not None and bias.name not in own else None

    def _fates_at(self, use: Use, own: Collection[str], within: LinearUse | None) -> Iterator[Fate]:
        entries = present(use.labels)
        reading = self.uses.get(use.user)
        if reading is not None and reading.input is use.value:
            yield from self._read(reading, use.labels, own, within)
            return
        if is_sum(use.user) and (bias := self._beside(use.user, use.value, own)) is not None:
            meeting = shown(bias.labels, torch.broadcast_to(use.labels, bias.labels.shape))
            if meeting is not None:
                yield Fate(entries, Taken(bias.name, meeting), bias.start)
                return
        if use.user in self._by_statistics and (read := slices_along(1, use.labels)) is not None:
            norm = self._by_statistics[use.user]
            yield Fate(entries, Taken(norm.bias, read, gain=norm.gain), use.user)
            return
        yield Fate(entries, seen=not _is_lost(use, self.found.program))

    def _read(
        self, reading: LinearUse, labels: Tensor, own: Collection[str], within: LinearUse | None
    ) -> Iterator[Fate]:
        """What a linear map makes of a constant goes into its bias, or on to where that of a sum is."""
        entries, read = present(labels), row_of(reading, labels, self.found)
        if read is None or within is not None or not {reading.bias, reading.weight}.isdisjoint(own):
            yield Fate(entries, seen=True)
        elif reading.bias is not None:
            taken = Taken(reading.bias, (), reading.weight, reading.in_axis, read)
            yield Fate(entries, taken, reading.node)
        else:
            for fate in self.fates({reading.node: numbered(reading)}, own, within=reading):
                through = fate.taken and replace(fate.taken, weight=reading.weight, axis=reading.in_axis, read=read)
                yield replace(fate, entries=entries, taken=through)


def _is_lost(use: Use, program: Program) -> bool:
    """Whether a constant of keys, the same for all of them, only shifts the scores of a softmax."""
    alike = use.labels.dim() > 0 and bool((use.labels == use.labels[..., :1]).all())
    return _is_right_factor(use.value, use.user) and alike and reaches_softmax(use.user, program)


def passed_on(program: Program, user: fx.Node, node: fx.Node, labels: Tensor) -> Tensor | None:
    """The entries behind an op that is linear in a value, and makes of a constant the same constant."""
    shape = user.meta["val"].shape if isinstance(user.meta.get("val"), Tensor) else ()
    places = [i for i, a in enumerate(user.args) if a is node]
    if (
        does(user, Trait.ADDS | Trait.SUBTRACTS)
        and not user.kwargs
        and (places == [0] or (is_sum(user) and places == [1]))
    ):
        return torch.broadcast_to(labels, shape)
    masked = is_in_masked_mean(user, node)
    if (does(user, Trait.AVERAGES | Trait.RESAMPLES) and not user.kwargs) or (masked and does(user, Trait.TOTALS)):
        count, total, squares = (_over_places(user, labels.double() ** power) for power in range(3))
        mean = total / count
        return mean.round().long() if torch.allclose(mean.square(), squares / count, atol=1e-6) else None
    if masked:
        return torch.broadcast_to(labels, shape)
    if _is_right_factor(node, user) and not user.kwargs and sums_to_one(user.args[factors_of(user)[0]], program):  # type: ignore[index]
        first = labels[..., :1, :] if labels.dim() > 1 else labels[:1]
        if bool((labels != first).any()):
            return None
        return first.expand(shape) if len(shape) >= first.dim() else first.reshape(shape)  # of one row of shares alone
    return None


def _over_places(user: fx.Node, value: Tensor) -> Tensor:
    """What an op that sums or averages over places makes of a value."""
    summed: Tensor = user.target(*fx.node.map_arg(user.args, lambda _: value))  # type: ignore[operator]
    return summed


def _is_right_factor(node: fx.Node, user: fx.Node) -> bool:
    """Whether an op multiplies another value by this one, and does nothing else with it."""
    factors = factors_of(user) if does(user, Trait.CONTRACTS) else None
    return factors is not None and [i for i, a in enumerate(user.args) if a is node] == [factors[1]]
