"""Ops that take axes apart, and that join values along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from hf_align.symmetry.interpreter.bounds import FIXED, ONES
from hf_align.symmetry.interpreter.call import Call, rule, rule_for_numbers
from hf_align.symmetry.interpreter.spaces import Axis, SpaceMismatchError, cut, direct_sum, fresh, split_product
from hf_align.symmetry.interpreter.values import Rows, Value
from hf_align.symmetry.rules.runs import merged_behind
from hf_align.symmetry.rules.views import rearranged
from hf_align.tracing.ops import Trait, runs

_MOVES = Trait.MOVES | Trait.LINEAR


@rule_for_numbers("slice", traits=_MOVES | Trait.CUTS)
def slice_(call: Call) -> Value:
    """A run of entries along one axis, which thereby falls into a sum."""
    dim, step = call.argument("dim") % len(call.shape), call.argument("step")
    call.keep_if_asked([dim])
    size = call.argument(0).meta["val"].shape[dim]
    start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(size)
    if step == 1:
        return run_along(call, dim, start, stop)
    value = call.value(call.argument(0))
    axes = list(value.axes)
    axes[dim] = _every_other(call, axes[dim], step, whole=len(range(start, stop, step)) * step == size)
    return rearranged(value, axes)


def _every_other(call: Call, axis: Axis, step: int, *, whole: bool) -> Axis:
    """One entry of every row of `step`: the rows may move. Pinned where the slice is not of all rows."""
    try:
        rows, entries = split_product(axis, axis.size // step) if whole else (None, axis)
    except SpaceMismatchError:
        rows, entries = None, axis
    call.lower(entries, FIXED, "strided slice")
    return fresh(call.shape[call.argument("dim") % len(call.shape)], FIXED) if rows is None else rows


def run_along(call: Call, dim: int, start: int, stop: int) -> Value:
    """The entries from `start` to `stop` along one axis of the first operand."""
    if chosen := _known_runs(call, dim, start, stop):
        return call.joined(chosen, dim)
    value = call.value(call.argument(0))
    axes = list(value.axes)
    if stop - start < axes[dim].size:
        axes[dim] = _piece_or_pinned(call, axes[dim], start, stop)
    return rearranged(value, axes)


def _known_runs(call: Call, dim: int, start: int, stop: int) -> list[Value]:
    """The runs of which the entries from `start` to `stop` consist, if the first operand is known by such runs."""
    raw = call.raw(call.argument(0))
    return raw.between(start, stop) if isinstance(raw, Rows) and raw.dim == dim else []


def _piece_or_pinned(call: Call, axis: Axis, start: int, stop: int) -> Axis:
    """A run of entries; where it begins or ends inside of a row, the order along the axis is all that is left."""
    try:
        return _piece(axis, start, stop)
    except SpaceMismatchError as mismatch:
        call.lower(axis, FIXED, str(mismatch))
        return fresh(stop - start, FIXED)


def _piece(axis: Axis, start: int, stop: int) -> Axis:
    if start >= stop:
        return fresh(0, FIXED)
    sizes = [n for n in (start, stop - start, axis.size - stop) if n]
    return cut(axis, sizes)[1 if start else 0]


@rule_for_numbers("select", harmless="index", traits=_MOVES)
def select(call: Call) -> Value:
    """One entry along an axis, by number."""
    rank = len(call.shape) + 1
    dim = call.argument(1) % rank
    raw, size = call.raw(call.argument(0)), call.argument(0).meta["val"].shape[dim]
    if isinstance(raw, Rows) and raw.dim == dim:
        at = call.argument(2) % size
        return _without_axis(run_along(call, dim, at, at + 1), dim)
    value = call.value(call.argument(0))
    if size > 1:
        call.lower(value.axes[dim], FIXED, "select")
    return _without_axis(value, dim)


def _without_axis(value: Value, dim: int) -> Value:
    return rearranged(value, (*value.axes[:dim], *value.axes[dim + 1 :]))


@rule_for_numbers("narrow", traits=Trait.MOVES)
def narrow(call: Call) -> Value:
    """A run of entries along one axis."""
    start = call.constant(call.argument("start"))
    if start is None:
        raise SpaceMismatchError("a run that starts where data says")
    dim = call.argument("dim") % len(call.shape)
    call.keep_if_asked([dim])
    start = int(start) % call.argument(0).meta["val"].shape[dim]
    return run_along(call, dim, start, start + call.argument("length"))


@rule_for_numbers(
    "split", "split_with_sizes", "chunk", harmless="split_size split_sizes chunks", traits=_MOVES | Trait.CUTS
)
@rule_for_numbers("tensor_split", harmless="sections indices")
def split(call: Call) -> tuple[Value, ...]:
    """Consecutive pieces of one axis."""
    results = call.node.meta["val"]
    dim = call.argument("dim") % len(results[0].shape)
    sizes = [r.shape[dim] for r in results]
    call.keep_if_asked([dim])
    raw = call.raw(call.argument(0))
    if isinstance(raw, Rows) and raw.dim == dim:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(run_along(call, dim, start, start + n) for start, n in zip(starts, sizes, strict=True))
    value = call.value(call.argument(0))
    pieces = cut(value.axes[dim], sizes)
    return tuple(rearranged(value, (*value.axes[:dim], p, *value.axes[dim + 1 :])) for p in pieces)


@rule_for_numbers("unbind", traits=_MOVES)
def unbind(call: Call) -> tuple[Value, ...]:
    """Every entry along an axis, in order."""
    results = call.node.meta["val"]
    dim = call.argument("dim") % (len(results[0].shape) + 1)
    raw = call.raw(call.argument(0))
    if isinstance(raw, Rows) and raw.dim == dim:
        return tuple(_without_axis(run_along(call, dim, i, i + 1), dim) for i in range(len(results)))
    value = call.value(call.argument(0))
    call.lower(value.axes[dim], FIXED, "unbind")
    return tuple(_without_axis(value, dim) for _ in results)


@rule_for_numbers("getitem", traits=_MOVES)
def getitem(call: Call) -> Value:
    """One result of an op that has several."""
    results = call.found.values[call.argument(0)]
    found = results[call.argument(1)]
    assert isinstance(found, Value)
    return found


@rule_for_numbers("cat", traits=Trait.JOINS | Trait.LINEAR)
@rule_for_numbers("concat", "concatenate", traits=Trait.JOINS)
def concatenate(call: Call) -> Value | Rows:
    """The direct sum along one axis; every other axis is shared, but for those that only become one with it."""
    values = [call.value(a) for a in call.argument(0) if a.meta["val"].numel()]
    dim = call.argument("dim") % len(call.shape)
    ends = {merged_behind(user, dim) for user in call.node.users}
    behind = ends.pop() if len(ends) == 1 else None
    if behind is None:
        return call.joined(values, dim)
    for other in values[1:]:
        for i, (x, y) in enumerate(zip(values[0].axes, other.axes, strict=True)):
            if x.size > 1 and not dim <= i < behind:
                call.unify(x, y, "cat")
    return Rows(tuple(values), dim)


@rule_for_numbers("stack", traits=Trait.STACKS | Trait.LINEAR)
def stack(call: Call) -> Value:
    """Values in order along a new axis."""
    values = [call.value(a) for a in call.argument(0)]
    dim = call.argument("dim") % len(call.shape)
    first = values[0].axes
    for other in values[1:]:
        for x, y in zip(first, other.axes, strict=True):
            call.unify(x, y, "stack")
    return Value((*first[:dim], fresh(len(values), FIXED), *first[dim:]))


@rule("pad", traits=Trait.PADS)
def pad(call: Call) -> Value:
    """Entries added before and behind."""
    value, widths = call.value(call.argument(0)), call.argument(1)
    mode, filling = call.argument("mode"), call.argument("value") or 0
    axes = list(value.axes)
    for k in range(len(widths) // 2):
        i, before, behind = len(axes) - 1 - k, widths[2 * k], widths[2 * k + 1]
        if before == behind == 0:
            continue
        if mode != "constant" or min(before, behind) < 0:
            call.lower(axes[i], FIXED, "pad")
            axes[i] = fresh(call.shape[i], FIXED)
        else:
            axes[i] = direct_sum([fresh(before, FIXED), axes[i], fresh(behind, FIXED)])
    if filling and mode == "constant":
        call.lower_all(axes, ONES, "constant added")
    return rearranged(value, axes)


@rule_for_numbers("slice_scatter", harmless="self", traits=Trait.REPLACES)
def slice_scatter(call: Call) -> Value | Rows:
    """y = x with a run of entries along one axis replaced: what is left of x and what replaces it, side by side.

    Nothing is asked of x where nothing is left of it.
    """
    piece = call.value(call.argument(1))
    dim, step = call.argument("dim") % len(call.shape), call.argument("step")
    start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(call.shape[dim])
    if step == 1:
        return Rows((*_runs(call, dim, 0, start), piece, *_runs(call, dim, stop, call.shape[dim])), dim)
    whole = call.value(call.argument(0))
    for i, (x, y) in enumerate(zip(whole.axes, piece.axes, strict=True)):
        if i == dim:
            call.lower_all((x, y), FIXED, "strided slice")
        else:
            call.unify(x, y, "strided slice")
    return whole


@rule_for_numbers("select_scatter", harmless="self", traits=Trait.REPLACES)
def select_scatter(call: Call) -> Rows:
    """y = x with one entry along an axis replaced, such as the state of one layer among those of all."""
    piece, dim = call.value(call.argument(1)), call.argument("dim") % len(call.shape)
    at, size = call.argument("index") % call.shape[dim], call.shape[dim]
    before, behind = _runs(call, dim, 0, at), _runs(call, dim, at + 1, size)
    return Rows((*before, Value((*piece.axes[:dim], fresh(1, FIXED), *piece.axes[dim:])), *behind), dim)


def _runs(call: Call, dim: int, start: int, stop: int) -> list[Value]:
    """The entries from `start` to `stop` along one axis of the first operand, in runs that share no other axis."""
    return (_known_runs(call, dim, start, stop) or [run_along(call, dim, start, stop)]) if start < stop else []


@runs("slice_scatter")
def _put_between(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Open ends do not survive vmap, nor such counted from behind."""
    if len(args) > 3:
        start, stop, _ = slice(args[3], args[4] if len(args) > 4 else None).indices(args[0].shape[args[2]])
        args = (*args[:3], start, stop, *args[5:])
    return node.target(*args, **kwargs)  # type: ignore[operator]


@runs("pad_sequence")
def _fill_up(node: fx.Node, args: Any, kwargs: Any) -> Tensor:
    """Torch writes into a tensor of its own, which vmap refuses."""
    return _filled_up(*args, **kwargs)


def _filled_up(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    longest = max(map(len, sequences))
    missing = [longest - len(part) for part in sequences]
    widths = [(0, n) if padding_side == "right" else (n, 0) for n in missing]
    parts = [functional.pad(part, (0, 0) * (part.dim() - 1) + width, value=padding_value)
             for part, width in zip(sequences, widths, strict=True)]  # fmt: skip
    return torch.stack(parts, 0 if batch_first else 1)
