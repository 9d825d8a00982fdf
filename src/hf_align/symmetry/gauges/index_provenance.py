"""Index provenance: entries of a value followed by number, through the graph's own reshapes, splits and transposes.

So any way of fusing and interleaving what one weight writes is understood.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Slices
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import is_expanded_as, pads
from hf_align.tracing.execute import run_node
from hf_align.tracing.ops import Trait, does

NOBODY = -1
_WHOLE = Trait.JOINS | Trait.STACKS | Trait.REPLACES | Trait.ROLLS
"""Of ops that move all entries of their operands, each to one place."""
_MOVING = _WHOLE | Trait.TAKES_ENTRIES | Trait.PUTS_ENTRIES | Trait.MOVES


LosesMean = Callable[[fx.Node, fx.Node], bool]
"""Whether an op is blind to the mean of one of its operands along the last axis."""


def entries_of(node: fx.Node, axis: int = -1) -> Tensor:
    """The entries along an axis by number, in the shape of a value."""
    shape = node.meta["val"].movedim(axis, -1).shape
    return torch.arange(shape[-1]).expand(shape).movedim(-1, axis)


def every_entry(node: fx.Node, axis: int = -1) -> Tensor:
    """All entries of a value by number, one vector along an axis after the other."""
    shape = node.meta["val"].movedim(axis, -1).shape
    return torch.arange(shape.numel()).reshape(shape).movedim(-1, axis)


def in_order(labels: Tensor, axis: int = -1) -> bool:
    """Whether all entries along an axis are those of one vector, in order, wherever some are; a single number has no
    axis."""
    if not labels.dim():
        return False
    last = labels.movedim(axis, -1)
    last = without_copies(last) if last.stride(-1) else last
    return bool(((last == torch.arange(last.shape[-1])).all(-1) | (last == NOBODY).all(-1)).all())


def numbered(reading: LinearUse) -> Tensor:
    """The outputs of a weight by number, in the shape of what it writes."""
    return entries_of(reading.node, reading.out_axis)


def rows_shown(value: fx.Node, found: Interpretation) -> tuple[LinearUse, Tensor] | None:
    """The weight matrix of whose outputs a value shows some, and nothing else, and which of them where."""
    views, node = list[fx.Node](), value
    while node not in found.linear_uses:
        if not only_moves(node, node.all_input_nodes[:1], found):
            return None
        views.append(node)
        node = node.all_input_nodes[0]
    use = found.linear_uses[node]
    labels = {node: numbered(use)}
    for view in reversed(views):
        if view not in labels:
            labels.update(moved(view, labels, found))
    whole = len(found.weights[use.weight].axes) == 2 and bool((labels[value] >= 0).all())
    return (use, labels[value]) if whole else None


def present(labels: Tensor) -> Tensor:
    """The entries that occur, in order."""
    if not labels.numel():
        return labels.reshape(-1)
    labels = without_copies(labels)
    seen = torch.zeros(int(labels.max()) + 2, dtype=torch.bool)  # a sort of all takes ten times as long
    seen[labels + 1] = True
    return seen[1:].nonzero().squeeze(1)


def without_copies(labels: Tensor) -> Tensor:
    """Without what expanding an axis repeats."""
    return labels[tuple(slice(1) if stride == 0 else slice(None) for stride in labels.stride())]


def slices_of(entries: Tensor) -> Slices:
    """Consecutive numbers as [start, stop); each that is nobody's by itself."""
    found: list[tuple[int, int]] = []
    for entry in entries.tolist():
        if found and found[-1][1] == entry and found[-1][0] != NOBODY:
            found[-1] = (found[-1][0], entry + 1)
        else:
            found.append((entry, entry + 1))
    return tuple(found)


@dataclass(frozen=True)
class Use:
    """An op that does more with labelled entries than to move them."""

    user: fx.Node
    value: fx.Node
    labels: Tensor


Passing = Callable[[fx.Node, fx.Node, Tensor], Tensor | None]
"""From an op, the one operand that is labelled, and its labels to those of the result; None if the op ends the way."""


def follow(
    starts: Mapping[fx.Node, Tensor], found: Interpretation, goes_on: Passing = lambda user, node, labels: None
) -> Iterator[Use]:
    """Every use of values whose entries have labels, behind ops that only move entries.

    Args:
        starts: by node, labels in the shape of its value; entries of all other values are nobody's.
        goes_on: what else the way leads through.
    """
    order = found.program.order
    labels = dict(starts)
    labelled = cache(lambda node: bool((without_copies(labels[node]) >= 0).any()))
    waiting = [(order[user], user) for node in starts for user in node.users]
    heapify(waiting)
    seen = set[fx.Node]()
    while waiting:
        _, user = heappop(waiting)
        if user in seen or not (carried := [a for a in user.all_input_nodes if a in labels and labelled(a)]):
            continue
        seen.add(user)
        if user in starts:  # its result has labels of its own: what it reads of others shows in them
            yield from (Use(user, a, labels[a]) for a in carried)
        elif only_moves(user, carried, found):
            for after, part in moved(user, labels, found):
                labels[after] = part
                for later in after.users:
                    heappush(waiting, (order[later], later))
        elif len(carried) == 1 and (behind := goes_on(user, carried[0], labels[carried[0]])) is not None:
            labels[user] = behind
            for later in user.users:
                heappush(waiting, (order[later], later))
        else:
            yield from (Use(user, a, labels[a]) for a in carried)


def reaches(starts: Iterable[fx.Node], ends: Callable[[fx.Node, fx.Node], bool]) -> bool:
    """Whether values may get to an op of some kind behind ops that only move entries, whichever these are: it takes a
    fraction of following them.

    Args:
        ends: from an op, and one of its operands.
    """
    seen, waiting = set[fx.Node](), [*starts]
    while waiting:
        node = waiting.pop()
        if any(ends(user, node) for user in node.users):
            return True
        new = [user for user in node.users if user not in seen and _may_move(user)]
        seen.update(new)
        waiting += new
    return False


def _may_move(user: fx.Node) -> bool:
    """Whether `only_moves` could hold for some operands; what takes a result apart is no op of its own."""
    if does(user, _MOVING) or user.target is operator.getitem:
        return True
    return any(is_expanded_as(user, node) for node in user.all_input_nodes)


def moved_alone(user: fx.Node, node: fx.Node, labels: Tensor, found: Interpretation) -> Tensor | None:
    """The labels of a single result that only shows the entries of a single value elsewhere."""
    if not (only_moves(user, [node], found) and isinstance(user.meta.get("val"), Tensor)):
        return None
    ((_, after),) = moved(user, {node: labels}, found)
    return after


def only_moves(user: fx.Node, carried: list[fx.Node], found: Interpretation) -> bool:
    """Whether an op rearranges the entries of these operands, by fixed numbers, beside nothing or other activations."""
    if does(user, _WHOLE):
        return True
    if does(
        user, Trait.TAKES_ENTRIES | Trait.PUTS_ENTRIES
    ):  # a mask that the inputs make may choose only some of the rows
        rows = [a for a in user.all_input_nodes if a not in carried]
        return (does(user, Trait.TAKES_ENTRIES) and all(_is_numbers(a, found) for a in rows)) or _is_put(
            user, carried, found
        )
    if any(is_expanded_as(user, node) for node in user.all_input_nodes):
        return carried == [user.args[0]]
    return does(user, Trait.MOVES) and all(a in carried or a in found.program.constants for a in user.all_input_nodes)


def _is_numbers(node: fx.Node, found: Interpretation) -> bool:
    """Whether a value is fixed whole numbers."""
    value = found.program.constants.get(node)
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _is_put(user: fx.Node, carried: list[fx.Node], found: Interpretation) -> bool:
    """Whether an op writes a value at fixed places of a constant."""
    if not does(user, Trait.PUTS_ENTRIES) or len(user.args) > 3 or user.kwargs or carried != [user.args[2]]:
        return False
    base, places = user.args[:2]
    fixed = all(n is None or _is_numbers(n, found) for n in places)  # type: ignore[union-attr, arg-type]
    return base in found.program.constants and fixed


def moved(user: fx.Node, labels: Mapping[fx.Node, Tensor], found: Interpretation) -> Iterator[tuple[fx.Node, Tensor]]:
    """The labels of what an op makes of its operands."""

    def lookup(other: fx.Node) -> Any:
        if other in labels:
            return labels[other]
        value = found.program.constants.get(other)
        if value is not None and not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return torch.tensor(NOBODY).expand(other.meta["val"].shape)

    if does(user, Trait.SAME):
        yield user, labels[user.all_input_nodes[0]]
        return
    result = run_node(user, lookup)
    if isinstance(result, Tensor):
        yield user, result
        return
    for child in user.users:
        which = child.args[1]
        assert isinstance(which, int)
        yield child, result[which]


def shown(biases: Tensor, entries: Tensor) -> Slices | None:
    """The entry that meets each entry of a bias, the same wherever it does; none if one meets no bias."""
    if bool(((biases == NOBODY) & (entries != NOBODY)).any()):
        return None
    met = biases != NOBODY
    if not met.any():
        return ()
    bias, entry = biases[met], entries[met]
    meeting = torch.full((int(bias.max()) + 1,), NOBODY)
    meeting[bias] = entry
    return slices_of(meeting[present(bias)]) if torch.equal(meeting[bias], entry) else None


def row_of(reading: LinearUse, labels: Tensor, found: Interpretation) -> Slices | None:
    """The entry that each input of a linear map shows, the same at all places; none if it also reads what is beside
    the value."""
    weight = len(found.weights[reading.weight].axes)
    if weight > 2 and pads(reading.node):
        return None
    return slices_along(reading.out_axis, labels)


def slices_along(axis: int, labels: Tensor) -> Slices | None:
    """The entries that an axis shows, if they are the same at all places."""
    rows = labels.movedim(axis, -1).reshape(-1, labels.shape[axis])
    return slices_of(rows[0]) if bool((rows == rows[:1]).all()) else None
