"""Calls for every op that has a rule, on small operands: what `test_rules.py` checks the rules against.

Adding a rule means adding a line here: op, operands, call. Operands of one op differ in what their axes share, in the
axis that the op works along, and in what is a weight, a computed value, or a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from op_program import Data, Draw, Operand, OpExample, Statistic, Weight, digits, mostly, normal, positive, small, wild
from torch import Tensor

aten = torch.ops.aten
EXAMPLES: list[OpExample] = []


def call(op: str, function: Callable[..., Any], *operands: Operand, label: str = "", along: bool = False) -> None:
    EXAMPLES.append(OpExample(op, function, operands, label, along))


def each(ops: str, *operands: Operand, label: str = "", **keywords: Any) -> None:
    """The same operands for several ops that take nothing else."""
    for op in ops.split():
        call(op, lambda *a, op=op: getattr(aten, op)(*a, **keywords), *operands, label=label)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """A constant; of plain numbers, because it is made while a model is being exported."""
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape).tolist(), dtype=torch.float64)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def data(*shape: int, draw: Draw = normal) -> Data:
    return Data(shape, draw)


def weight(*shape: int, draw: Draw = normal) -> Weight:
    return Weight(shape, draw)


X, Y, Z = data(3, 4), data(3, 4), data(2, 3, 4)
ROW = numbers(4)
MASK = torch.tensor([True, False, True, True])

# What leaves entries alone ------------------------------------------------------------------------------------------

each("contiguous clone alias detach lift_fresh_copy neg", X)
call("detach_", lambda x: aten.detach_(x + 0.0 * x), X)
each("dropout dropout_ feature_dropout alpha_dropout", X, p=0.5, train=False)
call("to", lambda x: aten.to(x, torch.float32), X, label="a narrower float")
call("to", lambda x: aten.to(x, torch.long), data(3, 4, draw=lambda s, r: 3 * normal(s, r)), label="integers")
call("to", lambda x: aten.to(x, torch.bool), data(3, 4, draw=digits), label="booleans")
call("_to_copy", lambda x: aten._to_copy(x, dtype=torch.float32), X)
call("_to_copy", lambda x: aten._to_copy(x, dtype=torch.int32), data(3, 4, draw=lambda s, r: 3 * normal(s, r)),
     label="integers")  # fmt: skip
call("type_as", lambda x: aten.type_as(x, torch.zeros((), dtype=torch.float32)), X)
call("type_as", lambda x: aten.type_as(x, torch.zeros((), dtype=torch.long)),
     data(3, 4, draw=lambda s, r: 3 * normal(s, r)), label="integers")  # fmt: skip

for op in ("zero", "zero_", "fill", "fill_"):
    f, value = getattr(aten, op), () if "zero" in op else (0.0,)
    for operand, label in ((X, ""), (weight(3, 4), "a weight")):
        call(op, lambda x, f=f, value=value: x + f(0.5 * x, *value), operand, label=label)
for op in ("fill", "fill_"):
    call(op, lambda x, op=op: getattr(aten, op)(0.5 * x, 1.5), X, label="a number")
    call(op, lambda x, y, op=op: getattr(aten, op)(0.5 * x, y.sum()), X, Y, label="data")

# Functions of one entry ---------------------------------------------------------------------------------------------

each("silu gelu sigmoid exp softplus abs elu hardswish hardsigmoid mish cos log_sigmoid hardtanh hardtanh_ relu6 expm1"
     " exp2 floor ceil round trunc celu selu silu_ cosh hardswish_ erfc sigmoid_ exp_ frac reciprocal", X)  # fmt: skip
each("log sqrt rsqrt log1p log2 log10 sqrt_", data(3, 4, draw=positive))
each("acos logit", data(3, 4, draw=small))
each("isinf isnan isfinite", data(3, 4, draw=wild))
call("nan_to_num", lambda x: aten.nan_to_num(x, 0.5, 3.0, -3.0), data(3, 4, draw=wild))
each("logical_not", data(3, 4, draw=digits))
for op in ("clamp", "clip", "clamp_"):
    call(op, lambda x, op=op: getattr(aten, op)(x, -0.5, 0.5), X)
    call(op, lambda x, op=op: getattr(aten, op)(x, ROW - 1, ROW + 1), X, label="between constants")
call("clamp", lambda x, y: aten.clamp(x, y), X, data(3, 4), label="above data")
for op in ("clamp_min", "clamp_max", "clamp_min_"):
    call(op, lambda x, op=op: getattr(aten, op)(x, 0.1), X)
call("threshold", lambda x: aten.threshold(x, 0.1, 2.0), X)
for op in ("remainder", "fmod", "floor_divide"):
    call(op, lambda x, op=op: getattr(aten, op)(x, 0.7), X)
    call(op, lambda x, y, op=op: getattr(aten, op)(x, y), X, Y, label="by data")
    call(op, lambda x, op=op: getattr(aten, op)(x, ROW), X, label="by constants")
    call(op, lambda x, y, op=op: getattr(aten, op)(x, y), X, data(4), label="by a row")
call("remainder", lambda x: aten.remainder(3.0, x), X, label="of a number")
call("bucketize", lambda x: aten.bucketize(x, torch.tensor([-1.0, 0.0, 0.5, 1.0]).double()), X)
call("bucketize", aten.bucketize.Tensor, X, weight(5), label="boundaries of the model")
call("bucketize", aten.bucketize.Tensor, X, data(4), label="boundaries that are computed")
call("bucketize", lambda b: aten.bucketize.Scalar(0.3, b), data(4), label="a number")
call("isin", lambda x: aten.isin(x, torch.tensor([0.0, 1.5]).double()), data(3, 4, draw=digits))
INTEGERS, FEW = data(3, 4, draw=lambda s, r: 9 * positive(s, r)), data(3, 4, draw=positive)
call("bitwise_not", lambda x: aten.bitwise_not(x.to(torch.long)), INTEGERS)
for op in ("__lshift__", "__rshift__", "bitwise_xor", "__and__", "__or__", "bitwise_and", "bitwise_or"):
    call(op, lambda x, op=op: getattr(aten, op)(x.to(torch.long), 2), INTEGERS)
    call(op, lambda x, y, op=op: getattr(aten, op)(x.to(torch.long), y.to(torch.long)), INTEGERS, FEW,
         label="with data")  # fmt: skip
each("tanh tanh_ sin erf atan sinh asinh tan sign sgn hardshrink softshrink", X)
each("asin", data(3, 4, draw=small))
each("relu relu_ leaky_relu", X)
call("prelu", aten.prelu, data(2, 4, 3), weight(1))
call("prelu", aten.prelu, data(2, 4, 3), weight(4), label="a slope for each channel")
each("square", X)
call("square", lambda x: aten.square(x), X, along=True, label="along")
for op in ("pow", "pow_"):
    call(op, lambda x, op=op: getattr(aten, op)(x, 2), X, label="2")
    call(op, lambda x, op=op: getattr(aten, op)(x, 3), X, label="3")
    call(op, lambda x, op=op: getattr(aten, op)(x, 0.5), data(3, 4, draw=positive), label="1/2")
    call(op, lambda x, y, op=op: getattr(aten, op)(x, y), data(3, 4, draw=positive), Y, label="data")
    call(op, lambda x, op=op: getattr(aten, op)(x, ROW), data(3, 4, draw=positive), label="constants")
call("pow", lambda x: aten.pow(2.0, x), X, label="of a number")
call("pow", lambda x: aten.pow(ROW.abs(), x), X, label="of constants")

# Two operands -------------------------------------------------------------------------------------------------------

for op in ("add", "add_", "sub", "sub_", "rsub", "subtract"):
    f = getattr(aten, op)
    call(op, f, X, Y, label="data")
    call(op, f, X, data(4), label="a row")
    call(op, f, X, weight(4), label="a weight")
    call(op, f, X, weight(3, 1), label="a column")
    call(op, lambda x, f=f: f(x, 1.5), X, label="a number")
    call(op, lambda x, f=f: f(x, ROW), X, label="constants")
    call(op, lambda x, f=f: f(x, torch.zeros(3, 4).double()), X, label="zeros")
for op in ("add", "sub", "rsub"):
    f = getattr(aten, op)
    call(op, lambda x, y, f=f: f(x, y), data(4), Y, label="to a row")
    call(op, lambda w, f=f: f(w, 1.0), weight(3, 4), label="to a weight")
    call(op, lambda x, w, f=f: x * f(w, 1.0), X, weight(4), label="to a gain")
    call(op, lambda x, w, f=f: x * f(w, 1.0), X, weight(4), label="to a gain, along", along=True)
call("add", lambda x, w: x * w + w, X, weight(4), label="of a gain, too")
call("add", lambda x, w: x * w + w, X, weight(4), label="of a gain, too, along", along=True)
call("add", lambda x, y: aten.add(x, y, alpha=-2.5), X, Y, label="of a multiple")
call("add", lambda x, w: x * aten.add(w, 1.0, 2.0), X, weight(4), label="to a gain, twice a number")
call("rsub", lambda w, x: x * aten.rsub(w, 1.0), weight(4), X, label="of a gain, reversed")
call("sub", lambda x: x - aten.mean(x, [-1], True), X, label="its mean")
call("sub", lambda x: (lambda m: m * (x - m))(aten.mean(x, [-1], True)), X, label="its mean, used too")
call("lerp", lambda x, y: aten.lerp(x, y, 0.3), X, Y)
call("lerp", lambda x, y, z: aten.lerp(x, y, z), X, Y, data(3, 4), label="by data")
call("lerp", lambda x, y, w: aten.lerp(x, y, w), X, Y, weight(4), label="by a weight")
call("lerp", lambda x, y: aten.lerp(x, y, ROW), X, Y, label="by constants")
for op in ("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide"):
    f = getattr(aten, op)
    call(op, f, X, Y, label="data")
    call(op, f, X, weight(4, draw=positive), label="a gain")
    call(op, f, X, weight(4, draw=positive), label="a gain, along", along=True)
    call(op, f, X, weight(3, 1, draw=positive), label="a column")
    call(op, f, X, data(1, 4, draw=positive), label="a row of data")
    call(op, lambda x, f=f: f(x, 1.5), X, label="a number")
    call(op, lambda x, f=f: f(x, ROW), X, label="constants")
for op in ("mul", "div"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, x), data(3, 4), label="itself")
    call(op, f, weight(3, 4), weight(3, 4, draw=positive), label="two weights")
    call(op, f, X, weight(1, draw=positive), label="a scalar weight")
    call(op, f, data(4), data(3, 4, draw=positive), label="a row by data")
    call(op, lambda x, w, f=f: f(x, 1 + w), X, weight(4, draw=positive), label="one and a gain")
    call(op, lambda x, y, f=f: f(x, y).sum(-1), X, Y, label="summed")
call("mul", lambda x, y: aten.mul(x.exp(), torch.zeros(3, 4).double()) + y, X, Y, label="zeros, added to")
call("div", lambda x: aten.div(ROW, x), X, label="constants by data")
call("div", lambda x: aten.div(x, 0.7, rounding_mode="floor"), X, label="rounded")
call("div", lambda x, y: aten.div(x, y, rounding_mode="trunc"), X, Y, label="by data, rounded")
call("div", lambda x, w: aten.div(w, x), data(3, 4, draw=positive), weight(4), label="a weight by data")
for op in ("where", "masked_fill", "masked_fill_"):
    if op == "where":
        select, mask_first = aten.where, True
    else:
        select, mask_first = getattr(aten, op), False

    def chosen(m: Any, x: Any, fill: Any, f: Any = select, first: bool = mask_first) -> Tensor:
        return f(m, x, torch.as_tensor(fill).double()) if first else f(x, m, fill)

    call(op, lambda x, f=chosen: f(MASK, x, 0.0), X, label="zeros")
    call(op, lambda x, f=chosen: f(MASK, x, 0.5), X, label="a number")
    call(op, lambda x, f=chosen: f(torch.tensor([[True], [False], [True]]), x, 0.5), X, label="rows")
    call(op, lambda x, y, f=chosen: f(y > 0, x, 0.0), X, Y, label="where data is positive")
    call(op, lambda x, y, f=chosen: f(y > 0, x, 0.0), X, data(4, draw=digits), label="where a row is positive")
call("where", lambda x, y: aten.where(MASK, x, y), X, Y, label="of two")
call("where", lambda x, y, z: aten.where(z > 0, x, y), X, Y, data(3, 1), label="of two by data")
call("where", lambda x, y: aten.where(MASK, x, y), X, data(4), label="of a value and a row")
call("where", lambda x: aten.where(x > 0, ROW, 0.0 * ROW), X, label="of constants")
for op in ("lt", "le", "gt", "ge"):
    f = getattr(aten, op)
    call(op, f, X, Y, label="data")
    call(op, lambda x, f=f: f(x, 0.1), X, label="a number")
    call(op, lambda x, f=f: f(x, ROW), X, label="constants")
    call(op, f, X, data(4), label="a row")
for op in ("eq", "ne", "logical_and", "logical_or", "logical_xor"):
    f = getattr(aten, op)
    call(op, f, data(3, 4, draw=digits), data(3, 4, draw=digits), label="data")
    call(op, f, data(3, 4, draw=digits), data(4, draw=digits), label="a row")
for op in ("eq", "ne"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, 0.0), data(3, 4, draw=digits), label="a number")
for length, angle, label in ((X, Y, "data"), (X, data(4), "a row"), (data(3, 1), Y, "one length")):
    call("polar", lambda x, y: torch.view_as_real(aten.polar(x, y)), length, angle, label=label)
call("polar", lambda x: torch.view_as_real(aten.polar(x, ROW.expand(x.shape))), X, label="constant angles")
call("polar", lambda x: torch.view_as_real(aten.polar(torch.ones_like(x), x)), X, label="constant lengths")
for op in ("maximum", "minimum", "atan2", "logaddexp"):
    f = getattr(aten, op)
    call(op, f, X, Y, label="data")
    call(op, f, X, data(4), label="a row")
    call(op, lambda x, f=f: f(x, ROW), X, label="constants")
call("glu", lambda x: aten.glu(x, -1), data(3, 8))
call("glu", lambda x: aten.glu(x, 0), data(6, 4), label="rows")

# Contractions -------------------------------------------------------------------------------------------------------

each("linear", X, weight(5, 4), weight(5), label="of a weight")
each("linear", X, weight(5, 4), label="without bias")
each("linear", X, data(5, 4), data(5), label="of data")
each("linear", data(4), weight(5, 4), weight(5), label="of a vector")
each("addmm", weight(5), X, weight(4, 5), label="of a weight")
each("addmm", data(3, 5), X, data(4, 5), label="of data")
each("addmm", data(3, 1), X, data(4, 5), label="to a column")
each("baddbmm", data(2, 3, 5), data(2, 3, 4), data(2, 4, 5))
each("baddbmm", weight(5), data(2, 3, 4), data(2, 4, 5), label="to a row")
call("baddbmm", lambda x, y: aten.baddbmm(numbers(1, 1, 5), x, y), data(2, 3, 4), data(2, 4, 5), label="to constants")
each("addbmm", data(3, 5), data(2, 3, 4), data(2, 4, 5))
each("matmul mm", X, data(4, 5))
each("matmul", X, weight(4, 5), label="with a weight")
each("matmul", data(2, 3, 4), data(2, 4, 5), label="in a batch")
each("matmul", data(2, 3, 4), data(4, 5), label="of a batch with one")
each("matmul", data(4), data(4, 5), label="of a vector")
each("matmul", data(3, 4), data(4), label="with a vector")
call("matmul", lambda x: aten.matmul(x, x.transpose(0, 1)), X, label="with itself")
call("matmul", torch.nn.functional.linear, X, data(4), label="as a layer with one unit")
each("bmm", data(2, 3, 4), data(2, 4, 5))
each("mv", X, data(4))
each("dot inner", data(4), data(4))
each("inner", X, data(5, 4), label="of matrices")
for side in (True, False):
    call("linalg_solve_triangular", lambda a, x, side=side: aten.linalg_solve_triangular(
        a, x, upper=False, left=side, unitriangular=True), data(2, 3, 3), data(2, 3, 4) if side else data(2, 4, 3),
         label="from the left" if side else "from the right")  # fmt: skip
each("outer", data(3), data(4))
for equation, *shapes in (
    ("ij,jk->ik", (3, 4), (4, 5)), ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)), ("ij->i", (3, 4)), ("ij->ji", (3, 4)),
    ("i,j->ij", (3,), (4,)), ("ij,ij->", (3, 4), (3, 4)), ("ii->i", (3, 3)), ("ii->", (3, 3)), ("...d,de->...e",
    (2, 3, 4), (4, 5)), ("ij,j,jk->ik", (3, 4), (4,), (4, 5)), ("i,i,i->", (3,), (3,), (3,)), ("ij,jk", (3, 4), (4, 5)),
    ("bhqd,bhkd->bhqk", (1, 2, 3, 4), (1, 2, 5, 4)), ("ij,ij->ij", (3, 4), (3, 4)), ("ij,kj->jik", (3, 4), (5, 4)),
):  # fmt: skip
    call("einsum", lambda *a, e=equation: torch.einsum(e, *a), *(data(*s) for s in shapes), label=equation)
call("einsum", lambda x: torch.einsum("ij,j->i", x, ROW), X, label="with constants")
call("einsum", lambda x: torch.einsum("ij,kj->ik", x, x), X, label="with itself")

# Grids --------------------------------------------------------------------------------------------------------------

for n in (1, 2, 3):
    conv, transposed, places = getattr(aten, f"conv{n}d"), getattr(aten, f"conv_transpose{n}d"), (3,) * n
    kernel = (2,) * n
    call(f"conv{n}d", conv, data(2, 4, *places), weight(3, 4, *kernel), weight(3))
    call(f"conv{n}d", conv, data(2, 4, *places), weight(3, 4, *kernel), label="without bias")
    call(f"conv{n}d", lambda x, w, b, f=conv: f(x, w, b, groups=2), data(2, 4, *places), weight(6, 2, *kernel),
         weight(6), label="in groups")  # fmt: skip
    call(f"conv{n}d", lambda x, w, b, f=conv: f(x, w, b, groups=4), data(2, 4, *places), weight(4, 1, *kernel),
         weight(4), label="by channel")  # fmt: skip
    call(f"conv{n}d", lambda x, w, f=conv: f(x, w, groups=3), data(2, 3, *places), weight(6, 1, *kernel),
         label="by channel, two each")  # fmt: skip
    call(f"conv_transpose{n}d", transposed, data(2, 4, *places), weight(4, 3, *kernel), weight(3))
    call(f"conv_transpose{n}d", lambda x, w, b, f=transposed: f(x, w, b, groups=2), data(2, 4, *places),
         weight(4, 3, *kernel), weight(6), label="in groups")  # fmt: skip
    for op in (f"avg_pool{n}d", f"adaptive_avg_pool{n}d", f"max_pool{n}d"):
        f = getattr(aten, op)
        call(op, lambda x, f=f, k=kernel: f(x, k), data(2, 3, *places))
    op = f"upsample_nearest{n}d"
    f = getattr(aten, op)
    call(op, lambda x, f=f, n=n: f(x, [5] * n), data(2, 3, *places))
call("conv2d", aten.conv2d, data(4, 3, 3), weight(3, 4, 2, 2), weight(3), label="of one image")
call("convolution", lambda x, w, b: aten.convolution(x, w, b, [1], [0], [1], False, [0], 1),
     data(2, 4, 3), weight(3, 4, 2), weight(3))  # fmt: skip
call("convolution", lambda x, w, b: aten.convolution(x, w, b, [1], [0], [1], False, [0], 2),
     data(2, 4, 3), weight(6, 2, 2), weight(6), label="in groups")  # fmt: skip
call("convolution", lambda x, w, b: aten.convolution(x, w, b, [1], [0], [1], True, [0], 1),
     data(2, 4, 3), weight(4, 3, 2), weight(3), label="transposed")  # fmt: skip
for op in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, [5, 4], False), data(2, 3, 3, 3))
call("upsample_linear1d", lambda x: aten.upsample_linear1d(x, [5], False), data(2, 3, 3))
call("upsample_trilinear3d", lambda x: aten.upsample_trilinear3d(x, [3, 3, 3], False), data(2, 3, 2, 2, 2))
call("adaptive_max_pool2d", lambda x: aten.adaptive_max_pool2d(x, [2, 2]), data(2, 3, 4, 4))
for op in ("grid_sampler", "grid_sampler_2d"):
    f = getattr(aten, op)
    call(op, lambda x, g, f=f: f(x, g, 0, 0, False), data(2, 3, 4, 4), data(2, 3, 3, 2, draw=small))
    call(op, lambda x, f=f: f(x, numbers(2, 3, 3, 2).tanh(), 0, 0, False), data(2, 3, 4, 4),
         label="at constants")  # fmt: skip
for op in ("fft_fft", "fft_ifft", "fft_rfft", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_rfftn"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: torch.stack([aten.real(f(x)), aten.imag(f(x))]), Z)
for op in ("fft_fftn", "fft_ifftn"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: torch.stack([aten.real(f(x)), aten.imag(f(x))]), Z)
    call(op, lambda x, f=f: aten.real(f(x, None, [1])), Z, label="along one axis")
for op in ("_conj", "conj_physical", "resolve_conj"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: torch.view_as_real(aten.add(f(aten.fft_rfft(x, None, 1)), 0.0)), Z)
for op in ("fft_irfft", "fft_irfft2", "fft_irfftn"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(torch.view_as_complex(x)), data(2, 3, 4, 2))
call("col2im", lambda x: aten.col2im(x, [3, 3], [2, 2], [1, 1], [0, 0], [1, 1]), data(2, 12, 4))
call("pixel_shuffle", lambda x: aten.pixel_shuffle(x, 2), data(2, 12, 2, 2))
call("_weight_norm", lambda v, g: aten._weight_norm(v, g, 0), weight(3, 4, 2), weight(3, 1, 1))
call("_weight_norm", lambda v, g: aten._weight_norm(v, g, 2), weight(3, 4, 2), weight(1, 1, 2), label="along the last")
call("_weight_norm", lambda v, g: aten._weight_norm(v, g, -1), weight(3, 4, 2), weight(), label="of all")

# Views --------------------------------------------------------------------------------------------------------------

for op in ("view", "reshape", "_unsafe_view"):
    f = getattr(aten, op)
    for label, shape, target in (("split", (3, 8), [3, 2, 4]), ("joined", (2, 3, 4), [6, 4]),
                                 ("regrouped", (6, 4), [2, 12]), ("of ones", (3, 1, 4), [3, 4, 1])):  # fmt: skip
        call(op, lambda x, f=f, t=target: f(x, t), data(*shape), label=label)
call("view", lambda x: aten.view(aten.cat([x[:, :4], x[:, 4:].tanh()], 1), [3, 4, 2]), data(3, 8), label="of a sum")
call("_reshape_alias", lambda x: aten._reshape_alias(x, [6, 4], [4, 1]), Z)
call("flatten", lambda x: aten.flatten(x, 0, 1), Z)
call("unflatten", lambda x: aten.unflatten(x, 1, [2, 2]), X)
for op in ("view_as", "reshape_as"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, torch.zeros(2, 6)), X)
for op in ("transpose", "swapaxes", "swapdims"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, 0, 2), Z)
each("t", X)
call("numpy_T", lambda x: aten.numpy_T(x), Z)
call("permute", lambda x: aten.permute(x, [2, 0, 1]), Z)
call("movedim", lambda x: aten.movedim(x, [0], [2]), Z)
call("movedim", lambda x: aten.movedim(x, [0, 1], [2, 0]), data(2, 3, 4, 5), label="of two")
call("unsqueeze", lambda x: aten.unsqueeze(x, -1), X)
call("squeeze", lambda x: aten.squeeze(x), data(3, 1, 4))
call("squeeze", lambda x: aten.squeeze(x, 1), data(3, 1, 4), label="one")
call("expand", lambda x: aten.expand(x, [2, 3, 4]), X, label="in front")
call("expand", lambda x: aten.expand(x, [3, 4]), data(3, 1))
call("broadcast_tensors", lambda x, y: aten.broadcast_tensors([x, y])[1] * x, X, data(4))
call("broadcast_tensors", lambda x, y: aten.broadcast_tensors([x, y])[0] * y, data(3, 1), X, label="along one axis")
call("expand_as", lambda x: aten.expand_as(x, torch.zeros(3, 4)), data(3, 1))
call("broadcast_to", lambda x: aten.broadcast_to(x, [3, 4]), data(3, 1))
call("slice", lambda x: aten.slice(x, 1, 1, 3), X)
call("slice", lambda x: aten.slice(x, 1, 0, 4, 2), X, label="strided")
call("slice", lambda x: aten.slice(x, 1, 1, 3, 2), X, label="strided, of half the rows")
call("slice", lambda x: (aten.slice(x, 1, 0, 2), aten.slice(x, 1, 1, 4).tanh()), X, label="twice, overlapping")
call("slice", lambda x: aten.slice(aten.view(x, [12]), 0, 4, 8), X, label="rows of a product")
call("slice", lambda x: aten.slice(aten.view(x, [12]), 0, 3, 7), X, label="across rows of a product")
call("select", lambda x: aten.select(x, 1, 2), X)
call("select", lambda x: aten.select(x, 0, -1), X, label="the last row")
call("narrow", lambda x: aten.narrow(x, 1, 1, 2), X)
call("narrow", lambda x: aten.narrow(x, 1, -3, 2), X, label="counted from behind")
call("split", lambda x: aten.split(x, 3, 1), X)
call("split_with_sizes", lambda x: aten.split_with_sizes(x, [1, 3], 1), X)
call("chunk", lambda x: aten.chunk(x, 2, 1), X)
call("tensor_split", lambda x: aten.tensor_split(x, 2, 1), X)
call("unbind", lambda x: aten.unbind(x, 0), X)
call("unbind", lambda x: aten.unbind(-x, 0), X, label="of what is no view")
call("unbind", lambda x: [y.tanh() for y in aten.unbind(aten.view(x, [2, 2, 3]), 0)], data(12), label="of a view")
call("getitem", lambda x: aten.chunk(x, 2, 1)[1], X)
for op in ("cat", "concat", "concatenate"):
    f = getattr(aten, op)
    call(op, lambda x, y, f=f: f([x, y], 1), X, data(3, 2))
    call(op, lambda x, y, f=f: f([x, y, x], 0), X, data(2, 4), label="rows, one twice")
call("cat", lambda x: aten.cat([x, numbers(3, 2)], 1), X, label="constants")
call("cat", lambda x: aten.cat([torch.zeros(3, 4).double(), x], 0), X, label="zeros")
call("stack", lambda x, y: aten.stack([x, y], 1), X, Y)
for op in ("repeat", "tile"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, [2, 1, 3]), X)
call("repeat_interleave", lambda x: aten.repeat_interleave(x, 2, 1), X)
call("repeat_interleave", lambda x: aten.repeat_interleave(x, 2), X, label="flat")
call("repeat_interleave", lambda x: aten.repeat_interleave(x, torch.tensor([1, 2, 0, 1]), 1, output_size=4), X,
     label="by constants")  # fmt: skip
call("roll", lambda x: aten.roll(x, [1], [1]), X)
call("roll", lambda x: aten.roll(x, [1]), X, label="flat")
call("flip", lambda x: aten.flip(x, [1]), X)
each("tril triu", data(2, 4, 4))
call("pad", lambda x: aten.pad(x, [1, 2]), X)
call("pad", lambda x: aten.pad(x, [1, 2], "constant", 0.5), X, label="with a number")
call("pad", lambda x: aten.pad(x, [0, 0, 1, 0]), X, label="rows")
call("pad", lambda x: aten.pad(x, [-1, 2]), X, label="a cut")
call("pad", lambda x: aten.pad(x, [1, 1], "reflect"), Z, label="reflected")
call("copy", lambda y: aten.copy(torch.zeros(3, 4).double(), y), X)
call("copy", lambda y: aten.copy(torch.zeros(3, 4).double(), y), data(4), label="a row")
call("slice_scatter", lambda x, y: aten.slice_scatter(x, y, 1, 1, 3), X, data(3, 2))
call("slice_scatter", lambda x, y: aten.slice_scatter(x, y, 1, 0, 4, 2), X, data(3, 2), label="strided")
call("slice_scatter", lambda x, y: aten.slice_scatter(x, y, 1, 0, 4), X, data(3, 4), label="all of it")
call("select_scatter", lambda x, y: aten.select_scatter(x, y, 0, 0), data(1, 4), data(4), label="all of it")
call(
    "slice_scatter", lambda y: aten.slice_scatter(torch.zeros(3, 4).double(), y, 1, 1, 3), data(3, 2), label="of zeros"
)
call(
    "slice_scatter", lambda y: aten.slice_scatter(torch.zeros(3, 4).double(), y, 1, 2, 4).view(3, 2, 2), data(3, 2),
    label="of zeros, in blocks",
)  # fmt: skip
call(
    "slice_scatter", lambda y: aten.slice_scatter(torch.eye(3, 4).double(), y, 1, 2, 4).view(3, 2, 2), data(3, 2),
    label="of constants, in blocks",
)  # fmt: skip
call("slice_scatter", lambda y: aten.slice_scatter(numbers(3, 4), y, 1, 1, 3), data(3, 2), label="of constants")
call("slice_scatter", lambda x: aten.slice_scatter(x, numbers(3, 2), 1, 1, 3), X, label="constants")
call("unfold", lambda x: aten.unfold(x, 1, 2, 1), X)
call("as_strided", lambda x: aten.as_strided(x, [3, 3, 2, 5], [20, 5, 5, 1]), data(3, 4, 5), label="windows")
call("as_strided", lambda x: aten.as_strided(aten.transpose(x, 0, 1), [4, 3], [1, 4]), X, label="of a transpose")
call("as_strided", lambda x: aten.as_strided(x, [2, 3], [4, 1], 1), X, label="a part")
call("im2col", lambda x: aten.im2col(x, [2, 2], [1, 1], [0, 0], [1, 1]), data(2, 3, 3, 3))
call("view_as_complex", lambda x: aten.view_as_complex(x), data(3, 4, 2))
call("view_as_complex", lambda x: aten.view_as_complex(x) * torch.complex(ROW, numbers(4, seed=1)), data(3, 4, 2),
     label="turned")  # fmt: skip
call("view_as_real", lambda x: aten.view_as_real(torch.view_as_complex(x)), data(3, 4, 2))
each("real", X)
for op in ("real", "imag"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(torch.view_as_complex(x)), data(3, 4, 2), label="part")
call("diagonal", lambda x: aten.diagonal(x), data(3, 3))
call("diagonal", lambda x: aten.diagonal(x, 0, 1, 2), data(2, 3, 3), label="in a batch")

# Norms and reductions -----------------------------------------------------------------------------------------------

for along in (False, True):
    suffix = ", along" if along else ""
    call("layer_norm", lambda x, w, b: aten.layer_norm(x, [4], w, b), X, weight(4), weight(4), along=along,
         label="with gain and bias" + suffix)  # fmt: skip
    call("layer_norm", lambda x, w: aten.layer_norm(x, [4], w), X, weight(4), along=along, label="with gain" + suffix)
    call("layer_norm", lambda x: aten.layer_norm(x, [4]), X, along=along, label="plain" + suffix)
    call("rms_norm", lambda x, w: aten.rms_norm(x, [4], w, 1e-2), X, weight(4), along=along, label="gain" + suffix)
    call("rms_norm", lambda x: aten.rms_norm(x, [4], None, 1e-2), X, along=along, label="plain" + suffix)
call("cdist", lambda x, y: aten.cdist(x, y), X, data(2, 4))
call("cdist", lambda x, y: aten.cdist(x, y, 1.0), X, data(2, 4), label="of another kind")
call("cdist", lambda x, y: aten.cdist(x, y), Z, data(2, 5, 4), label="in batches")
call("cdist", lambda x, y: aten.cdist(x, y), Z, X, label="of a batch with one")
call("layer_norm", lambda x, w, b: aten.layer_norm(x, [3, 4], w, b), Z, weight(3, 4), weight(3, 4), label="of matrices")
call("layer_norm", lambda x, w, b: aten.layer_norm(x, [4], w, b), X, data(4), data(4), label="with computed gain")
call("rms_norm", lambda x: aten.rms_norm(x, [3, 4], None, 1e-2), Z, label="of matrices")
call("rms_norm", lambda x, w: aten.rms_norm(x, [3, 4], w, 1e-2), Z, weight(3, 4), label="of matrices, with gain")
for op in ("softmax", "_softmax", "_safe_softmax", "log_softmax"):
    f, rest = getattr(aten, op), (False,) if op == "_softmax" else ()
    call(op, lambda x, f=f, rest=rest: f(x, -1, *rest), X)
    call(op, lambda x, f=f, rest=rest: f(x, 0, *rest), Z, label="of the first")
    call(op, lambda x, w, f=f, rest=rest: f(x + w, -1, *rest), X, weight(4), label="with a bias")
    call(op, lambda x, w, f=f, rest=rest: f(x + w, 0, *rest), X, weight(4), label="of the first, with a bias")
LABELS = torch.tensor([1, 0])
call("cross_entropy_loss", lambda x: aten.cross_entropy_loss(x, LABELS), data(2, 4))
call("cross_entropy_loss", lambda x: aten.cross_entropy_loss(x, LABELS, None, 0), data(2, 4), label="of each")
for f in (aten.nll_loss_nd, aten.nll_loss):
    call(f.__name__, lambda x, f=f: f(x, LABELS), data(2, 4))
call("nll_loss2d", lambda x: aten.nll_loss2d(x, LABELS.view(2, 1, 1).expand(2, 3, 3)), data(2, 4, 3, 3))
for f in (aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy_with_logits, aten.kl_div):
    call(f.__name__, lambda x, f=f: f(x, torch.full_like(x, 0.5)), X)
call("binary_cross_entropy", lambda x, y: aten.binary_cross_entropy(x.sigmoid(), y.sigmoid()), X, Y)
for op in ("mean", "sum"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, [1]), X)
    call(op, lambda x, f=f: f(x, [0], True), X, label="kept")
    call(op, lambda x, f=f: f(x), X, label="of all")
    call(op, lambda x, w, f=f: x * (w - f(w)), X, weight(4), label="of all, subtracted")
    call(op, lambda x, y, f=f: f(x * y, [1]), X, Y, label="of a product")
    call(op, lambda x, f=f: f(x * x, [-1], True), X, label="of a square")
    call(op, lambda x, w, f=f: f(x * w, [-1]), X, weight(3, 4), label="with a weight")
    call(op, lambda x, w, f=f: f(x * w, [0]), X, data(4), label="with a row")
for op in ("amax", "amin", "any", "all", "argmax", "argmin", "prod", "count_nonzero"):
    f, draw = getattr(aten, op), {"any": mostly(0), "all": mostly(1), "count_nonzero": digits}.get(op, normal)
    call(op, lambda x, f=f: f(x, 1), data(3, 4, draw=draw))
    call(op, lambda x, f=f: f(x), data(3, 4, draw=draw), label="of all")
for op in ("any", "all", "prod"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, 0, True), data(2, 4, draw=mostly(1) if op != "prod" else normal),
         label="kept")  # fmt: skip
call("argmax", lambda x: torch.nn.functional.one_hot(aten.argmax(x, 1), 4), X, label="as one hot")
call("argmax", lambda x, w: w[aten.argmax(x, 1)], X, weight(4, 5), label="as an index")
call("logsumexp", lambda x: aten.logsumexp(x, [1]), X)
call("logsumexp", lambda x: aten.logsumexp(x, [0], True), X, label="kept")
for op in ("max", "min"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x), X, label="of all")
    call(op, lambda x, w, f=f: x * (w - f(w)), X, weight(4), label="of all, subtracted")
    call(op, lambda x, f=f: f(x, 1)[0], X, label="along one")
    call(op, lambda x, f=f: f(x, 1), X, label="along one, with numbers")
    call(op, f, X, Y, label="of two")
call("median", lambda x: aten.median(x), X, label="of all")
call("median", lambda x: aten.median(x, 1)[0], X)
for op in ("cumsum", "cumprod", "cumsum_"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, 1), X)
for op in ("cummax", "cummin"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, 1), X)
call("diff", lambda x: aten.diff(x), X)
call("diff", lambda x: aten.diff(x, 1, 0), X, label="of rows")
call("diff", lambda x, y: aten.diff(x, 1, 1, y), X, data(3, 1), label="after data")
for op in ("linalg_vector_norm", "linalg_norm", "norm"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, 2, [1]), X)
    call(op, lambda x, f=f: f(x, 2, [0], True), X, label="kept")
    call(op, lambda x, f=f: f(x, 1, [1]), X, label="absolute")
    call(op, lambda x, f=f: f(x), X, label="of all")
    call(op, lambda x, w, f=f: x * (w - f(w)), X, weight(4), label="of all, subtracted")
    call(op, lambda x, f=f: f(x, 3, [0, 1]) if f is not aten.linalg_norm else f(x, 1, [0, 1]), X, label="of both axes")
call("linalg_norm", lambda x: aten.linalg_norm(x, "nuc"), X, label="nuclear")
call("mse_loss", lambda x, y: aten.mse_loss(x, y), X, Y)
call("mse_loss", lambda x, y: aten.mse_loss(x, y, 0), X, Y, label="each")
for op in ("var", "std"):
    f = getattr(aten, op)
    call(op, lambda x, f=f: f(x, [1]), X)
    call(op, lambda x, f=f: f(x, [1], correction=0, keepdim=True), X, label="kept")
    call(op, lambda x, f=f: f(x, [0, 1]), X, label="of both axes")
    call(op, lambda x, f=f: f(x), X, label="of all")
    call(op, lambda x, w, f=f: x * (w - f(w)), X, weight(4), label="of all, subtracted")
    call(op, lambda x, f=f: f(x, False), X, label="of all, biased")
call("group_norm", lambda x, w, b: aten.group_norm(x, 2, w, b), data(2, 6, 3), weight(6), weight(6))
call("group_norm", lambda x: aten.group_norm(x, 2), data(2, 6, 3), label="plain")
call("group_norm", lambda x: aten.group_norm(x, 1), data(2, 6, 3), label="one group")
call("group_norm", lambda x: aten.group_norm(x, 6), data(2, 6, 3), label="one channel each")
call("instance_norm", lambda x, w, b: aten.instance_norm(x, w, b, None, None, True, 0.1, 1e-2, False),
     data(2, 3, 4), weight(3), weight(3))  # fmt: skip
call("instance_norm", lambda x: aten.instance_norm(x, None, None, None, None, True, 0.1, 1e-2, False),
     data(2, 3, 4), label="plain")  # fmt: skip
STATISTICS = (Statistic((4,)), Statistic((4,)))
call("batch_norm", lambda x, w, b, m, v: aten.batch_norm(x, w, b, m, v, False, 0.1, 1e-2, False),
     data(2, 4, 3), weight(4), weight(4), *STATISTICS)  # fmt: skip
call("batch_norm", lambda x, m, v: aten.batch_norm(x, None, None, m, v, False, 0.1, 1e-2, False),
     data(2, 4, 3), *STATISTICS, label="without gain")  # fmt: skip
for own in (data(1, 4, 3), data(2, 4, 3), weight(1, 4, 6)):
    call("batch_norm", lambda x: aten.batch_norm(x, None, None, None, None, True, 0.0, 1e-2, False), own,
         label=f"of itself {own.shape}")  # fmt: skip
call("batch_norm", lambda x, w, b: aten.batch_norm(x, w, b, None, None, True, 0.0, 1e-2, False),
     data(1, 4, 3), weight(4), weight(4), label="of itself, with gain")  # fmt: skip
call("_native_batch_norm_legit_no_training",
     lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-2),
     data(2, 4, 3), weight(4), weight(4), *STATISTICS)  # fmt: skip

# Lookups ------------------------------------------------------------------------------------------------------------

CHOICE = torch.tensor([2, 0, 2])
call("embedding", lambda w: aten.embedding(w, CHOICE), weight(4, 5))
call("embedding", lambda x: aten.embedding(x, CHOICE), data(4, 5), label="of data")
call("embedding", lambda x, w: aten.embedding(w, x.argmax(1)), X, weight(4, 5), label="by data")
call("embedding_bag", lambda w: aten.embedding_bag(w, CHOICE, torch.tensor([0, 1]))[0], weight(4, 5))
call("embedding_bag", lambda w: aten.embedding_bag(w, CHOICE, torch.tensor([0, 1]), False, 2)[0], weight(4, 5),
     label="the largest")  # fmt: skip
call("embedding_bag", lambda w, s: aten.embedding_bag(w, CHOICE, torch.tensor([0, 1]), False, 0, False, s)[0],
     weight(4, 5), data(3), label="weighted")  # fmt: skip
call("topk", lambda x: aten.topk(x, 2, 1)[0], X)
call("topk", lambda x: aten.topk(x, 2, 0), X, label="with numbers")
call("topk", lambda x, w: aten.topk(x + w, 2, 1)[0], X, weight(4), label="with a bias")
call("cumsum", lambda x, w: aten.cumsum(x + w, 1), X, weight(4), label="with a bias")
call("cumsum", lambda x, w: aten.cumsum(x + w, 0), X, weight(4), label="of rows with a bias")
call("roll", lambda x, w: aten.roll(x + w, [1], [0]), X, weight(4), label="of rows with a bias")
call("topk", lambda x, y: aten.gather(y, 1, aten.topk(x, 2, 1)[1]), X, Y, label="gathered")
call("topk", lambda x, w: w[aten.topk(x, 2, 1)[1]], X, weight(4, 5), label="as an index")
call("topk", lambda x: torch.nn.functional.one_hot(aten.topk(x, 2, 1)[1], 4), X, label="as one hot")
call("topk", lambda x: aten.topk(x, 2, 1)[1] == 1, X, label="compared with a number")
call("topk", lambda x: aten.topk(x, 2, 1)[1].unsqueeze(-1) == torch.arange(4), X, label="compared with all")
call("topk", lambda x: aten.topk(x, 2, 1)[1] + 1, X, label="added to")
call("topk", lambda x, w: w[aten.topk(x, 2, 1)[1] + 1], X, weight(5, 2), label="as an index, one further")
call("topk", lambda x: aten.sort(aten.topk(x, 2, 1)[1], 1)[0], X, label="sorted by number")
call("topk", lambda x: aten.scatter(torch.zeros(3, 4).double(), 1, aten.topk(x, 2, 1)[1], 1.0), X, label="as a mask")
call("topk", lambda x: torch.zeros(4).double().index_put((aten.topk(x, 2, 1)[1],), torch.tensor(1.0).double()), X,
     label="as a place")  # fmt: skip
call("sort", lambda x: aten.sort(x, 1)[0], X)
call("sort", lambda x: aten.sort(x, 0, True), X, label="with numbers")
call("argsort", lambda x: aten.argsort(x, 1), X)
call("argsort", lambda x, y: aten.gather(y, 1, aten.argsort(x, 1)), X, Y, label="gathered")
call("kthvalue", lambda x: aten.kthvalue(x, 2, 0)[0], X)
call("kthvalue", lambda x: aten.kthvalue(x, 3), X, label="with numbers")
call("index", lambda x: x[:, CHOICE], X)
call("index", lambda x: x[:, torch.tensor([1, 2])], X, label="a run")
call("index", lambda x: x[CHOICE, torch.tensor([0, 1, 3])], X, label="of both axes")
call("index", lambda x: x[CHOICE], weight(4, 3), label="of a weight")
call("index", lambda x: x[:, torch.tensor([[0, 1], [2, 0]])], Z, label="by a matrix")
call("index", lambda x: x[CHOICE[:2], :, torch.tensor([0, 1])], data(4, 3, 2), label="of axes apart")
call("index", lambda x, y: y[:, x.argmax(1)], X, data(2, 4), label="by data")
call("index", lambda x, y: y[torch.arange(3), x.argmax(1)], X, data(3, 4), label="by place and data")
call("index_select", lambda x: aten.index_select(x, 1, CHOICE), X)
call("index_select", lambda x, y: aten.index_select(y, 1, x.argmax(1)), X, data(2, 4), label="by data")
PLACES = torch.tensor([[0, 2], [1, 1], [3, 0]])
call("gather", lambda x: aten.gather(x, 1, PLACES), X)
call("gather", lambda x: aten.gather(x, 0, torch.tensor([[2, 1, 0, 0]])), X, label="of rows")
call("gather", lambda x, y: aten.gather(y, 1, x.argmax(1, keepdim=True)), X, Y, label="by data")
call("take_along_dim", lambda x: aten.take_along_dim(x, PLACES, 1), X)
call("take_along_dim", lambda x: aten.take_along_dim(x, PLACES[:1], 1), X, label="the same of all rows")
call("take_along_dim", lambda x: aten.take_along_dim(x[:1], PLACES, 1), X, label="several of one row")
call("take_along_dim", lambda x, y: aten.take_along_dim(y, x.argmax(1, keepdim=True), 1), X, Y, label="by data")
for op in ("scatter", "scatter_", "scatter_add", "scatter_add_"):
    f = getattr(aten, op)
    call(op, lambda x, y, f=f: f(x, 1, PLACES, y), X, data(3, 2))
    call(op, lambda x, y, z, f=f: f(z, 1, x.topk(2, 1)[1], y), X, data(3, 2), data(3, 4), label="into data, by data")
    if op.endswith("_"):  # a constant would not be the same the next time
        continue
    call(op, lambda y, f=f: f(torch.zeros(3, 4).double(), 1, PLACES, y), data(3, 2), label="into zeros")
    call(op, lambda y, f=f: f(numbers(3, 4), 1, PLACES, y), data(3, 2), label="into constants")
    call(op, lambda y, f=f: f(numbers(3, 1).expand(3, 4).contiguous(), 1, PLACES, y), data(3, 2),
         label="into a column")  # fmt: skip
    call(op, lambda x, y, f=f: f(torch.zeros(3, 4).double(), 1, x.topk(2, 1)[1], y), X, data(3, 2), label="by data")
    call(op, lambda x, f=f: f(torch.zeros(3, 4).double(), 1, x.topk(2, 1)[1], numbers(3, 2)), X,
         label="constants by data")  # fmt: skip
call("scatter", lambda x: aten.scatter(x, 1, PLACES, 0.5), X, label="a number")
for how in ("sum", "amax"):
    call("scatter_reduce", lambda x, y, how=how: aten.scatter_reduce(x, 1, PLACES, y, how), X, data(3, 2), label=how)
call("one_hot", lambda x: aten.one_hot(x.argmax(1), 4), X)
call("one_hot", lambda x: aten.one_hot(x.argmax(1), 6), X, label="of more classes")
for op in ("index_put", "index_put_"):
    f = getattr(aten, op)
    call(op, lambda x, y, f=f: f(x, [CHOICE[:2]], y), data(3, 4), data(2, 4))
    call(op, lambda x, y, f=f: f(x, [None, CHOICE[:2]], y), data(2, 3), data(2, 2), label="columns")
    call(op, lambda x, f=f: f(x, [CHOICE[:2]], numbers(4)), X, label="constants")
    call(op, lambda x, y, f=f: f(x, [CHOICE[:2]], y), data(3, 4), data(2, 1), label="a column")
    call(op, lambda x, y, z, f=f: f(y, [x.argmax(0)], z), data(3, 2), data(3, 4), data(2, 4), label="by data")
    call(op, lambda x, y, f=f: f(x, [CHOICE[:2]], y), data(3, 4, 2), data(2, 4, 2), label="matrices")
    call(op, lambda x, y, f=f: f(x, [CHOICE[:2], CHOICE[:2]], y), data(3, 3, 4, 2), data(2, 4, 2), label="two numbers")
    call(op, lambda x, y, f=f: f(x, [CHOICE[:2]], y), data(3, 4, 2), data(4, 1), label="columns of matrices")
    call(op, lambda x, y, f=f: f(x, [CHOICE[:2]], y), data(3, 4, 2), data(2), label="one row for all")
    call(op, lambda x, f=f: f(x, [CHOICE[:2]], numbers(4, 1)), data(3, 4, 2), label="columns of constants")
    call(op, lambda x, f=f: f(x, [CHOICE[:2]], torch.tensor(2.0).double()), data(3, 4, 2), label="one number")
    call(op, lambda x, y, f=f: f(x, [torch.tensor([[True, False], [False, True]])], y), data(2, 2, 4, 2),
         data(2, 4, 2), label="matrices by a mask")  # fmt: skip
    call(op, lambda x, y, f=f: f(x, [x.sum((1, 2)).argsort()[:2]], y), data(4, 4, 2), data(2, 4, 2),
         label="matrices by data")  # fmt: skip
    if op == "index_put":
        call(op, lambda y, f=f: f(numbers(3, 4), [CHOICE[:2]], y), data(2, 4), label="into constants")
    call(op, lambda x, y, f=f: f(x, [CHOICE[:2], None, CHOICE[:2]], y), data(3, 2, 4), data(2, 2), label="axes apart")
    call(op, lambda x, y, f=f: f(x, [torch.tensor([True, False, True])], y), X, data(4), label="by a mask")
    call(op, lambda x, y, f=f: f(x, [CHOICE[:2]], y, True), data(3, 4), data(2, 4), label="added")
call("masked_scatter", lambda x, y: aten.masked_scatter(x, MASK.expand(3, 4), y), X, data(9))
call("masked_scatter", lambda x, y: aten.masked_scatter(x, torch.tensor([[True], [False], [True]]), y), X, data(2, 4),
     label="rows")  # fmt: skip
call("masked_scatter", lambda x, y: aten.masked_scatter(x, MASK[:3, None].expand(3, 4), y), X, data(2, 4),
     label="rows written out")  # fmt: skip
call("masked_scatter", lambda x, y: aten.masked_scatter(x, MASK[:3, None], y), X, data(4, 2), label="rows of others")
call("masked_scatter", lambda x, y: aten.masked_scatter(x, y[:, :1] > 0, y), X, data(3, 4), label="rows by data")
call("masked_scatter", lambda x, y: aten.masked_scatter(x, y > 0, y), X, data(3, 4), label="entries by data")
call(
    "masked_scatter", lambda x, y: aten.masked_scatter(x, MASK[:3], y), data(4, 3, 1), data(8, 3), label="of one entry"
)
for op in ("index_add", "index_add_", "index_copy"):
    f = getattr(aten, op)
    call(op, lambda x, y, f=f: f(x, 0, CHOICE[:2], y), X, data(2, 4))
    call(op, lambda x, y, f=f: f(x, 0, CHOICE[:2], y), data(3, 4, 2), data(2, 4, 2), label="matrices")
    call(op, lambda x, y, f=f: f(x, 1, CHOICE[:2], y), X, data(3, 2), label="columns")
    call(op, lambda x, y, f=f: f(x, 1, CHOICE[:2], y), data(2, 4, 3), data(2, 2, 3), label="places of heads")
    call(op, lambda x, f=f: f(x, 0, CHOICE[:2], numbers(2, 4)), X, label="constants")
    if not op.endswith("_"):
        call(op, lambda y, f=f: f(torch.zeros(3, 4).double(), 0, CHOICE[:2], y), data(2, 4), label="into zeros")
call("index_fill", lambda x: aten.index_fill(x, 0, CHOICE[:1], 0.5), X)
call("index_fill", lambda x: aten.index_fill(x, 0, CHOICE[:1], 0.0), X, label="zeros")
call("select_scatter", lambda x, y: aten.select_scatter(x, y, 0, 1), X, data(4))
call("select_scatter", lambda x, y: aten.select_scatter(x, y, 1, 1), X, data(3), label="a column")
call("select_scatter", lambda y: aten.select_scatter(torch.zeros(3, 4).double(), y, 0, 1), data(4), label="of zeros")
call("select_scatter", lambda y: aten.select_scatter(numbers(3, 4), y, 0, 1), data(4), label="of constants")
call("select_scatter", lambda y: aten.select_scatter(ones(3, 4), y, 0, 1), data(4), label="of ones")
call("select_scatter", lambda x, y: aten.select_scatter(x, y, 2, -1), data(2, 4, 3), data(2, 4), label="the last")

# Constants that are the same along an axis --------------------------------------------------------------------------

call("matmul", lambda x: x @ ones(4, 3), X, label="ones")
call("cat", lambda x: torch.cat([x, ones(3, 2)], -1), X, label="ones")
call("layer_norm", lambda x: aten.layer_norm(x, [4], ones(4), ones(4)), X, label="ones")
call("conv1d", lambda x: aten.conv1d(x, ones(4, 1, 2), None, [1], [0], [1], 4), data(2, 4, 5), label="ones")
call("where", lambda x, y: torch.where(y[:, :1] > 0, x, ones(3, 4)), X, data(3, 4), label="ones")
call("cdist", lambda x: torch.cdist(x, ones(2, 4)), X, label="ones")
call("slice_scatter", lambda x: aten.slice_scatter(ones(5, 4), x, 0, 1, 4), X, label="among ones")
