"""Norms, softmax and reductions: lengths, means and sums over an axis."""

from __future__ import annotations

from hf_align.symmetry.bounds import FIXED, METRIC, ONES, PERMUTATION
from hf_align.symmetry.interpreter import Call, Gain, Product, Value, rule
from hf_align.symmetry.rules.views import dims_of
from hf_align.symmetry.spaces import Axis, fresh


@rule("layer_norm")
def layer_norm(call: Call) -> Value:
    """y = γ ⊙ (x - mean x) / std x + β."""
    value = call.value(call.argument(0))
    if len(call.argument(1)) != 1:
        call.lower_all(value.axes[-len(call.argument(1)) :], FIXED, "norm")
        return Value(value.axes)
    call.lower(value.axes[-1], METRIC, "norm")
    call.lower(value.axes[-1], ONES, "norm")
    return _with_gain(call, value, call.argument(2, "weight"), call.argument(3, "bias"))


@rule("rms_norm")
def rms_norm(call: Call) -> Value:
    """y = γ ⊙ x / rms x."""
    value = call.value(call.argument(0))
    call.lower(value.axes[-1], METRIC, "norm")
    return _with_gain(call, value, call.argument(2, "weight"), None)


def _with_gain(call: Call, value: Value, weight: object, bias: object) -> Value:
    axis = value.axes[-1]
    if weight is not None:
        gain = call.value(weight)
        assert gain.parameter is not None
        target = fresh(axis.size)
        call.found.gains.append(Gain(gain.parameter, gain.axes[-1], axis, target, call.node))
        axis = target
    if bias is not None:
        call.unify(call.value(bias).axes[-1], axis, "bias")
    return Value((*value.axes[:-1], axis))


@rule("softmax", "_softmax", "log_softmax")
def softmax(call: Call) -> Value:
    """y_i = exp x_i / Σ_j exp x_j: permutations of the axis, and of every other."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes, PERMUTATION, "softmax")
    return Value(value.axes)


@rule("mean", "sum")
def total(call: Call) -> Value:
    """y = Σ_i x_i (or its mean): contraction with the all-ones vector; of an open product, of its two factors."""
    found = call.raw(call.argument(0))
    rank = len(call.node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    reduced = dims_of(call.argument(1, "dim"), rank)
    if isinstance(found, Product) and len(found.left.axes) == len(found.right.axes) == rank:
        axes = _contract(call, found, reduced)
    else:
        axes = list(call.value(call.argument(0)).axes)
        for i in reduced:
            call.lower(axes[i], ONES, "sum")
    keep = call.argument(2, "keepdim", False)
    return Value(tuple(fresh(1) if i in reduced else a for i, a in enumerate(axes) if keep or i not in reduced))


def _contract(call: Call, open_product: Product, reduced: tuple[int, ...]) -> list[Axis]:
    axes = []
    for i, (x, y) in enumerate(zip(open_product.left.axes, open_product.right.axes, strict=True)):
        if i in reduced and x.size > 1 and y.size > 1:
            call.unify(x, y.dual, "norm" if x.root.space is y.root.space else "score")
        elif i in reduced:
            call.lower(x if y.size == 1 else y, ONES, "sum")
        elif x.size > 1 and y.size > 1:
            call.lower_all((x, y), PERMUTATION, "batch")
            call.unify(x, y, "batch")
        axes.append(y if x.size == 1 else x)
    return axes


@rule("amax", "amin", "any", "all", "cumsum", "argmax")
def reduction(call: Call) -> Value:
    """y = f(x_1 … x_n): the order of the axis may matter, the others are in step."""
    value = call.value(call.argument(0))
    rank = len(value.axes)
    reduced = dims_of(call.argument(1, "dim"), rank)
    for i, axis in enumerate(value.axes):
        call.lower(axis, FIXED if i in reduced else PERMUTATION, "reduction")
    if len(call.shape) == rank:
        return Value(tuple(a if a.size == n else fresh(n) for a, n in zip(value.axes, call.shape, strict=True)))
    return Value(tuple(a for i, a in enumerate(value.axes) if i not in reduced))
