"""Elementwise ops: the identity-like, the linear, the functions of one entry, and products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.interpreter.bounds import FIXED, ONES, PERMUTATION, Scalars, monomial
from hf_align.symmetry.interpreter.call import Call, rule, rule_for_numbers
from hf_align.symmetry.interpreter.spaces import Axis, cut, fresh
from hf_align.symmetry.interpreter.values import Product, Value, aligned
from hf_align.symmetry.rules.gains import gain, is_vector_along_last, linked_gain, offset_gain
from hf_align.symmetry.rules.patterns import subtracts_mean
from hf_align.tracing.ops import Trait, describe, op_name, rounds, runs

_CONSTANTS_OF_FUNCTIONS = (
    "self other min max alpha beta scale input_scale threshold value min_val max_val approximate eps nan posinf neginf"
    " decimals exponent out_int32 right assume_unique invert rounding_mode"
)
"""What only makes f another function."""
_SAME = Trait.SAME | Trait.MOVES


@rule_for_numbers("contiguous", "clone", "alias", traits=_SAME | Trait.LINEAR)
@rule_for_numbers("to", "_to_copy", traits=_SAME | Trait.LINEAR | Trait.CASTS)
@rule_for_numbers("type_as", harmless="other", traits=_SAME | Trait.CASTS | Trait.LIKE)
@rule_for_numbers("dropout", harmless="p", traits=_SAME | Trait.DROPS_OUT)
@rule_for_numbers("dropout_", "feature_dropout", "alpha_dropout", harmless="p", traits=Trait.SAME | Trait.DROPS_OUT)
@rule_for_numbers("detach", traits=_SAME)
@rule_for_numbers("detach_", "lift_fresh_copy", traits=Trait.SAME)
def unchanged(call: Call) -> object:
    """y = x; where it is rounded, an odd function of one entry, and any function as an integer."""
    call.argument("dtype")  # as the result shows
    call.expect("train", False)
    if not rounds(call.node):
        return call.raw(call.argument(0))
    value = call.value(call.argument(0))
    is_odd = call.node.meta["val"].is_floating_point()
    call.lower_all(value.axes, monomial(Scalars.SIGN) if is_odd else PERMUTATION, "rounding")
    return Value(value.axes)


describe("isnan", traits=Trait.NAN)
describe("clamp", "clamp_", "clip", "clamp_max", "clamp_max_", traits=Trait.LIMITS)
describe("clamp_min", "clamp_min_", traits=Trait.FLOORS)
describe("gt", "ge", "lt", "le", "eq", "ne", traits=Trait.COMPARES)
describe("sigmoid", "sigmoid_", "tanh", "tanh_", "erf", "erfc", "gelu", "elu", "celu", "selu", "expm1",
         "exp", "exp_", "exp2", "softplus", "silu", "silu_", "mish", traits=Trait.SATURATES)  # fmt: skip


@runs("to", "_to_copy", "type_as")
def _stays_wide(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Rounding is no part of the function."""
    floats = isinstance(args[0], Tensor) and args[0].is_floating_point() and node.meta["val"].is_floating_point()
    return args[0] if floats else node.target(*args, **kwargs)  # type: ignore[operator]


@runs("detach", "detach_")
def _keeps_gradients(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Detached values are values: a weight behind them moves the outputs all the same."""
    return args[0]


describe("native_dropout", traits=Trait.DROPS_OUT)
describe("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like",
         "sym_size", traits=Trait.MAKES)  # fmt: skip
describe("empty_like", "new_empty", traits=Trait.MAKES | Trait.BLANK)
describe("empty", "empty_strided", "empty_permuted", "new_empty_strided", traits=Trait.BLANK)


@rule("_conj", "conj_physical", "resolve_conj")
@rule("neg", traits=Trait.LINEAR)
def negative(call: Call) -> Value:
    """y = -x, or the conjugate of x: linear over the reals, commutes with every g, which is real."""
    return Value(call.value(call.argument(0)).axes)


@rule("zero", "zero_")
def nothing(call: Call) -> Value:
    """y = 0·x, where a weight or a value is emptied: commutes with every g."""
    return Value(call.value(call.argument(0)).axes)


@rule("fill", "fill_", harmless="value")
def one_number(call: Call) -> Value:
    """y_i = c: of c = 0 as `nothing`, else g1 = 1; of a c that is data, nothing else."""
    axes = call.value(call.argument(0)).axes
    if _is_data(call, call.argument(1)):
        call.lower_all(axes, FIXED, "one entry everywhere")
    else:
        _add_constant(call, axes, call.argument(1))
    return Value(axes)


@rule("log", "sqrt", "rsqrt", "log2", "log10", harmless=_CONSTANTS_OF_FUNCTIONS, traits=Trait.OF_POSITIVES)
@rule("silu", "gelu", "sigmoid", "exp", "softplus", "reciprocal", "abs", "clamp", "clamp_min",
      "clamp_max", "elu", "hardswish", "hardsigmoid", "mish", "cos", "log_sigmoid", "logical_not", "bitwise_not",
      "isinf", "isnan", "hardtanh", "hardtanh_", "relu6", "log1p", "expm1", "exp2", "floor", "ceil",
      "round", "trunc", "nan_to_num", "remainder", "fmod", "floor_divide", "clip", "celu", "selu", "silu_", "acos",
      "cosh", "isin", "isfinite", "hardswish_", "logit", "threshold", "erfc", "clamp_", "clamp_min_",
      "sigmoid_", "exp_", "sqrt_", "__lshift__", "__rshift__", "bitwise_xor", "logical_xor", "frac",
      harmless=_CONSTANTS_OF_FUNCTIONS)  # fmt: skip
def function_of_one_entry(call: Call) -> Value:
    """y_i = f(x_i): only permutations commute with a general f."""
    operands = call.operands()
    value = call.value(next(a for a in operands if _is_data(call, a)))
    for other in operands:
        if _is_data(call, other):
            value = Value(tuple(_joined(call, x, y) for x, y in aligned(value.axes, call.value(other).axes)))
        else:
            _keep_order(call, value.axes, other)
    call.lower_all(value.axes, PERMUTATION, "pointwise")
    return _broadcast(call, value)


@rule("bucketize", harmless="out_int32 right")
def count_below(call: Call) -> Value:
    """y_i = #{j: b_j < x_i} with b ascending: permutations of x; b keeps its order."""
    values, boundaries = call.argument(0), call.argument(1)
    if _is_data(call, boundaries):
        call.lower_all(call.value(boundaries).axes, FIXED, "boundaries")
    if not _is_data(call, values):
        return Value(tuple(fresh(n, FIXED) for n in call.shape))
    axes = call.value(values).axes
    call.lower_all(axes, PERMUTATION, "pointwise")
    return Value(axes)


@rule("tanh", "tanh_", "sin", "erf", "asin", "atan", "sinh", "asinh", "tan", "sign", "sgn", "hardshrink",
      "softshrink", harmless="lambd")  # fmt: skip
def odd_function(call: Call) -> Value:
    """y_i = f(x_i), f(-x) = -f(x): permutations and signs."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes, monomial(Scalars.SIGN), "pointwise")
    return Value(value.axes)


@rule("relu", "relu_", "leaky_relu", harmless="negative_slope", traits=Trait.KINKED)
def homogeneous_function(call: Call) -> Value:
    """y_i = f(x_i), f(cx) = c f(x) for c > 0: permutations and positive scales."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes, monomial(Scalars.POSITIVE), "pointwise")
    return Value(value.axes)


@runs("prelu")
def _bends_at_zero(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Inside of vmap torch does not add up the derivatives by the slopes; they lie along the second axis."""
    value, slopes = args
    along = slopes.view(-1, *(1 for _ in value.shape[2:])) if slopes.numel() > 1 else slopes.reshape(())
    return torch.where(value > 0, value, along * value)


@rule("prelu")
def learned_slope(call: Call) -> Value:
    """y_c = max(x_c, 0) + a_c min(x_c, 0): as `relu` where all channels share one slope, else slopes move along."""
    value, slope = call.value(call.argument(0)), call.value(call.argument(1))
    channel = min(1, len(value.axes) - 1)
    shared = not slope.axes or slope.axes[0].size == 1
    for i, axis in enumerate(value.axes):
        call.lower(axis, monomial(Scalars.POSITIVE) if shared or i != channel else PERMUTATION, "pointwise")
    call.lower_all(slope.axes, FIXED if shared else PERMUTATION, "slope")
    if not shared:
        call.unify(value.axes[channel], slope.axes[0], "slope")
    return Value(value.axes)


@rule("pow", "pow_", "square")
def power(call: Call) -> object:
    """y_i = x_i^p: the square is a product, which may turn out to be half of a length."""
    exponent = call.constant(call.argument(1, 2))
    if isinstance(exponent, Tensor) and exponent.numel() == 1:
        exponent = exponent.item()
    if not _is_data(call, call.argument(0)) or not isinstance(exponent, (int, float)):
        return function_of_one_entry(call)
    value = call.value(call.argument(0))
    if exponent == 2:
        return Product(value, value)
    call.lower_all(value.axes, monomial(Scalars.SIGN) if exponent % 2 == 1 else PERMUTATION, "pointwise")
    return Value(value.axes)


@rule("add", traits=Trait.ADDS | Trait.LINEAR)
@rule("add_", traits=Trait.ADDS)
@rule("sub", traits=Trait.SUBTRACTS | Trait.LINEAR)
@rule("sub_", "subtract", traits=Trait.SUBTRACTS)
@rule("rsub", "lerp")
def addition(call: Call) -> Value:
    """y = a ± αb: one element for both operands; a constant along an axis asks g1 = 1, but for a - mean a, which goes
    along with g1 = -1 too."""
    left, right, times = call.argument(0), call.argument(1), call.argument("alpha", 1)
    if isinstance(call.argument("weight"), fx.Node):
        return function_of_one_entry(call)
    if subtracts_mean(call.node):
        return Value(call.value(left).axes)
    if _is_data(call, left) and _is_data(call, right):
        return Value(_all_joined(call, [left, right]))
    value, constant = (left, right) if _is_data(call, left) else (right, left)
    found, number = call.raw(value), call.constant(constant)
    if (
        isinstance(found, Value)
        and found.parameter
        and isinstance(number, (int, float))
        and "add" in str(call.node.target)
    ):
        return replace(found, offset=found.offset + times * number)
    axes = call.value(value).axes
    _add_constant(call, axes, constant)
    return _broadcast(call, Value(axes))


def _all_joined(call: Call, operands: Sequence[fx.Node]) -> tuple[Axis, ...]:
    """One element for all operands."""
    axes = call.value(operands[0]).axes
    for other in operands[1:]:
        axes = tuple(_joined(call, x, y) for x, y in aligned(axes, call.value(other).axes))
    return axes


def _joined(call: Call, x: Axis, y: Axis) -> Axis:
    if x.size == 1 or y.size == 1:
        wide = y if x.size == 1 else x
        if wide.size > 1:
            call.lower(wide, ONES, "broadcast")
        return wide
    call.unify(x, y, "add")
    return x


@rule("mul", traits=Trait.MULTIPLIES | Trait.LINEAR)
@rule("mul_", "multiply", traits=Trait.MULTIPLIES)
@rule("div", traits=Trait.DIVIDES | Trait.LINEAR)
@rule("div_", "divide", "true_divide", traits=Trait.DIVIDES)
def multiplication(call: Call) -> object:
    """y_i = a_i b_i: a gain if b is a weight, else an open product; constants that vary along an axis pin it."""
    left, right = call.argument(0), call.argument(1)
    if call.argument("rounding_mode") is not None:
        return function_of_one_entry(call)
    if _is_data(call, left) and _is_data(call, right):
        found = offset_gain(call, left, right) or linked_gain(call, left, right)
        if found is not None:
            return found
        a, b = (call.value(_before_copying(call, x)) for x in (left, right))
        if "div" in str(call.node.target):
            call.lower_all(b.axes, PERMUTATION, "divisor")
            return Product(a, b)
        for weight, value in ((b, a), (a, b)):
            if weight.parameter is not None and value.parameter is None and is_vector_along_last(weight, value):
                return gain(call, weight, value)
        return Product(a, b)
    value, constant = (left, right) if _is_data(call, left) else (right, left)
    if "mul" in op_name(call.node) and call.found.program.is_always(constant, 0):  # as well 0 · gx, for any g
        return Value(tuple(fresh(n) for n in call.shape))
    axes = call.value(value).axes
    if value is right and "div" in str(call.node.target):
        call.lower_all(axes, PERMUTATION, "divisor")
    _keep_order(call, axes, constant)
    return _broadcast(call, Value(axes))


def _before_copying(call: Call, operand: fx.Node) -> fx.Node:
    """A factor that is copied along an axis is the same all along it, whether or not the op copies it itself."""
    source = operand.args[0] if op_name(operand) in ("expand", "expand_as") else operand
    same_rank = isinstance(source, fx.Node) and source.meta["val"].dim() == operand.meta["val"].dim()
    return source if same_rank and _is_data(call, source) else operand  # type: ignore[return-value]


@rule("where", traits=Trait.SELECTS)
@rule("masked_fill", "masked_fill_", traits=Trait.SELECTS | Trait.FILLS)
def selection(call: Call) -> Value:
    """y = c ? a : b, entry by entry; along an axis on which c does not depend, and b = 0, any g commutes."""
    condition, branches = _condition(call)
    data = [b for b in branches if _is_data(call, b)]
    if not data:
        return comparison(call)
    axes = _all_joined(call, data)
    if _is_data(call, condition):
        along = aligned(axes, call.value(condition).axes)
        axes = tuple(x if y.size == 1 else _joined(call, x, y) for x, y in along)
        call.lower_all((a for a, (_, y) in zip(axes, along, strict=True) if y.size > 1), PERMUTATION, "mask")
    else:
        _keep_order(call, axes, condition)
    for other in branches:
        if not _is_data(call, other):
            _add_constant(call, axes, other)
    return _broadcast(call, Value(axes))


def _condition(call: Call) -> tuple[Any, list[Any]]:
    """The condition and the two branches of `where(c, a, b)` or `masked_fill(a, c, b)`."""
    if "where" in str(call.node.target):
        return call.argument(0), [call.argument(1), call.argument(2)]
    return call.argument(1), [call.argument(0), call.argument(2)]


def _keep_order(call: Call, axes: tuple[Axis, ...], constant: Any) -> None:
    """Pin the axes along which a constant operand varies."""
    for axis, varies in _along(call, axes, constant):
        if varies:
            call.lower(axis, FIXED, "constant")


def _add_constant(call: Call, axes: tuple[Axis, ...], constant: Any) -> None:
    """A constant in place of entries, or added to them: zero asks nothing, one value for all asks g1 = 1."""
    if not call.found.program.is_always(constant, 0):
        for axis, varies in _along(call, axes, constant):
            call.lower(axis, FIXED if varies else ONES, "constant added")


@rule("eq", harmless="self other", traits=Trait.EQUAL)
@rule("ne", harmless="self other", traits=Trait.UNEQUAL)
@rule("maximum", harmless="self other", traits=Trait.LARGER)
@rule("lt", "le", "gt", "ge", "logical_and", "logical_or", "__and__", "__or__", "bitwise_and", "bitwise_or", "minimum",
      "atan2", "logaddexp", "polar", harmless="self other")  # fmt: skip
def comparison(call: Call) -> Value:
    """y_i = f(a_i, b_i)."""
    operands = [a for a in call.operands() if a in call.found.values]
    axes = _all_joined(call, operands)
    for other in call.node.all_input_nodes:
        if other not in operands:
            _keep_order(call, axes, other)
    call.lower_all(axes, PERMUTATION, "mask")
    return _broadcast(call, Value(axes))


@rule("glu")
def gated_linear_unit(call: Call) -> Value:
    """y = a ⊙ σ(b) with (a, b) the halves of one axis."""
    axes = list(call.value(call.argument(0)).axes)
    dim = call.argument("dim", -1) % len(axes)
    left, gate = cut(axes[dim], [axes[dim].size // 2] * 2)
    call.lower(gate, PERMUTATION, "pointwise")
    call.lower_all((*axes[:dim], *axes[dim + 1 :]), PERMUTATION, "batch")
    axes[dim] = call.tie(left, gate)
    return Value(tuple(axes))


def _is_data(call: Call, argument: object) -> bool:
    return argument in call.found.values


def _along(call: Call, axes: tuple[Axis, ...], constant: object) -> list[tuple[Axis, bool]]:
    """For each axis with more than one entry, whether the constant varies along it."""
    program = call.found.program
    shape = next((value.shape for value in program.values(constant)), ())
    places = enumerate(axes, len(shape) - len(axes))
    return [(axis, i >= 0 and shape[i] > 1 and program.varies(constant, i)) for i, axis in places if axis.size > 1]


def _broadcast(call: Call, value: Value) -> Value:
    """The value in the shape of the result: axes that the other operand brought are pinned."""
    axes = [*(fresh(1) for _ in range(len(call.shape) - len(value.axes))), *value.axes]
    return Value(tuple(a if a.size == n else fresh(n, FIXED) for a, n in zip(axes, call.shape, strict=True)))
