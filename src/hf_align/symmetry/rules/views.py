"""Ops that only rearrange entries: reshapes, slices, concatenations."""

from __future__ import annotations

import math
from typing import Any

from hf_align.symmetry.bounds import FIXED, ONES
from hf_align.symmetry.interpreter import Call, Value, rule
from hf_align.symmetry.spaces import Axis, cut, direct_sum, fresh, product, split_product


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as")
def view(call: Call) -> Value:
    """The same entries in row-major order under another shape: products of spaces are split and joined."""
    value = call.value(call.argument(0))
    return Value(_reshape(value.axes, call.shape), value.parameter)


def _reshape(axes: tuple[Axis, ...], shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """Match runs of axes with runs of the new shape of the same size: no split is wider than it must be."""
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
        rest = product(run)
        for size in sizes[:-1]:
            head, rest = split_product(rest, size) if size > 1 else (fresh(1), rest)
            result.append(head)
        result.append(rest)
    return tuple(result)


def _run_size(axes: list[Axis]) -> int:
    return math.prod(a.size for a in axes)


@rule("transpose", "swapaxes", "swapdims")
def transpose(call: Call) -> Value:
    """y_ji = x_ij."""
    axes = list(call.value(call.argument(0)).axes)
    i, j = call.argument(1), call.argument(2)
    axes[i], axes[j] = axes[j], axes[i]
    return Value(tuple(axes))


@rule("t", "numpy_T")
def matrix_transpose(call: Call) -> Value:
    """y_ji = x_ij."""
    return Value(tuple(reversed(call.value(call.argument(0)).axes)))


@rule("permute")
def permute(call: Call) -> Value:
    """Axes in another order."""
    axes = call.value(call.argument(0)).axes
    return Value(tuple(axes[i] for i in call.argument(1)))


@rule("unsqueeze")
def unsqueeze(call: Call) -> Value:
    """A new axis of size one."""
    value = call.value(call.argument(0))
    at = call.argument(1) % (len(value.axes) + 1)
    return Value((*value.axes[:at], fresh(1), *value.axes[at:]), value.parameter)


@rule("squeeze")
def squeeze(call: Call) -> Value:
    """Axes of size one dropped."""
    value = call.value(call.argument(0))
    dims, rank = call.argument(1, "dim"), len(value.axes)
    chosen = dims_of(dims, rank)
    kept = tuple(a for i, a in enumerate(value.axes) if not (i in chosen and a.size == 1))
    return Value(kept, value.parameter)


def dims_of(dims: Any, rank: int) -> tuple[int, ...]:
    """One axis number, several, or None for all, as non-negative numbers."""
    if dims is None:
        return tuple(range(rank))
    return tuple(d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


@rule("expand", "expand_as")
def expand(call: Call) -> Value:
    """Copies along an axis of size one: every g with g1 = 1 leaves them alone."""
    value = call.value(call.argument(0))
    axes = [*(fresh(1) for _ in range(len(call.shape) - len(value.axes))), *value.axes]
    unchanged = all(a.size == n for a, n in zip(axes, call.shape, strict=True))
    return Value(tuple(_copies(call, a, n) for a, n in zip(axes, call.shape, strict=True)),
                 value.parameter if unchanged else None)  # fmt: skip


def _copies(call: Call, axis: Axis, size: int) -> Axis:
    if axis.size == size:
        return axis
    copies = fresh(size)
    call.lower(copies, ONES, "expand")
    return copies


@rule("slice")
def slice_(call: Call) -> Value:
    """A run of entries along one axis, which thereby falls into a sum."""
    axes = list(call.value(call.argument(0)).axes)
    dim, step = call.argument(1, "dim", 0) % len(axes), call.argument(4, "step", 1)
    size = axes[dim].size
    start, stop, _ = slice(call.argument(2, "start"), call.argument(3, "end")).indices(size)
    if step != 1:
        call.lower(axes[dim], FIXED, "strided slice")
        axes[dim] = fresh(call.shape[dim], FIXED)
    elif stop - start < size:
        axes[dim] = _piece(axes[dim], start, stop)
    return Value(tuple(axes))


def _piece(axis: Axis, start: int, stop: int) -> Axis:
    if start >= stop:
        return fresh(0, FIXED)
    sizes = [n for n in (start, stop - start, axis.size - stop) if n]
    return cut(axis, sizes)[1 if start else 0]


@rule("select")
def select(call: Call) -> Value:
    """One entry along an axis, by number."""
    axes = list(call.value(call.argument(0)).axes)
    dim = call.argument(1) % len(axes)
    call.lower(axes[dim], FIXED, "select")
    return Value((*axes[:dim], *axes[dim + 1 :]))


@rule("split", "split_with_sizes", "chunk")
def split(call: Call) -> tuple[Value, ...]:
    """Consecutive pieces of one axis."""
    axes = call.value(call.argument(0)).axes
    dim = call.argument(2, "dim", 0) % len(axes)
    pieces = cut(axes[dim], [r.shape[dim] for r in call.node.meta["val"]])
    return tuple(Value((*axes[:dim], piece, *axes[dim + 1 :])) for piece in pieces)


@rule("unbind")
def unbind(call: Call) -> tuple[Value, ...]:
    """Every entry along an axis, in order."""
    axes = call.value(call.argument(0)).axes
    dim = call.argument(1, "dim", 0) % len(axes)
    call.lower(axes[dim], FIXED, "unbind")
    return tuple(Value((*axes[:dim], *axes[dim + 1 :])) for _ in call.node.meta["val"])


@rule("getitem")
def getitem(call: Call) -> Value:
    """One result of an op that has several."""
    results = call.found.values[call.argument(0)]
    found = results[call.argument(1)]
    assert isinstance(found, Value)
    return found


@rule("cat", "concat")
def concatenate(call: Call) -> Value:
    """The direct sum along one axis; every other axis is shared."""
    values = [call.value(a) for a in call.argument(0) if a.meta["val"].numel()]
    dim = call.argument(1, "dim", 0) % len(call.shape)
    first = values[0].axes
    for other in values[1:]:
        for i, (x, y) in enumerate(zip(first, other.axes, strict=True)):
            if i != dim and x.size > 1:
                call.unify(x, y, "cat")
    joined = direct_sum([v.axes[dim] for v in values])
    return Value((*first[:dim], joined, *first[dim + 1 :]))


@rule("stack")
def stack(call: Call) -> Value:
    """Values in order along a new axis."""
    values = [call.value(a) for a in call.argument(0)]
    dim = call.argument(1, "dim", 0) % len(call.shape)
    first = values[0].axes
    for other in values[1:]:
        for x, y in zip(first, other.axes, strict=True):
            call.unify(x, y, "stack")
    return Value((*first[:dim], fresh(len(values), FIXED), *first[dim:]))
