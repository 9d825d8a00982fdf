"""Ops that only rearrange entries: reshapes, slices, concatenations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.bounds import FIXED, ONES
from hf_align.symmetry.interpreter import Call, Rows, Value, rule, rule_for_numbers
from hf_align.symmetry.rules.runs import axes_kept, merged_behind, runs_along
from hf_align.symmetry.spaces import Axis, SpaceMismatchError, cut, direct_sum, fresh, product, split_product
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
    if isinstance(raw, Rows) and (behind := merged_behind(call.node, raw.dim)) is not None:
        return _one_behind_the_other(raw, behind)
    if isinstance(raw, Rows) and raw.dim in (kept := axes_kept(call.node)):
        return _reshaped_rows(call, raw, kept.index(raw.dim))
    value = call.value(call.argument(0))
    rows = _rows(call, value)
    if rows is not None:
        return rows
    return Value(_reshape(call, value.axes, call.shape), value.parameter, points_to=value.points_to)


@runs("view")
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


def _one_behind_the_other(rows: Rows, behind: int) -> Value:
    """The runs of an axis that becomes one with those behind it: each run keeps spaces of its own there."""
    before = rows.pieces[0].axes[: rows.dim]
    merged = [product(p.axes[rows.dim : behind]) for p in rows.pieces]
    return Value((*before, direct_sum(merged), *rows.pieces[0].axes[behind:]))


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
def unsqueeze(call: Call) -> Value:
    """A new axis of size one."""
    value = call.value(call.argument(0))
    at = call.argument(1) % (len(value.axes) + 1)
    return Value((*value.axes[:at], fresh(1), *value.axes[at:]), value.parameter, points_to=value.points_to)


@rule_for_numbers("squeeze", traits=_MOVES | Trait.ADDS_UNIT_AXES)
def squeeze(call: Call) -> Value:
    """Axes of size one dropped."""
    value = call.value(call.argument(0))
    dims, rank = call.argument("dim"), len(value.axes)
    chosen = dims_of(dims, rank)
    kept = tuple(a for i, a in enumerate(value.axes) if not (i in chosen and a.size == 1))
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


@rule_for_numbers("slice", traits=_MOVES)
def slice_(call: Call) -> Value:
    """A run of entries along one axis, which thereby falls into a sum."""
    dim, step = call.argument("dim") % len(call.shape), call.argument("step")
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
    raw = call.raw(call.argument(0))
    if isinstance(raw, Rows) and raw.dim == dim and (chosen := raw.between(start, stop)):
        return call.joined(chosen, dim)
    value = call.value(call.argument(0))
    axes = list(value.axes)
    if stop - start < axes[dim].size:
        axes[dim] = _piece_or_pinned(call, axes[dim], start, stop)
    return rearranged(value, axes)


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
    start = int(start) % call.argument(0).meta["val"].shape[dim]
    return run_along(call, dim, start, start + call.argument("length"))


@rule_for_numbers("split", "split_with_sizes", "chunk", harmless="split_size split_sizes chunks", traits=_MOVES)
@rule_for_numbers("tensor_split", harmless="sections indices")
def split(call: Call) -> tuple[Value, ...]:
    """Consecutive pieces of one axis."""
    results = call.node.meta["val"]
    dim = call.argument("dim") % len(results[0].shape)
    sizes = [r.shape[dim] for r in results]
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


@rule_for_numbers("roll", harmless="shifts", traits=Trait.ROLLS)
@rule_for_numbers("flip")
def moved_along(call: Call) -> Value:
    """y_i = x_π(i) with a fixed π."""
    value = call.value(call.argument(0))
    moved = dims_of(call.argument("dims") or None, len(value.axes))
    call.mixes(value, moved)
    call.lower_all((value.axes[i] for i in moved), FIXED, "order")
    return rearranged(value, value.axes)


@rule("tril", "triu", harmless="diagonal")
def triangle(call: Call) -> Value:
    """y_ij = x_ij for i ≥ j, else 0 (or the reverse)."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes[-2:], FIXED, "triangle")
    return Value(value.axes)


@rule("pad")
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


@rule_for_numbers("copy", harmless="self", traits=Trait.REPLACES)
def copy(call: Call) -> Value:
    """y = the second operand, in the shape of the first."""
    value = call.value(call.argument(1))
    axes = [*(fresh(1) for _ in range(len(call.shape) - len(value.axes))), *value.axes]
    return Value(tuple(_copies(call, a, n) for a, n in zip(axes, call.shape, strict=True)))


@runs("copy")
def _copied(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Torch has no forward derivative of it."""
    return args[1].to(args[0].dtype).expand(args[0].shape).clone()


@rule_for_numbers("slice_scatter", traits=Trait.REPLACES)
def slice_scatter(call: Call) -> Value:
    """y = x with a run of entries along one axis replaced: the sum of what is left of x and what replaces it."""
    base, piece = call.argument(0), call.value(call.argument(1))
    dim, step = call.argument("dim") % len(call.shape), call.argument("step")
    start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(call.shape[dim])
    axes = list(piece.axes)
    if step != 1:
        call.lower(axes[dim], FIXED, "strided slice")
        axes[dim] = fresh(call.shape[dim], FIXED)
    if base in call.found.values:
        whole = call.value(base)
        for i, (x, y) in enumerate(zip(axes, whole.axes, strict=True)):
            if i != dim and x.size > 1:
                call.unify(x, y, "cat")
        if step != 1:
            call.lower(whole.axes[dim], FIXED, "strided slice")
            return Value(tuple(axes))
        before, behind = _piece(whole.axes[dim], 0, start), _piece(whole.axes[dim], stop, call.shape[dim])
    else:
        _require_blank(call, base, axes, dim)
        before, behind = fresh(start, FIXED), fresh(call.shape[dim] - stop, FIXED)
    if step == 1:
        axes[dim] = direct_sum([before, axes[dim], behind])
    return Value(tuple(axes))


@runs("slice_scatter")
def _put_between(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Open ends do not survive vmap, nor such counted from behind."""
    if len(args) > 3:
        start, stop, _ = slice(args[3], args[4] if len(args) > 4 else None).indices(args[0].shape[args[2]])
        args = (*args[:3], start, stop, *args[5:])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _require_blank(call: Call, base: Any, axes: list[Axis], dim: int) -> None:
    """Entries of a constant that stay beside the replaced ones ask for more, unless they are zero."""
    constant = call.constant(base)
    if constant is not None and bool(constant.any()):
        call.lower_all([a for i, a in enumerate(axes) if i != dim], FIXED, "constant")


@rule_for_numbers("unfold", harmless="size step")
def unfold(call: Call) -> Value:
    """y_…i…k = x_…(i·step + k): windows along one axis."""
    value = call.value(call.argument(0))
    axes = list(value.axes)
    dim = call.argument(1) % len(axes)
    call.lower(axes[dim], FIXED, "windows")
    axes[dim] = fresh(call.shape[dim], FIXED)
    return rearranged(value, [*axes, fresh(call.shape[-1], FIXED)])


@rule_for_numbers("as_strided", harmless="size stride storage_offset")
def strided(call: Call) -> Value:
    """y_j = x_π(j), π fixed by the places in memory: an axis of y that steps along one of x alone is that axis."""
    value, places = call.value(call.argument(0)), places_shown(call.node)
    if bool((places < 0).any()):
        raise SpaceMismatchError("memory that the operand does not show")
    sizes = [a.size for a in value.axes]
    found = torch.unravel_index(places, sizes)
    passed = {k: i for k, n in enumerate(call.shape) for i, m in enumerate(sizes)
              if n == m > 1 and _steps_along(found, i, k)}  # fmt: skip
    call.lower_all((a for i, a in enumerate(value.axes) if i not in passed.values()), FIXED, "windows")
    return rearranged(value, (value.axes[passed[k]] if k in passed else fresh(n, FIXED)
                              for k, n in enumerate(call.shape)))  # fmt: skip


@runs("as_strided")
def _by_places(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The operand may lie in memory otherwise than it was traced."""
    places = places_shown(node)
    return node.target(*args, **kwargs) if bool((places < 0).any()) else args[0].reshape(-1)[places]  # type: ignore[operator]


def places_shown(node: fx.Node) -> Tensor:
    """Of `as_strided`, where in the operand each entry of the result stands, counted in row-major order; -1 if
    nowhere."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    laid_out: Tensor = operand.meta["val"]
    size, stride, *start = node.args[1:]
    behind = sum((n - 1) * s for n, s in zip(laid_out.shape, laid_out.stride(), strict=True)) + 1
    memory = torch.full((behind,), -1)
    memory.as_strided(laid_out.shape, laid_out.stride()).copy_(torch.arange(laid_out.numel()).reshape(laid_out.shape))
    first = start[0] - int(laid_out.storage_offset()) if start and isinstance(start[0], int) else 0
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))  # type: ignore[arg-type]
    if first < 0 or last >= behind:
        return torch.full(size, -1)  # type: ignore[arg-type]
    return memory.as_strided(size, stride, first)  # type: ignore[arg-type]


def _steps_along(found: Sequence[Tensor], i: int, k: int) -> bool:
    """Whether a step along axis k of the result is one along axis i of the operand, from end to end."""
    steps = torch.arange(found[i].shape[k]).reshape(-1, *[1] * (found[i].dim() - 1 - k))
    alone = all(bool((f == f.narrow(k, 0, 1)).all()) for j, f in enumerate(found) if j != i)
    return alone and bool((found[i] == steps).all())


@rule_for_numbers("im2col", harmless="kernel_size dilation padding stride")
def im2col(call: Call) -> Value:
    """y_(ck)p = x_c(p+k): windows of an image, channels outermost."""
    value = call.value(call.argument(0))
    batch, channels = value.axes[:-3], value.axes[-3]
    call.lower_all(value.axes[-2:], FIXED, "windows")
    cells = fresh(call.shape[-2] // channels.size, FIXED)
    return Value((*batch, product([channels, cells]), fresh(call.shape[-1], FIXED)))


@rule("view_as_complex", traits=Trait.LINEAR)
@rule("view_as_real", traits=Trait.LINEAR | Trait.AS_PAIRS)
@rule("real", "imag")
def complex_view(call: Call) -> Value:
    """Pairs of reals as one complex number, and back."""
    axes = call.value(call.argument(0)).axes
    if len(call.shape) < len(axes):
        call.lower(axes[-1], FIXED, "complex")
        return Value(axes[:-1])
    return Value((*axes, *(fresh(n, FIXED) for n in call.shape[len(axes) :])))


@rule_for_numbers("diagonal", harmless="offset dim1 dim2")
def diagonal(call: Call) -> Value:
    """y_i = x_ii."""
    axes = call.value(call.argument(0)).axes
    call.lower_all(axes, FIXED, "diagonal")
    return Value(tuple(fresh(n, FIXED) for n in call.shape))
