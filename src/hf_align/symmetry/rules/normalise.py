"""Norms, softmax and reductions: lengths, means and sums over an axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.interpreter.bounds import FIXED, METRIC, ONES, ONES_UP_TO_SIGN, PERMUTATION, Scalars, monomial
from hf_align.symmetry.interpreter.call import Call, rule
from hf_align.symmetry.interpreter.spaces import Axis, fresh, split_product
from hf_align.symmetry.interpreter.values import Gain, Product, Statistics, Value, aligned
from hf_align.symmetry.rules.patterns import subtracts_mean
from hf_align.symmetry.rules.pointwise import comparison
from hf_align.symmetry.rules.ties import keep_order_of_ties
from hf_align.symmetry.rules.views import dims_of
from hf_align.tracing.ops import Trait, describe, op_name, runs


@rule("layer_norm", harmless="eps", traits=Trait.NORMALISES | Trait.CENTRES)
def layer_norm(call: Call) -> Value:
    """y = γ ⊙ (x - mean x) / std x + β."""
    value = call.value(call.argument(0))
    call.mixes(value, range(-len(call.argument(1)), 0))
    if len(call.argument(1)) != 1:
        for operand in (value, *(call.value(a) for a in call.operands()[1:])):
            call.lower_all(operand.axes[-len(call.argument(1)) :], FIXED, "norm")
        call.lower_all(value.axes, PERMUTATION, "batch")
        return Value(value.axes)
    call.lower(value.axes[-1], METRIC, "norm")
    call.lower(value.axes[-1], ONES_UP_TO_SIGN, "norm")
    call.lower_all(value.axes[:-1], PERMUTATION, "batch")
    return _with_gain(call, value, call.argument("weight"), call.argument("bias"))


@rule("rms_norm", harmless="eps", traits=Trait.NORMALISES)
def rms_norm(call: Call) -> Value:
    """y = γ ⊙ x / rms x."""
    value, weight = call.value(call.argument(0)), call.argument("weight")
    rank = len(call.argument("normalized_shape"))
    call.mixes(value, range(-rank, 0))
    call.lower_all(value.axes[:-rank], PERMUTATION, "batch")
    call.lower_all(value.axes[-rank:], METRIC, "norm")
    if rank > 1 and isinstance(weight, fx.Node):
        call.lower_all((*value.axes[-rank:], *call.value(weight).axes), FIXED, "norm")
        return Value(value.axes)
    return _with_gain(call, value, weight, None)


def _with_gain(call: Call, value: Value, weight: object, bias: fx.Node | None, at: int = -1) -> Value:
    at %= len(value.axes)
    axis = value.axes[at]
    if isinstance(weight, fx.Node):
        gain = call.raw(weight)
        if isinstance(gain, Value) and gain.parameter is not None and call.is_known_bias(bias, axis.size):
            target = fresh(axis.size)
            call.found.gains.append(Gain(gain.parameter, gain.axes[-1], axis, target, call.node, gain.offset))
            axis = target
        else:
            axis = call.tie(axis, call.value(weight).axes[-1])
    if bias is not None:
        call.unify(call.value(bias).axes[-1], axis, "bias")
    return Value((*value.axes[:at], axis, *value.axes[at + 1 :]))


@rule("softmax", "_softmax", harmless="dtype half_to_float", traits=Trait.SOFTMAX)
@rule("_safe_softmax", harmless="dtype", traits=Trait.SOFTMAX | Trait.ZERO_WHERE_HIDDEN)
@rule("log_softmax", harmless="dtype half_to_float")
def softmax(call: Call) -> Value:
    """y_i = exp x_i / Σ_j exp x_j: permutations of the axis, and of every other."""
    value = call.value(call.argument(0))
    call.mixes(value, [call.argument("dim")])
    call.lower_all(value.axes, PERMUTATION, "softmax")
    return Value(value.axes)


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d",
      harmless="self target weight reduction ignore_index label_smoothing")  # fmt: skip
@rule("l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
      harmless="self target weight pos_weight reduction beta delta log_target")  # fmt: skip
def loss(call: Call) -> Value:
    """y = Σ_i ℓ(x_i, t_i): labels tell classes and places apart, and what is compared with them stands still."""
    for operand in call.operands():
        call.lower_all(call.value(operand).axes, FIXED, "loss")
    return Value(tuple(fresh(size, FIXED) for size in call.node.meta["val"].shape))


@runs("_safe_softmax")
def _zero_where_hidden(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Without NaN on the way, which gradients would be of."""
    scores, dim = args[:2]
    hidden = (scores == -torch.inf).all(dim, keepdim=True)
    return scores.masked_fill(hidden, 0.0).softmax(dim).masked_fill(hidden, 0.0)


@runs("softmax", "log_softmax", "mean", "sum", "cumsum")
def _adds_up_wide(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The dtype that is asked for rounds."""
    args = tuple(a for a in args if not isinstance(a, torch.dtype))
    return node.target(*args, **{k: v for k, v in kwargs.items() if k != "dtype"})  # type: ignore[operator]


@rule("mean", harmless="keepdim dtype", traits=Trait.SUMS_PLACES | Trait.AVERAGES)
@rule("sum", harmless="keepdim dtype", traits=Trait.SUMS_PLACES | Trait.TOTALS)
def total(call: Call) -> Value:
    """y = Σ_i x_i (or its mean): contraction with the all-ones vector; of an open product, of its two factors."""
    found = call.raw(call.argument(0))
    rank = call.argument(0).meta["val"].dim()
    reduced = _reduced(call, rank)
    if isinstance(found, Product) and len(found.left.axes) == len(found.right.axes) == rank:
        axes = _contract(call, found, reduced)
    else:
        axes = list(call.value(call.argument(0)).axes)
        only_subtracted = all(subtracts_mean(u) and u.args[1] is call.node for u in call.node.users)
        for i in reduced:
            call.lower(axes[i], ONES_UP_TO_SIGN if only_subtracted else ONES, "sum")
    return Value(_without(axes, reduced, len(call.shape)))


def _reduced(call: Call, rank: int) -> tuple[int, ...]:
    """The axes that a reduction is over: all where it names none."""
    dims = call.argument("dim")
    return dims_of(None if dims == [] else dims, rank)


def _without(axes: Iterable[Axis], reduced: tuple[int, ...], rank: int) -> tuple[Axis, ...]:
    """The axes that a reduction leaves: those that it reduced are gone, or of size one where the rank is kept."""
    kept = list(axes)
    if rank == len(kept):
        return tuple(fresh(1) if i in reduced else a for i, a in enumerate(kept))
    return tuple(a for i, a in enumerate(kept) if i not in reduced)


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
    call.contracts(axes)
    return axes


describe("argmax", "max", traits=Trait.POINTS_TO_LARGEST)
describe("any", traits=Trait.ANY)


@rule("max", harmless="keepdim dtype", traits=Trait.LARGER)
@rule("amax", "amin", "any", "all", "min", "argmax", "argmin", "logsumexp", "prod", "median", "count_nonzero",
      "kthvalue", harmless="keepdim dtype k")  # fmt: skip
def reduction(call: Call) -> object:
    """y = f(x_1 … x_n), f symmetric: the axis permutes; of an index, the axis is what it points to,
    and keeps its order where entries may tie."""
    if call.argument("other") is not None:
        return comparison(call)
    value = call.value(call.argument(0))
    rank = len(value.axes)
    reduced = _reduced(call, rank)
    call.lower_all(value.axes, PERMUTATION, "reduction")
    if "arg" in op_name(call.node) and len(reduced) != 1:
        call.lower_all(value.axes, FIXED, "number read")
    results, kept = call.node.meta["val"], _without(value.axes, reduced, len(call.shape))
    gives_numbers = "arg" in op_name(call.node) or not isinstance(results, Tensor)
    if len(reduced) != 1 or not gives_numbers:
        return Value(kept)
    (dim,) = reduced
    keep_order_of_ties(call, value.axes[dim], dim)
    numbers = Value(kept, points_to=value.axes[dim])
    return numbers if isinstance(results, Tensor) else (Value(kept), numbers)


@rule("cumsum", harmless="dtype", traits=Trait.SUMS_PLACES | Trait.RUNNING_SUM)
@rule("cumprod", "diff", "cummax", "cummin", "cumsum_", harmless="dtype n")
def running(call: Call) -> object:
    """y_i = f(x_1 … x_i): the axis keeps its order; sums and differences leave the other axes free."""
    value = call.value(call.argument(0))
    axes = list(value.axes)
    linear = op_name(call.node) in ("cumsum", "diff", "cumsum_")
    dim = call.argument("dim") % len(axes)
    call.mixes(value, [dim])
    if len(inputs := call.operands()) > 1:  # entries to begin or end with
        operands = [call.value(a) for a in inputs if a in call.found.values]
        call.lower_all([a for o in operands for a in o.axes], FIXED, "running")
    for i, axis in enumerate(axes):
        if i == dim or not linear:
            call.lower(axis, FIXED if i == dim else PERMUTATION, "running")
    results = call.node.meta["val"]
    axes[dim] = fresh(call.shape[dim], FIXED)
    return Value(tuple(axes)) if isinstance(results, Tensor) else tuple(Value(tuple(axes)) for _ in results)


@rule("linalg_vector_norm", "linalg_norm", "norm", harmless="keepdim dtype", traits=Trait.NORMALISES | Trait.MEASURES)
def vector_norm(call: Call) -> Value:
    """y = (Σ_i |x_i|^p)^(1/p): a length for p = 2, else permutations and signs."""
    value = call.value(call.argument(0))
    order = call.argument("p" if op_name(call.node) == "norm" else "ord")
    reduced = _reduced(call, len(value.axes))
    for i, axis in enumerate(value.axes):
        if i not in reduced:
            call.lower(axis, PERMUTATION, "batch")
        else:
            call.lower(axis, METRIC if order in (2, None) else monomial(Scalars.SIGN), "norm")
    return Value(_without(value.axes, reduced, len(call.shape)))


@rule("cdist", harmless="compute_mode")
def distances(call: Call) -> Value:
    """y_pr = (Σ_i |x_pi - z_ri|^q)^(1/q): one isometry of both for q = 2, else one of permutations and signs."""
    left, right = call.value(call.argument(0)), call.value(call.argument(1))
    call.unify(left.axes[-1], right.axes[-1], "sum")
    call.lower(left.axes[-1], METRIC if call.argument("p", 2) == 2 else monomial(Scalars.SIGN), "norm")
    call.mixes(left, range(len(left.axes) - 1))
    batch = []
    for x, z in aligned(left.axes[:-2], right.axes[:-2]):
        if x.size > 1 and z.size > 1:
            call.unify(x, z, "batch")
        batch.append(x if z.size == 1 else z)
    result = (*batch, left.axes[-2], right.axes[-2])
    call.lower_all(result, PERMUTATION, "batch")
    return Value(result)


@rule("mse_loss", harmless="reduction")
def squared_distance(call: Call) -> Value:
    """y = Σ (a - b)²: orthogonal maps of both at once along every axis."""
    left, right = call.value(call.argument(0)).axes, call.value(call.argument(1)).axes
    call.lower_all((*left, *right), METRIC if not call.shape else FIXED, "norm")
    for a, b in zip(left, right, strict=True):
        call.unify(a, b, "sum")
    return Value(left if call.shape else ())


@rule("var", "std", harmless="correction unbiased keepdim")
def variance(call: Call) -> Value:
    """y = Σ_i (x_i - mean x)² / n."""
    value = call.value(call.argument(0))
    reduced = _reduced(call, len(value.axes))
    for i, axis in enumerate(value.axes):
        call.lower(axis, PERMUTATION if i not in reduced or len(reduced) > 1 else ONES_UP_TO_SIGN, "norm")
        if i in reduced:
            call.lower(axis, METRIC, "norm")
    return Value(_without(value.axes, reduced, len(call.shape)))


@rule("group_norm", harmless="eps", traits=Trait.NORMALISES | Trait.ALONG_CHANNELS)
def group_norm(call: Call) -> Value:
    """y = γ ⊙ (x - mean x) / std x + β over the channels of a group and all positions."""
    value, groups = call.value(call.argument(0)), call.argument(1)
    axes = list(value.axes)
    outer, inner = split_product(axes[1], groups)
    call.mixes(Value((axes[0], outer, inner, *axes[2:])), range(2, len(axes) + 1))
    call.lower_all((axes[0], outer), PERMUTATION, "batch")
    call.lower_all(axes[2:], FIXED, "positions")
    call.lower(inner, METRIC, "norm")
    call.lower(inner, ONES_UP_TO_SIGN, "norm")
    return _with_gain(call, value, call.argument("weight"), call.argument("bias"), at=1)


@rule("instance_norm", harmless="eps momentum use_input_stats", traits=Trait.NORMALISES | Trait.ALONG_CHANNELS)
def instance_norm(call: Call) -> Value:
    """y_c = γ_c (x_c - mean x_c) / std x_c + β_c: each channel by itself."""
    value = call.value(call.argument(0))
    call.mixes(value, range(2, len(value.axes)))
    call.lower(value.axes[0], PERMUTATION, "batch")
    call.lower(value.axes[1], monomial(Scalars.SIGN), "norm")
    call.lower_all(value.axes[2:], FIXED, "positions")
    return _with_gain(call, value, call.argument("weight"), call.argument("bias"), at=1)


@rule("batch_norm", harmless="momentum eps", traits=Trait.NORMALISES | Trait.STORED_STATISTICS)
def batch_norm(call: Call) -> Value:
    """y_c = γ_c (x_c - μ_c) / √(σ²_c + ε) + β_c, all four stored: affine, and with μ = 0, σ² + ε = 1 a gain."""
    if call.argument("running_mean") is None:
        return _by_own_statistics(call)
    return _affine_by_channel(call)


def _by_own_statistics(call: Call) -> Value:
    """y_c = γ_c (x_c - mean x_c) / std x_c + β_c, over all places of a channel."""
    call.expect("training", True)
    value = call.value(call.argument(0))
    others = [i for i in range(len(value.axes)) if i != 1]
    call.mixes(value, others)
    long = [value.axes[i] for i in others if value.axes[i].size > 1]
    if len(long) == 1:
        call.lower(long[0], METRIC, "norm")
        call.lower(long[0], ONES_UP_TO_SIGN, "norm")
    else:
        call.lower_all(long, PERMUTATION, "norm")
    call.lower(value.axes[1], monomial(Scalars.SIGN), "norm")
    gain, bias, channels = call.argument("weight"), call.argument("bias"), value.axes[1]
    if isinstance(gain, fx.Node):
        channels = call.tie(channels, call.value(gain).axes[-1])
    if isinstance(bias, fx.Node):
        call.lower_all(long, ONES, "bias")
        call.unify(call.value(bias).axes[-1], channels, "bias")
    return Value((value.axes[0], channels, *value.axes[2:]))


@rule("_native_batch_norm_legit_no_training", harmless="momentum eps", traits=Trait.STORED_STATISTICS)
def native_batch_norm(call: Call) -> tuple[Value, ...]:
    """As `batch_norm`."""
    return _affine_by_channel(call), Value((fresh(0, FIXED),)), Value((fresh(0, FIXED),))


def _affine_by_channel(call: Call) -> Value:
    call.expect("training", False)
    value, weight, shift = call.value(call.argument(0)), call.argument("weight"), call.argument("bias")
    call.lower_all((value.axes[0], *value.axes[2:]), ONES, "broadcast")
    stored = [call.value(a) if isinstance(a, fx.Node) else None
              for a in (weight, shift, call.argument("running_mean"), call.argument("running_var"))]  # fmt: skip
    gain, bias, mean, variance_ = (s.parameter if s is not None else None for s in stored)
    if gain is None or bias is None or mean is None or variance_ is None:
        call.lower_all((a for v in (value, *stored) if v is not None for a in v.axes), FIXED, "statistics")
        return Value(value.axes)
    call.lower_all((a for v in stored[2:] if v is not None for a in v.axes), FIXED, "statistics")
    call.found.statistics.append(Statistics(gain, bias, mean, variance_, call.argument("eps")))
    return _with_gain(call, value, weight, shift, at=1)


@runs("batch_norm", "_native_batch_norm_legit_no_training")
def _normed_by_statistics(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Torch has no forward derivative by the statistics, which are weights here."""
    native = op_name(node) != "batch_norm"
    if args[3] is None or (args[5] and not native):
        return node.target(*args, **kwargs)  # type: ignore[operator]
    value, gain, bias, mean, variance_ = args[:5]
    normed = _batch_normed(value, gain, bias, mean, variance_, args[6 if native else 7])
    return (normed, args[3], args[4]) if native else normed


def _batch_normed(
    value: Tensor, gain: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """y_nc… = γ_c (x_nc… - μ_c) / √(σ²_c + ε) + β_c."""
    shape = (-1, *[1] * (value.dim() - 2))
    scale = (variance + eps).rsqrt() * (1.0 if gain is None else gain)
    shift = (0.0 if bias is None else bias) - mean * scale
    return value * scale.reshape(shape) + shift.reshape(shape)
