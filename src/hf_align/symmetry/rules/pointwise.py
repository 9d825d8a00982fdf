"""Elementwise ops: the identity-like, the linear, the functions of one entry, and products."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from hf_align.symmetry.bounds import FIXED, ONES, PERMUTATION, Scalars, monomial
from hf_align.symmetry.interpreter import Call, Gain, Product, Value, aligned, rule
from hf_align.symmetry.spaces import Axis, fresh


@rule("to", "_to_copy", "contiguous", "clone", "alias", "detach", "detach_", "dropout", "type_as", "lift_fresh_copy")
def unchanged(call: Call) -> object:
    """y = x."""
    return call.raw(call.argument(0))


@rule("neg")
def negative(call: Call) -> Value:
    """y = -x: linear, commutes with every g."""
    return Value(call.value(call.argument(0)).axes)


@rule("silu", "gelu", "sigmoid", "exp", "softplus", "log", "sqrt", "rsqrt", "reciprocal", "abs", "clamp", "clamp_min",
      "clamp_max", "elu", "hardswish", "hardsigmoid", "mish", "cos", "log_sigmoid", "logical_not", "bitwise_not",
      "isinf", "isnan", "hardtanh", "relu6")  # fmt: skip
def function_of_one_entry(call: Call) -> Value:
    """y_i = f(x_i): only permutations commute with a general f."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes, PERMUTATION, "pointwise")
    return Value(value.axes)


@rule("tanh", "sin", "erf", "asin", "atan", "softsign", "sign")
def odd_function(call: Call) -> Value:
    """y_i = f(x_i), f(-x) = -f(x): permutations and signs."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes, monomial(Scalars.SIGN), "pointwise")
    return Value(value.axes)


@rule("relu", "relu_", "leaky_relu")
def homogeneous_function(call: Call) -> Value:
    """y_i = f(x_i), f(cx) = c f(x) for c > 0: permutations and positive scales."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes, monomial(Scalars.POSITIVE), "pointwise")
    return Value(value.axes)


@rule("pow", "square")
def power(call: Call) -> object:
    """y_i = x_i^p: the square is a product, which may turn out to be half of a length."""
    exponent = call.constant(call.argument(1, default=2))
    value = call.value(call.argument(0))
    if exponent == 2:
        return Product(value, value)
    odd = isinstance(exponent, (int, float)) and exponent % 2 == 1
    call.lower_all(value.axes, monomial(Scalars.SIGN) if odd else PERMUTATION, "pointwise")
    return Value(value.axes)


@rule("add", "add_", "sub", "rsub")
def addition(call: Call) -> Value:
    """y = a ± b: one element for both operands; a constant along an axis asks g1 = 1."""
    left, right = call.argument(0), call.argument(1)
    if _is_data(call, left) and _is_data(call, right):
        pairs = aligned(call.value(left).axes, call.value(right).axes)
        return Value(tuple(_joined(call, x, y) for x, y in pairs))
    value, constant = (left, right) if _is_data(call, left) else (right, left)
    found, number = call.raw(value), call.constant(constant)
    if (
        isinstance(found, Value)
        and found.parameter
        and isinstance(number, (int, float))
        and "add" in str(call.node.target)
    ):
        return replace(found, offset=found.offset + number)
    axes = call.value(value).axes
    tensor = _as_tensor(number)
    if not torch.any(tensor):
        return _broadcast(call, Value(axes))
    for axis, size, varies in _along(axes, tensor):
        call.lower(axis, FIXED if varies else ONES, "constant added" if size >= 1 else "")
    return _broadcast(call, Value(axes))


def _joined(call: Call, x: Axis, y: Axis) -> Axis:
    if x.size == 1 or y.size == 1:
        wide = y if x.size == 1 else x
        if wide.size > 1:
            call.lower(wide, ONES, "broadcast")
        return wide
    call.unify(x, y, "add")
    return x


@rule("mul", "mul_", "div", "div_", "multiply")
def multiplication(call: Call) -> object:
    """y_i = a_i b_i: a gain if b is a weight, else an open product; constants that vary along an axis pin it."""
    left, right = call.argument(0), call.argument(1)
    if _is_data(call, left) and _is_data(call, right):
        if (gain := _offset_gain(call, left, right)) is not None:
            return gain
        a, b = call.value(left), call.value(right)
        division = "div" in str(call.node.target)
        for weight, value in ((b, a),) if division else ((b, a), (a, b)):
            if weight.parameter is not None and value.parameter is None and _is_vector_along_last(weight, value):
                return _gain(call, weight, value)
        if division:
            call.lower_all(b.axes, PERMUTATION, "divisor")
        return Product(a, b)
    value, constant = (left, right) if _is_data(call, left) else (right, left)
    axes = call.value(value).axes
    if value is right and "div" in str(call.node.target):
        call.lower_all(axes, PERMUTATION, "divisor")
    for axis, _, varies in _along(axes, _as_tensor(call.constant(constant))):
        if varies:
            call.lower(axis, FIXED, "constant factors")
    return _broadcast(call, Value(axes))


def _is_vector_along_last(weight: Value, value: Value) -> bool:
    sizes = [a.size for a in weight.axes]
    return bool(sizes) and max(sizes) > 1 and sizes[-1] == max(sizes) == value.axes[-1].size and sum(
        s > 1 for s in sizes) == 1 and len(sizes) <= len(value.axes)  # fmt: skip


def _offset_gain(call: Call, left: fx.Node, right: fx.Node) -> Value | None:
    """y = diag(1 + w) x."""
    for one, other in ((left, right), (right, left)):
        weight = call.raw(one)
        if isinstance(weight, Value) and weight.offset and weight.parameter and "mul" in str(call.node.target):
            value = call.value(other)
            if _is_vector_along_last(weight, value):
                return _gain(call, weight, value)
    return None


def _gain(call: Call, weight: Value, value: Value) -> Value:
    """y = diag(w) x."""
    assert weight.parameter is not None
    target = fresh(value.axes[-1].size)
    call.found.gains.append(Gain(weight.parameter, weight.axes[-1], value.axes[-1], target, call.node, weight.offset))
    return Value((*value.axes[:-1], target))


@rule("where", "masked_fill")
def selection(call: Call) -> Value:
    """y = c ? a : b, entry by entry."""
    return _selected(call)


def _selected(call: Call) -> Value:
    operands = [a for a in call.node.all_input_nodes if a in call.found.values]
    axes = call.value(operands[0]).axes
    for other in operands[1:]:
        axes = tuple(_joined(call, x, y) for x, y in aligned(axes, call.value(other).axes))
    call.lower_all(axes, PERMUTATION, "mask")
    return _broadcast(call, Value(axes))


@rule("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "__and__", "__or__", "bitwise_and",
      "bitwise_or", "maximum", "minimum")  # fmt: skip
def comparison(call: Call) -> Value:
    """y_i = f(a_i, b_i)."""
    return _selected(call)


def _is_data(call: Call, argument: object) -> bool:
    return argument in call.found.values


def _as_tensor(constant: object) -> Tensor:
    return constant if isinstance(constant, Tensor) else torch.as_tensor(constant)


def _along(axes: tuple[Axis, ...], constant: Tensor) -> list[tuple[Axis, int, bool]]:
    """For each axis with more than one entry: its size in the constant, and whether the constant varies along it."""
    shape = (1,) * (len(axes) - constant.dim()) + tuple(constant.shape)
    constant = constant.reshape(shape[-max(len(axes), constant.dim()) :])
    offset = constant.dim() - len(axes)
    found = []
    for i, axis in enumerate(axes):
        size = constant.shape[i + offset]
        varies = size > 1 and bool((constant != constant.narrow(i + offset, 0, 1)).any())
        if axis.size > 1:
            found.append((axis, size, varies))
    return found


def _broadcast(call: Call, value: Value) -> Value:
    """The value in the shape of the result: axes that the other operand brought are pinned."""
    axes = [*(fresh(1) for _ in range(len(call.shape) - len(value.axes))), *value.axes]
    return Value(tuple(a if a.size == n else fresh(n, FIXED) for a, n in zip(axes, call.shape, strict=True)))
