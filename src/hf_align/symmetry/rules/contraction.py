"""Ops that sum over a shared axis: its two operands carry each other's duals."""

from __future__ import annotations

import torch
from torch import fx

from hf_align.symmetry.interpreter.bounds import FIXED, ONES, PERMUTATION
from hf_align.symmetry.interpreter.call import Call, rule
from hf_align.symmetry.interpreter.spaces import Axis, product
from hf_align.symmetry.interpreter.values import Value, aligned
from hf_align.symmetry.rules.patterns import stored_matrix
from hf_align.tracing.ops import Trait, does, factors_of


@rule("linear", traits=Trait.AFFINE | Trait.OUTPUTS_FIRST, factors=(0, 1, 2))
def linear(call: Call) -> Value:
    """y_o = Σ_i W_oi x_i + b_o."""
    return _affine(call, call.argument(0), call.argument(1), 1, call.argument("bias"))


@rule("addmm", harmless="out_dtype", traits=Trait.AFFINE, factors=(1, 2, 0))
def addmm(call: Call) -> Value:
    """y_o = β b_o + α Σ_i x_i W_io."""
    plain = call.argument("alpha") == call.argument("beta") == 1
    return _affine(call, call.argument(1), call.argument(2), 0, call.argument(0), is_reading=plain)


@rule("baddbmm", harmless="alpha beta out_dtype", traits=Trait.CONTRACTS | Trait.BATCHED, factors=(1, 2, 0))
@rule("addbmm", harmless="alpha beta out_dtype")
def batched_affine(call: Call) -> Value:
    """y_abc = β m_abc + α Σ_k x_abk z_akc, or the sum of the products over a."""
    product_ = _multiplied(call, call.value(call.argument(1)).axes, call.value(call.argument(2)).axes)
    added = call.argument(0)
    if len(call.shape) < len(product_.axes):
        product_ = Value(product_.axes[1:])
    if added not in call.found.values:
        for axis, size in zip(product_.axes, call.shape, strict=True):
            if size > 1 and bool(torch.any(call.constant(added))):
                call.lower(axis, FIXED, "constant added")
        return product_
    _added(call, call.value(added).axes, product_.axes, "add")
    return product_


def _added(call: Call, added: tuple[Axis, ...], axes: tuple[Axis, ...], role: str) -> None:
    """What is added shares the element of the result, and asks g1 = 1 of axes along which it is copied."""
    for x, y in aligned(added, axes):
        if x.size > 1 and y.size > 1:
            call.unify(x, y, role)
        elif y.size > 1:
            call.lower(y, ONES, "broadcast")


def _affine(
    call: Call, source: fx.Node, matrix: fx.Node, in_axis: int, bias: fx.Node | None, *, is_reading: bool = True
) -> Value:
    value, weight = call.value(source), call.value(matrix)
    call.unify(value.axes[-1], weight.axes[in_axis].dual, "linear")
    call.mixes(value, [-1])
    call.mixes(weight, [in_axis])
    result = Value((*value.axes[:-1], weight.axes[1 - in_axis]))
    call.contracts((value.axes[-1], *result.axes))
    if bias is not None:
        _added(call, call.value(bias).axes, result.axes, "bias")
    if is_reading:
        call.reads(source, matrix, in_axis, bias)
    return result


@rule("inner")
def inner(call: Call) -> Value:
    """y_ij = Σ_k x_ik z_jk."""
    left, right = (call.value(call.argument(i)).axes for i in (0, 1))
    call.unify(left[-1], right[-1].dual, "score")
    call.mixes(Value(left), [-1])
    call.mixes(Value(right), [-1])
    call.contracts((*left, *right[:-1]))
    return Value((*left[:-1], *right[:-1]))


@rule("matmul", "mm", harmless="out_dtype", traits=Trait.CONTRACTS, factors=(0, 1, None))
@rule("bmm", harmless="out_dtype", traits=Trait.CONTRACTS | Trait.BATCHED, factors=(0, 1, None))
@rule("mv", "dot", harmless="out_dtype")
def matmul(call: Call) -> Value:
    """y_abc = Σ_k x_abk z_akc, batch axes a in step."""
    weight = stored_matrix(call.argument(1), call.found.program)
    if weight is not None and stored_matrix(call.argument(0), call.found.program) is None:
        call.reads(call.argument(0), weight[0], int(weight[1]), None)
    return _multiplied(call, call.value(call.argument(0)).axes, call.value(call.argument(1)).axes)


def _multiplied(call: Call, left: tuple[Axis, ...], right: tuple[Axis, ...]) -> Value:
    call.unify(left[-1], right[-2].dual if len(right) > 1 else right[-1].dual, "score")
    call.note(left[-1], "score")
    call.note(right[-1], "mix")
    call.mixes(Value(left), [-1])
    call.mixes(Value(right), [-2 if len(right) > 1 else -1])
    batch = []
    for x, z in aligned(left[:-2], right[:-2]):
        if x.size > 1 and z.size > 1:
            call.unify(x, z, "batch")
        wide = x if z.size == 1 else z
        call.lower(wide, PERMUTATION, "batch")
        call.note(wide, "batch")
        batch.append(wide)
    columns = right[-1:] if len(right) > 1 else ()
    call.contracts((left[-1], *batch, *left[-2:-1], *columns))
    return Value((*batch, *left[-2:-1], *columns))


@rule("linalg_solve_triangular", harmless="upper unitriangular")
def solve_triangular(call: Call) -> Value:
    """y = L⁻¹ x or x L⁻¹, in the coordinates in which L is triangular."""
    triangle, value = (call.value(call.argument(i)).axes for i in (0, 1))
    from_left = call.argument("left", True)
    call.lower_all((*triangle[-2:], value[-2 if from_left else -1]), FIXED, "triangular")
    return _multiplied(call, triangle, value) if from_left else _multiplied(call, value, triangle)


@rule("einsum", harmless="path", traits=Trait.NAMES_AXES)
def einsum(call: Call) -> Value:
    """y = Σ over the labels that the result lacks: a contraction where two operands share one, a sum where one has it.

    A label that two operands and the result share is a batch.
    """
    operands = [call.value(o) for o in call.argument(1)]
    terms, wanted = _letters(call.argument(0), [len(o.axes) for o in operands], len(call.shape))
    carriers: dict[str, list[Axis]] = {}
    for term, operand in zip(terms, operands, strict=True):
        for label, axis in zip(term, operand.axes, strict=True):
            carriers.setdefault(label, []).append(axis)
    for label, axes in carriers.items():
        _share(call, [a for a in axes if a.size > 1], label in wanted)
    for term, operand in zip(terms, operands, strict=True):
        call.mixes(operand, [i for i, label in enumerate(term) if label not in wanted])
    running = {label: max(axes, key=lambda a: a.size) for label, axes in carriers.items()}
    call.contracts(running.values())
    return Value(tuple(running[label] for label in wanted))


def _letters(equation: str, ranks: list[int], rank: int) -> tuple[list[list[str]], list[str]]:
    """Those of the axes of each operand, and of the result."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        result = "..." * ("..." in terms) + "".join(c for c in sorted(set(terms) - set(".,")) if terms.count(c) == 1)
    operands = [_labels(term, n) for term, n in zip(terms.split(","), ranks, strict=True)]
    return operands, _labels(result, rank)


def axes_in_step(node: fx.Node) -> tuple[list[tuple[fx.Node, list[str]]], list[str]] | None:
    """Names of the axes of what a product of matrices reads, and of its result: axes of one name run together."""
    result = node.meta["val"]
    if does(node, Trait.NAMES_AXES):
        operands: list[fx.Node] = list(node.args[1])  # type: ignore[arg-type]
        terms, wanted = _letters(str(node.args[0]), [o.meta["val"].dim() for o in operands], result.dim())
        return list(zip(operands, terms, strict=True)), wanted
    factors, multiplies = factors_of(node), does(node, Trait.AFFINE | Trait.CONTRACTS)
    if factors is None or not multiplies or does(node, Trait.CONVOLVES) or result.dim() < 2:
        return None
    names = [str(i) for i in range(-result.dim(), 0)]
    left, right = (node.args[i] for i in factors[:2])
    matrix = ["-1", "inner"] if does(node, Trait.OUTPUTS_FIRST) else ["inner", "-1"]
    by_place = [*names[:-1], "inner"], [*names[:-2], *matrix]
    added = [node.args[i] for i in factors[2:] if i is not None and i < len(node.args)]
    pairs = zip((left, right, *added), (*by_place, names), strict=False)
    return [(o, axes[len(axes) - o.meta["val"].dim() :]) for o, axes in pairs if isinstance(o, fx.Node)], names


def _labels(term: str, rank: int) -> list[str]:
    """One label for each axis; those that an ellipsis stands for are numbered from behind."""
    before, dots, behind = term.partition("...")
    hidden = [f"…{i}" for i in range(rank - len(before) - len(behind), 0, -1)] if dots else []
    return [*before, *hidden, *behind]


def _share(call: Call, axes: list[Axis], kept: bool) -> None:
    if len(axes) == 1 and not kept:
        call.lower(axes[0], ONES, "sum")
    elif len(axes) == 2 and not kept:
        call.unify(axes[0], axes[1].dual, "score")
    elif len(axes) > 1:
        for axis in axes:
            call.lower(axis, PERMUTATION, "batch")
            call.unify(axes[0], axis, "batch")


@rule("outer")
def outer(call: Call) -> Value:
    """y_ij = a_i b_j."""
    left, right = call.value(call.argument(0)), call.value(call.argument(1))
    return Value((product([left.axes[0]]), right.axes[0]))
