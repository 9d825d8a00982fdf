"""Ops that only rearrange entries: reshapes, slices, concatenations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import fx

from hf_align.symmetry.interpreter.bounds import FIXED, ONES
from hf_align.symmetry.interpreter.call import Call, rule, rule_for_numbers
from hf_align.symmetry.interpreter.spaces import (
    Axis,
    SpaceMismatchError,
    cut,
    fresh,
    product,
    split_product,
)
from hf_align.symmetry.interpreter.values import Rows, Value
from hf_align.symmetry.rules.runs import axes_kept, merged_behind, runs_along
from hf_align.tracing.ops import Trait, runs

_SHAPES = "size shape start_dim end_dim dim sizes other"
_RESHAPES, _REORDERS = Trait.RESHAPES | Trait.MOVES, Trait.REORDERS_AXES | Trait.MOVES
_MOVES = Trait.MOVES | Trait.LINEAR


@rule_for_numbers("view", "reshape", "flatten", "unflatten", harmless=_SHAPES, traits=_RESHAPES | Trait.LINEAR)
@rule_for_numbers("_unsafe_view", harmless=_SHAPES, traits=_RESHAPES)
@rule_for_numbers("view_as", "reshape_as", harmless=_SHAPES, traits=Trait.RESHAPES | Trait.LIKE | Trait.LINEAR)
@rule_for_numbers("_reshape_alias", harmless=_SHAPES, traits=Trait.RESHAPES)
def view(call: Call) -> Value | Rows:
    """The same entries in row-major order under another shape: products of spaces are split and joined."""
    call.expect("stride", [math.prod(call.shape[i + 1 :]) for i in range(len(call.shape))])
    raw = call.raw(call.argument(0))
    if isinstance(raw, Rows) and raw.dim in (kept := axes_kept(call.node)):
        return _reshaped_rows(call, raw, kept.index(raw.dim))
    if isinstance(raw, Rows) and (behind := merged_behind(call.node, raw.dim)) is not None:
        return _one_behind_the_other(call, raw, behind)
    value = call.value(call.argument(0))
    call.keep_if_asked({*range(len(value.axes))}.difference(axes_kept(call.node)))
    rows = _rows(call, value)
    if rows is not None:
        return rows
    return Value(_reshape(call, value.axes, call.shape), value.parameter, points_to=value.points_to)


@runs("view", "_unsafe_view")
def _viewed(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Strides may differ from those that were traced."""
    sizes = isinstance(args[1], (list, tuple))
    return args[0].reshape(args[1]) if sizes else node.target(*args, **kwargs)  # type: ignore[operator]


def _rows(call: Call, value: Value) -> Rows | None:
    """Queries, keys and values in one axis: where all users choose runs along it, each run has spaces of its own."""
    runs = runs_along(call.node, call.found.program.constants)
    if runs is None:
        return None
    dim, sizes = runs
    before, behind = math.prod(call.shape[:dim]), math.prod(call.shape[dim + 1 :])
    whole, at = 1, 0
    while (
        at < len(value.axes) and whole * value.axes[at].size <= before and before % (whole * value.axes[at].size) == 0
    ):
        whole *= value.axes[at].size
        at += 1
    if at == len(value.axes) or behind == 1:
        return None
    outer, inner = split_product(product(value.axes[at:]), before // whole)
    try:
        cuts = cut(inner, [size * behind for size in sizes])
    except SpaceMismatchError:
        return None
    pieces = []
    for size, run in zip(sizes, cuts, strict=True):
        axes = _reshape(call, (*value.axes[:at], outer, run), (*call.shape[:dim], size, *call.shape[dim + 1 :]))
        pieces.append(Value(axes))
    return Rows(tuple(pieces), dim)


def _one_behind_the_other(call: Call, rows: Rows, behind: int) -> Value:
    """The runs of an axis that becomes one with those behind it: each run keeps spaces of its own there."""
    dim = rows.dim
    pieces = [Value((*p.axes[:dim], product(p.axes[dim:behind]), *p.axes[behind:])) for p in rows.pieces]
    return call.joined(pieces, dim)


def _reshaped_rows(call: Call, rows: Rows, dim: int) -> Rows:
    """The axis of the runs stays as it is: each run is reshaped by itself."""
    shapes = ((*call.shape[:dim], p.axes[rows.dim].size, *call.shape[dim + 1 :]) for p in rows.pieces)
    pieces = (Value(_reshape(call, p.axes, shape)) for p, shape in zip(rows.pieces, shapes, strict=True))
    return Rows(tuple(pieces), dim)


def rearranged(value: Value, axes: Iterable[Axis]) -> Value:
    """The same entries along other axes: no longer a weight as stored, but integers still number what they did."""
    return Value(tuple(axes), points_to=value.points_to)


def _reshape(call: Call, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """Match runs of axes with runs of the new shape of the same size: no split is wider than it must be.

    Raises:
        SpaceMismatchError: the entries are others, as where bytes are read as another type.
    """
    if _run_size([*axes]) != math.prod(shape):
        raise SpaceMismatchError(f"{_run_size([*axes])} entries viewed as {math.prod(shape)}")
    result: list[Axis] = []
    old, new = list(axes), list(shape)
    while new:
        if new[0] == 1:
            result.append(fresh(1))
            new.pop(0)
            continue
        if old[0].size == 1:
            old.pop(0)
            continue
        run, sizes = [old.pop(0)], [new.pop(0)]
        while _run_size(run) != math.prod(sizes):
            if _run_size(run) < math.prod(sizes):
                run.append(old.pop(0))
            else:
                sizes.append(new.pop(0))
        result += _divided(call, run, sizes)
    return tuple(result)


def _divided(call: Call, run: list[Axis], sizes: list[int]) -> list[Axis]:
    """Axes as one product, and that as a product of other sizes; pinned where entries change rows, as in a shift by
    relative positions."""
    parts, rest = [], product(run)
    try:
        for size in sizes[:-1]:
            head, rest = split_product(rest, size) if size > 1 else (fresh(1), rest)
            parts.append(head)
    except SpaceMismatchError as mismatch:
        call.lower_all(run, FIXED, str(mismatch))
        return [fresh(size, FIXED) for size in sizes]
    return [*parts, rest]


def _run_size(axes: list[Axis]) -> int:
    return math.prod(a.size for a in axes)


@rule_for_numbers("transpose", traits=_REORDERS | Trait.LINEAR)
@rule_for_numbers("swapaxes", "swapdims", traits=Trait.REORDERS_AXES)
def transpose(call: Call) -> Value | Rows:
    """y_ji = x_ij."""
    order = list(range(len(call.shape)))
    i, j = call.argument(1), call.argument(2)
    order[i], order[j] = order[j], order[i]
    return _permuted(call, order)


def _permuted(call: Call, order: list[int]) -> Value | Rows:
    raw = call.raw(call.argument(0))
    if isinstance(raw, Rows):
        pieces = tuple(Value(tuple(p.axes[i] for i in order)) for p in raw.pieces)
        return Rows(pieces, order.index(raw.dim))
    value = call.value(call.argument(0))
    return rearranged(value, (value.axes[i] for i in order))


@rule_for_numbers("t", "numpy_T", traits=Trait.REORDERS_AXES)
def matrix_transpose(call: Call) -> Value:
    """y_ji = x_ij."""
    value = call.value(call.argument(0))
    return rearranged(value, reversed(value.axes))


@rule_for_numbers("permute", traits=_REORDERS | Trait.LINEAR)
def permute(call: Call) -> Value | Rows:
    """Axes in another order."""
    return _permuted(call, list(dims_of(call.argument(1), len(call.shape))))


@rule_for_numbers("movedim", traits=_REORDERS)
def movedim(call: Call) -> Value:
    """Axes to other places."""
    value = call.value(call.argument(0))
    rank = len(value.axes)
    sources, targets = (dims_of(call.argument(i), rank) for i in (1, 2))
    order = [i for i in range(rank) if i not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return rearranged(value, (value.axes[i] for i in order))


@rule_for_numbers("unsqueeze", traits=_MOVES | Trait.ADDS_UNIT_AXES)
def unsqueeze(call: Call) -> Value | Rows:
    """A new axis of size one."""
    at, raw = call.argument(1) % len(call.shape), call.raw(call.argument(0))
    if isinstance(raw, Rows):
        pieces = (Value((*p.axes[:at], fresh(1), *p.axes[at:])) for p in raw.pieces)
        return Rows(tuple(pieces), raw.dim + (at <= raw.dim))
    value = call.value(call.argument(0))
    return Value((*value.axes[:at], fresh(1), *value.axes[at:]), value.parameter, points_to=value.points_to)


@rule_for_numbers("squeeze", traits=_MOVES | Trait.ADDS_UNIT_AXES)
def squeeze(call: Call) -> Value | Rows:
    """Axes of size one dropped."""
    shape, raw = call.argument(0).meta["val"].shape, call.raw(call.argument(0))
    chosen = dims_of(call.argument("dim"), len(shape))
    left = [i for i, size in enumerate(shape) if not (i in chosen and size == 1)]
    if isinstance(raw, Rows):
        return Rows(tuple(Value(tuple(p.axes[i] for i in left)) for p in raw.pieces), left.index(raw.dim))
    value = call.value(call.argument(0))
    kept = tuple(value.axes[i] for i in left)
    return Value(kept, value.parameter, points_to=value.points_to)


def dims_of(dims: Any, rank: int) -> tuple[int, ...]:
    """One axis number, several, or None for all, as non-negative numbers."""
    if dims is None:
        return tuple(range(rank))
    return tuple(d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


@rule_for_numbers("expand", harmless="size", traits=_MOVES | Trait.COPIES)
@rule_for_numbers("expand_as", harmless="other", traits=Trait.COPIES | Trait.LIKE)
@rule_for_numbers("broadcast_to", harmless="size", traits=Trait.COPIES)
def expand(call: Call) -> Value:
    """Copies along an axis of size one: every g with g1 = 1 leaves them alone."""
    value = call.value(call.argument(0))
    unchanged = value.parameter is not None and call.shape == tuple(a.size for a in value.axes)
    axes = _broadcast(call, value.axes, call.shape).axes
    return Value(axes, value.parameter if unchanged else None, points_to=value.points_to)


@rule("broadcast_tensors")
def broadcast_tensors(call: Call) -> tuple[Value, ...]:
    """Copies of each tensor along the axes that it has not, up to the shape of all."""
    return tuple(_broadcast(call, call.value(x).axes, r.shape) for x, r in
                 zip(call.argument(0), call.node.meta["val"], strict=True))  # fmt: skip


def _broadcast(call: Call, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> Value:
    padded = (*(fresh(1) for _ in range(len(shape) - len(axes))), *axes)
    return Value(tuple(_copies(call, a, n) for a, n in zip(padded, shape, strict=True)))


def _copies(call: Call, axis: Axis, size: int) -> Axis:
    if axis.size == size:
        return axis
    copies = fresh(size)
    call.lower(copies, ONES, "expand")
    return copies


@rule_for_numbers("repeat", harmless="repeats", traits=Trait.MOVES)
@rule_for_numbers("tile", harmless="dims")
def repeat(call: Call) -> Value:
    """y_(ji) = x_i: whole copies one after another along an axis."""
    value = call.value(call.argument(0))
    axes = [*(fresh(1) for _ in range(len(call.shape) - len(value.axes))), *value.axes]
    return rearranged(value, (_whole_copies(call, a, n) for a, n in zip(axes, call.shape, strict=True)))


def _whole_copies(call: Call, axis: Axis, size: int) -> Axis:
    return axis if axis.size == size else product([_copies(call, fresh(1), size // axis.size), axis])


@rule_for_numbers("repeat_interleave", harmless="output_size", traits=_MOVES)
def repeat_interleave(call: Call) -> Value:
    """y_(ij) = x_i: every entry several times in a row."""
    value, times = call.value(call.argument(0)), call.argument(1)
    dim = call.argument("dim")
    if not isinstance(times, int):
        return _repeated_by_data(call, value, dim)
    if dim is None:
        flat = product(value.axes)
        return rearranged(value, [product([flat, _copies(call, fresh(1), times)])])
    axes = list(value.axes)
    dim %= len(axes)
    axes[dim] = product([axes[dim], _copies(call, fresh(1), times)]) if times > 1 else axes[dim]
    return rearranged(value, axes)


def _repeated_by_data(call: Call, value: Value, dim: int | None) -> Value:
    chosen = range(len(value.axes)) if dim is None else [dim % len(value.axes)]
    for i in chosen:
        call.lower(value.axes[i], FIXED, "repeat")
    if dim is None:
        return Value((fresh(call.shape[0], FIXED),))
    i = dim % len(value.axes)
    return Value((*value.axes[:i], fresh(call.shape[i], FIXED), *value.axes[i + 1 :]))


@rule_for_numbers("copy", harmless="self", traits=Trait.REPLACES)
def copy(call: Call) -> Value:
    """y = the second operand, in the shape of the first."""
    return _broadcast(call, call.value(call.argument(1)).axes, call.shape)


@runs("copy")
def _copied(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Torch has no forward derivative of it."""
    return args[1].to(args[0].dtype).expand(args[0].shape).clone()
