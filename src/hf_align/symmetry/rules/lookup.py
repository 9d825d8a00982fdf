"""Ops that choose entries by number. A number may be computed from the weights: it then points to an axis.

What `topk` over a router's scores returns numbers the experts; whatever is looked up with it carries their axis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.interpreter.bounds import FIXED, ONES, PERMUTATION
from hf_align.symmetry.interpreter.call import Call, rule, rule_for_numbers
from hf_align.symmetry.interpreter.spaces import Axis, fresh
from hf_align.symmetry.interpreter.values import Lookup, Value, aligned
from hf_align.symmetry.rules.pieces import run_along
from hf_align.symmetry.rules.runs import constant_run
from hf_align.symmetry.rules.ties import keep_order_of_ties
from hf_align.symmetry.rules.views import dims_of
from hf_align.tracing.ops import Trait, describe, does, op_name, runs

describe("where", "nonzero_numpy", traits=Trait.LISTS)
describe("sum", "any", "gt", "greater", "ne", "permute", "transpose", "select", "unsqueeze", "squeeze", "flatten",
         "view", "reshape", "to", "_to_copy", traits=Trait.GROWS)  # fmt: skip
describe("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_select", "gather",
         "take", "take_along_dim", "put", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
         "scatter_reduce_", "masked_scatter", "masked_scatter_", "slice_scatter", "select_scatter",
         "diagonal_scatter", "as_strided", "as_strided_scatter", "index", "index_put",
         "index_put_", "embedding", traits=Trait.MUST_FIT)  # fmt: skip
describe("nonzero", "argwhere", traits=Trait.LISTS | Trait.STACKS)
describe("multinomial", traits=Trait.DRAWS_PLACES)
describe("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", traits=Trait.ADDS_ENTRIES)
describe("bincount", traits=Trait.COUNTS)


@rule_for_numbers("embedding", harmless="padding_idx", traits=Trait.LOOKS_UP_ROWS | Trait.LOOKS_UP)
def embedding(call: Call) -> Value:
    """y_td = W_{s(t)d}: rows are looked up by number, so their order is fixed unless the numbers move along."""
    table, index = call.value(call.argument(0)), call.value(call.argument(1))
    _chosen_by(call, table, 0, index)
    return Value((*index.axes, table.axes[1]))


@runs("embedding")
def _rows_of(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The row of padding is read like any other, also by derivatives."""
    return args[0][args[1]]


@rule("embedding_bag", harmless="include_last_offset padding_idx")
def embedding_bag(call: Call) -> tuple[Value, ...]:
    """y_bd = Σ_t W_{s(b,t)d}."""
    table = call.value(call.argument(0))
    call.lower(table.axes[0], FIXED, "lookup")
    if call.argument("mode", 0) == 2:
        call.lower(table.axes[1], PERMUTATION, "reduction")
    for number in call.operands()[1:]:
        call.lower_all(call.value(number).axes, FIXED, "lookup")
    results = call.node.meta["val"]
    first = Value((fresh(results[0].shape[0], FIXED), table.axes[1]))
    return (first, *(Value(tuple(fresh(n, FIXED) for n in r.shape)) for r in results[1:]))


def _chosen_by(call: Call, value: Value, dim: int, index: Value) -> None:
    axis = value.axes[dim]
    call.found.lookups.append(Lookup(value, dim, index))
    if index.points_to is None or index.points_to.size != axis.size:
        call.lower_all((axis, *_pointed(index)), FIXED, "lookup")
        return
    call.unify(axis, index.points_to, "lookup")
    call.lower(axis, PERMUTATION, "lookup")


def _pointed(index: Value) -> tuple[Axis, ...]:
    return () if index.points_to is None else (index.points_to,)


@rule("topk", harmless="k largest sorted", traits=Trait.CHOOSES_LARGEST | Trait.POINTS_TO_LARGEST)
@rule("sort", "argsort", harmless="descending stable", traits=Trait.SORTS)
def topk(call: Call) -> object:
    """The largest entries along an axis and their numbers: permutations of the axis leave the values alone, and where
    entries may tie, not the numbers."""
    value = call.value(call.argument(0))
    axes = list(value.axes)
    dim = call.argument("dim", -1) % len(axes)
    call.mixes(value, [dim])
    call.lower_all(axes, PERMUTATION, "topk")
    keep_order_of_ties(call, axes[dim], dim)
    after = (*axes[:dim], fresh(call.shape[dim], FIXED), *axes[dim + 1 :])
    numbers = Value(after, points_to=axes[dim])
    return numbers if isinstance(call.node.meta["val"], Tensor) else (Value(after), numbers)


@rule_for_numbers("index", traits=Trait.MOVES | Trait.TAKES_ENTRIES | Trait.LOOKS_UP)
def index(call: Call) -> Value:
    """y_j… = x_{i(j)…}: entries along some axes, by number or by a mask."""
    numbers = call.argument(1)
    used = [i for i, n in enumerate(numbers) if n is not None]
    size = call.argument(0).meta["val"].shape[used[0]]
    if len(used) == 1 and (run := constant_run(call.constant(numbers[used[0]]), size)) is not None:
        call.keep_if_asked(used)
        return run_along(call, used[0], *run)
    value = call.value(call.argument(0))
    chosen: tuple[Axis, ...] = ()
    for i in used:
        chosen = _look_up(call, value, i, numbers[i], chosen)
    if any(is_mask(numbers[i]) for i in used):
        call.lower_all(value.axes, FIXED, "lookup")
        return Value(tuple(fresh(n, FIXED) for n in call.shape))
    rest = [axis for i, axis in enumerate(value.axes) if i not in used]
    before = used[0] if used[-1] - used[0] < len(used) else 0  # of numbers apart, their own axes come first
    return _in_shape(call, Value((*rest[:before], *chosen, *rest[before:])))


def is_mask(number: fx.Node) -> bool:
    """Whether entries are chosen by truth values, and not by number."""
    return number.meta["val"].dtype in (torch.bool, torch.uint8)


def _look_up(call: Call, value: Value, axis: int, number: fx.Node, chosen: tuple[Axis, ...]) -> tuple[Axis, ...]:
    found = call.value(number)
    _chosen_by(call, value, axis, found)
    for x, y in aligned(chosen, found.axes):
        if x.size > 1 and y.size > 1:
            call.unify(x, y, "lookup")
    return tuple(x if y.size == 1 else y for x, y in aligned(chosen, found.axes))


def _in_shape(call: Call, value: Value) -> Value:
    """Axes that numbers brought along by broadcasting are pinned."""
    if tuple(a.size for a in value.axes) == call.shape:
        return value
    return Value(tuple(a if a.size == n else fresh(n, FIXED) for a, n in zip(value.axes, call.shape, strict=True)))


@rule_for_numbers("index_select", traits=Trait.MOVES | Trait.LOOKS_UP)
def index_select(call: Call) -> Value:
    """y_…j… = x_…i(j)…."""
    value, numbers = call.value(call.argument(0)), call.value(call.argument(2))
    dim = call.argument(1) % len(value.axes)
    _chosen_by(call, value, dim, numbers)
    place = numbers.axes[0] if numbers.axes else fresh(1)
    return Value((*value.axes[:dim], place, *value.axes[dim + 1 :]))


@rule_for_numbers("gather", traits=Trait.GATHERS | Trait.LOOKS_UP)
@rule_for_numbers("take_along_dim")
def gather(call: Call) -> Value:
    """y_…j… = x_…i(…j…)…: one number for every entry of the result."""
    places = call.argument("indices" if op_name(call.node) == "take_along_dim" else "index")
    value, numbers = call.value(call.argument(0)), call.value(places)
    dim = call.argument("dim")
    if dim is None:
        call.lower_all((*value.axes, *numbers.axes, *_pointed(numbers)), FIXED, "lookup")
        return Value(tuple(fresh(n, FIXED) for n in call.shape))
    dim %= len(value.axes)
    axes = []
    for i, (x, n) in enumerate(zip(value.axes, numbers.axes, strict=True)):
        if i == dim:
            _chosen_by(call, value, i, replace(numbers, axes=(n,)))
            axes.append(n)
        elif x.size == call.shape[i] and (n.size < x.size or _is_uniform(call, places, i)):
            call.lower(x, PERMUTATION, "lookup")  # the same numbers all along it
            axes.append(x)
        elif x.size == n.size:
            axes.append(_in_step(call, x, n))
        else:
            call.lower_all((x, n), FIXED, "lookup")
            axes.append(fresh(call.shape[i], FIXED))
    return Value(tuple(axes), points_to=value.points_to)


def _in_step(call: Call, x: Axis, n: Axis) -> Axis:
    call.lower_all((x, n), PERMUTATION, "lookup")
    call.unify(x, n, "lookup")
    return x


@rule_for_numbers("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
                  harmless="value reduce include_self")  # fmt: skip
def scatter(call: Call) -> Value:
    """y = x, but y_…i(…j…)… = s_…j…."""
    value, numbers = call.value(call.argument(0)), call.value(call.argument("index"))
    dim = call.argument("dim") % len(call.shape)
    axes = []
    for i, (x, n) in enumerate(zip(value.axes, numbers.axes, strict=True)):
        if i == dim:
            axes.append(_scattered_along(call, x, n, numbers, dim))
        elif x.size == n.size:
            axes.append(_in_step(call, x, n))
        else:
            call.lower_all((x, n), FIXED, "lookup")
            axes.append(x)
    _scattered(call, call.argument("src"), numbers)
    call.lower_all(axes, PERMUTATION, "lookup")
    return Value(tuple(axes))


def _scattered_along(call: Call, x: Axis, n: Axis, numbers: Value, dim: int) -> Axis:
    """The axis that is numbered: the one that the numbers point to."""
    base, target = call.argument(0), numbers.points_to
    if target is not None and target.size == x.size:
        if base in call.found.values:
            call.unify(x, target, "lookup")
        if base in call.found.values or _is_uniform(call, base, dim):
            return target
    call.lower_all((x, n, *_pointed(numbers)), FIXED, "lookup")
    return x


def _scattered(call: Call, source: Any, numbers: Value) -> None:
    """There is one number for each entry of the source."""
    if source in call.found.values:
        for s, n in zip(call.value(source).axes, numbers.axes, strict=True):
            if s.size == n.size:
                _in_step(call, s, n)
            else:
                call.lower_all((s, n), FIXED, "lookup")
    elif isinstance(source, fx.Node):
        for i, n in enumerate(numbers.axes):
            if not _is_uniform(call, source, i):
                call.lower(n, FIXED, "constant")


def _is_uniform(call: Call, argument: fx.Node, dim: int) -> bool:
    """Whether a constant has the same entries all along an axis."""
    constant = call.constant(argument)
    return isinstance(constant, Tensor) and not call.found.program.varies(argument, dim)


@rule_for_numbers("one_hot", harmless="num_classes", traits=Trait.ONE_HOT)
def one_hot(call: Call) -> Value:
    """y_je = [i(j) = e]."""
    numbers = call.value(call.argument(0))
    size = call.shape[-1]
    if numbers.points_to is not None and numbers.points_to.size == size:
        return Value((*numbers.axes, numbers.points_to))
    call.lower_all(_pointed(numbers), FIXED, "lookup")
    return Value((*numbers.axes, fresh(size, FIXED)))


@runs("one_hot")
def _is_number(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Without a look at the numbers, so that many copies run at once."""
    return (args[0].unsqueeze(-1) == torch.arange(node.meta["val"].shape[-1], device=args[0].device)).long()


@rule("index_put", "index_put_", harmless="accumulate", traits=Trait.PUTS_ENTRIES)
@rule("masked_scatter", traits=Trait.PUTS_IN_ORDER)
@rule("index_copy", "index_fill", harmless="value index")
@rule("index_add", "index_add_", harmless="alpha", traits=Trait.ADDS_ROWS)
def written_by_number(call: Call) -> Value:
    """y = x with entries replaced or added to, by number: numbered axes are pinned, and the others shared."""
    inputs, numbers = call.operands(), _numbers(call)
    operands = [call.value(a) for a in inputs if a in call.found.values and a not in numbers]
    program = call.found.program
    others = [a for a in inputs if a not in call.found.values and a not in numbers and not program.is_always(a, 0)]
    axes: list[Axis] = [fresh(n, FIXED) for n in call.shape]
    untouched = _untouched(call, len(axes))
    for i in untouched:
        shared = [o.axes[i] for o in operands if len(o.axes) >= -i and o.axes[i].size == call.shape[i]]
        axes[i] = shared[0] if shared else axes[i]
        for other in shared[1:]:
            call.unify(axes[i], other, "add")
        if len(shared) < len(operands) or "index_fill" in str(call.node.target):
            call.lower(axes[i], ONES, "broadcast")
        for argument in others:
            constant = call.constant(argument)
            if not isinstance(constant, Tensor) or not constant.is_floating_point():
                continue
            varies = constant.dim() >= -i and program.varies(argument, constant.dim() + i)
            call.lower(axes[i], FIXED if varies else ONES, "constant")
    for operand in operands:
        places = enumerate(operand.axes, -len(operand.axes))
        call.lower_all((a for i, a in places if i not in untouched or a.size != call.shape[i]), FIXED, "lookup")
    for number in numbers:
        if number in call.found.values:
            call.lower_all(call.value(number).axes, FIXED, "lookup")
    return Value(tuple(axes))


@runs("masked_scatter")
def _in_order(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """By numbers, so that many copies run at once."""
    base, mask, source = args
    base, mask = torch.broadcast_tensors(base, mask)
    numbers = mask.flatten().cumsum(0).sub(1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.flatten()[numbers].view(base.shape), base)


def _numbers(call: Call) -> list[fx.Node]:
    """What says where entries are put: numbers, or masks."""
    found = call.argument(1 if does(call.node, Trait.PUTS_ENTRIES | Trait.PUTS_IN_ORDER) else 2)
    return [n for n in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(n, fx.Node)]


def _untouched(call: Call, rank: int) -> list[int]:
    """The axes that are neither numbered nor masked, counted from the last; those before a mask or several numbers
    left out, which other operands have in other places."""
    if does(call.node, Trait.PUTS_ENTRIES):
        sizes = [(n.meta["val"].dim() if is_mask(n) else 1) if n is not None else 0 for n in call.argument(1)]
        last = max(i for i, size in enumerate(sizes) if size)
        return list(range(sum(size or 1 for size in sizes[: last + 1]) - rank, 0))
    if does(call.node, Trait.PUTS_IN_ORDER):
        base, mask, source = (call.argument(i) for i in range(3))
        same = base.meta["val"].shape[-1:] == source.meta["val"].shape[-1:] and _is_of_rows(call, mask)
        return [-1] if same else []
    numbered = dims_of(call.argument("dim", 0), rank)
    return [i - rank for i in range(rank) if i not in numbered]


def _is_of_rows(call: Call, mask: fx.Node) -> bool:
    """Whether a mask holds in all entries along its last axis or in none."""
    if mask.meta["val"].shape[-1:] in ((), (1,)) or _is_uniform(call, mask, -1):
        return True
    return does(mask, Trait.COPIES) and _is_of_rows(call, mask.all_input_nodes[0])
