"""Ops that sum over a shared axis: its two operands carry each other's duals. Also the lookups that write a space."""

from __future__ import annotations

from torch import fx

from hf_align.symmetry.bounds import FIXED, PERMUTATION
from hf_align.symmetry.interpreter import Call, Reading, Value, rule
from hf_align.symmetry.spaces import Axis, fresh, product


@rule("linear")
def linear(call: Call) -> Value:
    """y_o = Σ_i W_oi x_i + b_o."""
    value, weight, bias = call.value(call.argument(0)), call.value(call.argument(1)), call.argument(2, "bias")
    return _affine(call, call.argument(0), value, weight, 1, bias)


@rule("addmm")
def addmm(call: Call) -> Value:
    """y_o = b_o + Σ_i x_i W_io."""
    value, weight = call.value(call.argument(1)), call.value(call.argument(2))
    return _affine(call, call.argument(1), value, weight, 0, call.argument(0))


def _affine(call: Call, source: fx.Node, value: Value, weight: Value, in_axis: int, bias: fx.Node | None) -> Value:
    call.unify(value.axes[-1], weight.axes[in_axis].dual, "linear")
    out = weight.axes[1 - in_axis]
    name = None
    if bias is not None:
        call.unify(call.value(bias).axes[-1], out, "bias")
        name = call.value(bias).parameter
    if weight.parameter is not None:
        call.found.readings.append(Reading(call.node, source, weight.parameter, in_axis, name))
    return Value((*value.axes[:-1], out))


@rule("matmul", "mm", "bmm")
def matmul(call: Call) -> Value:
    """y_abc = Σ_k x_abk z_akc, batch axes a in step."""
    left, right = call.value(call.argument(0)).axes, call.value(call.argument(1)).axes
    call.unify(left[-1], right[-2].dual if len(right) > 1 else right[-1].dual, "score")
    call.note(left[-1], "score")
    call.note(right[-1], "mix")
    batch = []
    for x, z in _batch_pairs(left[:-2], right[:-2]):
        if x.size > 1 and z.size > 1:
            call.unify(x, z, "batch")
        wide = x if z.size == 1 else z
        call.lower(wide, PERMUTATION, "batch")
        call.note(wide, "batch")
        batch.append(wide)
    return Value((*batch, *left[-2:-1], *right[-1:])) if len(right) > 1 else Value((*batch, *left[-2:-1]))


def _batch_pairs(left: tuple[Axis, ...], right: tuple[Axis, ...]) -> list[tuple[Axis, Axis]]:
    rank = max(len(left), len(right))
    units = tuple(fresh(1) for _ in range(rank))
    return list(zip(units[len(left) :] + left, units[len(right) :] + right, strict=True))


@rule("embedding")
def embedding(call: Call) -> Value:
    """y_td = W_{s(t)d}: rows are looked up by number, so their order is fixed."""
    table, index = call.value(call.argument(0)), call.value(call.argument(1))
    call.lower(table.axes[0], FIXED, "lookup")
    return Value((*index.axes, table.axes[1]))


@rule("conv1d", "conv2d", "conv3d")
def convolution(call: Call) -> Value:
    """y_op = Σ_ci W_oci x_c(p+i) + b_o: a contraction of channels; positions and kernel cells are fixed."""
    value, weight, bias = call.value(call.argument(0)), call.value(call.argument(1)), call.argument(2, "bias")
    groups = call.argument(6, "groups", 1)
    spatial = len(weight.axes) - 2
    call.lower_all(weight.axes[2:], FIXED, "kernel")
    call.lower_all(value.axes[-spatial:], FIXED, "positions")
    channels, out = value.axes[-spatial - 1], weight.axes[0]
    if groups == 1:
        call.unify(channels, weight.axes[1].dual, "linear")
    else:
        call.lower_all((channels, out, weight.axes[1]), FIXED, "grouped convolution")
    if bias is not None:
        call.unify(call.value(bias).axes[0], out, "bias")
    places = (fresh(n, FIXED) for n in call.shape[-spatial:])
    return Value((*value.axes[: -spatial - 1], out, *places))


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Value:
    """y = softmax(q kᵀ) v, head by head."""
    query, key, value = (call.value(call.argument(i)).axes for i in range(3))
    call.unify(query[-1], key[-1].dual, "score")
    call.unify(key[-2], value[-2], "mix")
    for other in (key, value):
        for x, z in zip(query[:-2], other[:-2], strict=True):
            call.unify(x, z, "batch")
    call.lower_all((*query[:-1], *key[:-1]), PERMUTATION, "softmax")
    return Value((*query[:-1], value[-1]))


@rule("outer")
def outer(call: Call) -> Value:
    """y_ij = a_i b_j."""
    left, right = call.value(call.argument(0)), call.value(call.argument(1))
    return Value((product([left.axes[0]]), right.axes[0]))
