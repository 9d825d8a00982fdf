"""Ops on images and sequences as grids: channels are spaces, positions and kernel cells are pinned."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import Tensor

from hf_align.symmetry.interpreter.bounds import FIXED, ONES, PERMUTATION, Scalars, monomial
from hf_align.symmetry.interpreter.call import Call, rule
from hf_align.symmetry.interpreter.spaces import Axis, fresh, product, split_product
from hf_align.symmetry.interpreter.values import Value
from hf_align.tracing.ops import Trait, describe, does

_STEPS = "stride padding dilation output_padding"


@rule("conv1d", "conv2d", "conv3d", harmless=_STEPS, factors=(0, 1, 2),
      traits=Trait.AFFINE | Trait.OUTPUTS_FIRST | Trait.CONVOLVES)  # fmt: skip
@rule("convolution", harmless=_STEPS, traits=Trait.CONVOLVES, factors=(0, 1, 2))
def convolution(call: Call) -> Value:
    """y_op = Σ_ci W_oci x_c(p+i) + b_o: a contraction of channels, inside each group of them."""
    if _is_transposed(call):
        return transposed_convolution(call)
    value, weight = call.value(call.argument(0)), call.value(call.argument(1))
    spatial = len(weight.axes) - 2
    alone = [i for i in range(-spatial, 0) if _is_seen_alone(call, i)]
    _pin_grid(call, value, weight, [i for i in range(-spatial, 0) if i not in alone])
    out = _grouped(call, value.axes[-spatial - 1], weight.axes[0], weight.axes[1], _groups(call))
    call.mixes(weight, [1])
    split = split_product(value.axes[-spatial - 1], _groups(call))
    call.mixes(Value((*value.axes[: -spatial - 1], *split, *value.axes[len(value.axes) - spatial :])), [-spatial - 1])
    return _with_places(call, value, out, spatial, alone)


def _is_seen_alone(call: Call, axis: int) -> bool:
    """Whether the kernel has one cell along an axis, counted from behind, and gives every place its own result."""
    before, kernel = (call.argument(i).meta["val"].shape[axis] for i in (0, 1))
    strides, pads = ([n] if isinstance(n, int) else n for n in (call.argument("stride", 1),
                                                                call.argument("padding", 0)))  # fmt: skip
    if isinstance(pads, str):
        pads = [0]
    step, pad = (numbers[axis] if len(numbers) > 1 else numbers[0] for numbers in (strides, pads))
    return kernel == 1 and step == 1 and pad == 0 and before == call.shape[axis]


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", harmless=_STEPS,
      traits=Trait.CONVOLVES | Trait.TRANSPOSED, factors=(0, 1, 2))  # fmt: skip
def transposed_convolution(call: Call) -> Value:
    """y_op = Σ_ci W_coi x_c(p-i) + b_o."""
    value, weight = call.value(call.argument(0)), call.value(call.argument(1))
    spatial = len(weight.axes) - 2
    _pin_grid(call, value, weight, range(-spatial, 0))
    groups = _groups(call)
    channels, out = value.axes[-spatial - 1], weight.axes[1]
    if groups > 1:
        call.lower_all((channels, out, weight.axes[0]), FIXED, "grouped convolution")
        out = fresh(out.size * groups, FIXED)
    else:
        call.unify(channels, weight.axes[0].dual, "linear")
    return _with_places(call, value, out, spatial, ())


def _is_transposed(call: Call) -> bool:
    return does(call.node, Trait.TRANSPOSED) or bool(call.argument("transposed", False))


def _groups(call: Call) -> int:
    return int(call.argument("groups"))


def _pin_grid(call: Call, value: Value, weight: Value, mixed: Iterable[int]) -> None:
    call.lower_all(weight.axes[2:], FIXED, "kernel")
    call.lower_all((value.axes[i] for i in mixed), FIXED, "positions")


def _grouped(call: Call, channels: Axis, out: Axis, inner: Axis, groups: int) -> Axis:
    """The output channels; each group reads its own part of the input channels."""
    if groups == 1:
        call.unify(channels, inner.dual, "linear")
        return out
    outer_in, inner_in = split_product(channels, groups)
    outer_out, inner_out = split_product(out, groups)
    if inner_in.size > 1:
        call.unify(inner_in, inner.dual, "linear")
        call.lower_all((outer_in, outer_out), PERMUTATION, "batch")
        call.unify(outer_in, outer_out, "batch")
        return product([outer_out, inner_out])
    return product([call.tie(outer_in, outer_out), inner_out])


def _with_places(call: Call, value: Value, out: Axis, spatial: int, alone: Container[int]) -> Value:
    """The result, after the bias; a plain convolution is a linear reader of its channels."""
    bias = call.argument("bias")
    if bias is not None:
        call.unify(call.value(bias).axes[0], out, "bias")
        kept = [value.axes[i] for i in range(-spatial, 0) if i in alone]
        call.lower_all((*value.axes[: -spatial - 1], *kept), ONES, "broadcast")
    if not _is_transposed(call):
        call.reads(call.argument(0), call.argument(1), 1, bias, out_axis=-1 - spatial, groups=_groups(call))
    places = (value.axes[i] if i in alone else fresh(call.shape[i], FIXED) for i in range(-spatial, 0))
    result = Value((*value.axes[: -spatial - 1], out, *places))
    call.contracts((split_product(value.axes[-spatial - 1], _groups(call))[1], *result.axes))
    return result


_SIZES = (
    "kernel_size stride padding ceil_mode count_include_pad divisor_override output_size align_corners"
    " scale_factors scales scales_d scales_h scales_w"
)


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", harmless=_SIZES,
      traits=Trait.SUMS_PLACES | Trait.AVERAGES)  # fmt: skip
@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d",
      "upsample_bicubic2d", harmless=_SIZES, traits=Trait.SUMS_PLACES)  # fmt: skip
@rule("upsample_nearest3d", "upsample_linear1d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
      "_upsample_bicubic2d_aa", harmless=_SIZES)  # fmt: skip
def linear_resize(call: Call) -> Value:
    """y_cq = Σ_p R_qp x_cp: linear in the positions, channel by channel."""
    return _resized(call)


describe("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
         "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
         traits=Trait.RESAMPLES)  # fmt: skip


@rule("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d",
      harmless="kernel_size stride padding dilation ceil_mode output_size")  # fmt: skip
def max_pool(call: Call) -> Value | tuple[Value, Value]:
    """y_cq = max_p∈q x_cp: positive scales and permutations of the channels."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes, monomial(Scalars.POSITIVE), "pointwise")
    if isinstance(call.node.meta["val"], Tensor):
        return _resized(call)
    call.lower_all(value.axes, PERMUTATION, "places")
    return _resized(call), _resized(call)


def _resized(call: Call) -> Value:
    axes = list(call.value(call.argument(0)).axes)
    first = len(axes) - _SPATIAL[next(d for d in _SPATIAL if d in str(call.node.target))]
    for i in range(first, len(axes)):
        call.lower(axes[i], FIXED, "positions")
        axes[i] = fresh(call.shape[i], FIXED)
    return Value(tuple(axes))


_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


@rule("grid_sampler", "grid_sampler_2d", harmless="interpolation_mode padding_mode align_corners")
def grid_sampler(call: Call) -> Value:
    """y_cq = Σ_p R_qp(grid) x_cp: linear in the channels, the grid is read as coordinates."""
    value, grid = call.value(call.argument(0)), call.value(call.argument(1))
    call.lower_all((value.axes[0], *value.axes[2:], *grid.axes), FIXED, "positions")
    return Value((*value.axes[:2], *(fresh(n, FIXED) for n in call.shape[2:])))


@rule("pixel_shuffle", harmless="upscale_factor")
def pixel_shuffle(call: Call) -> Value:
    """y_c(pi)(qj) = x_(cij)pq: channels become positions."""
    axes = call.value(call.argument(0)).axes
    channels, cells = split_product(axes[-3], call.shape[-3])
    call.lower_all((cells, *axes[-2:]), FIXED, "positions")
    return Value((*axes[:-3], channels, *(fresh(n, FIXED) for n in call.shape[-2:])))


@rule("_weight_norm", traits=Trait.NORMALISES | Trait.SETS_LENGTHS)
def weight_norm(call: Call) -> Value:
    """W_o = g_o v_o / |v_o|; W = g v / |v| where the norm is of all v, and g one number."""
    direction, length = call.value(call.argument(0)), call.value(call.argument(1))
    dim = call.argument("dim", 0)
    own = dim % len(direction.axes) if length.axes else None
    for i, axis in enumerate(direction.axes):
        call.lower(axis, PERMUTATION if i == own else monomial(Scalars.SIGN), "norm")
    if own is not None:
        call.unify(direction.axes[own], length.axes[own], "batch")
    return Value(direction.axes)
