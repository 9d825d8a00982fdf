"""Ops that are fixed along some axes: windows, diagonals, Fourier transforms. The order along these is pinned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.interpreter.bounds import FIXED
from hf_align.symmetry.interpreter.call import Call, rule, rule_for_numbers
from hf_align.symmetry.interpreter.spaces import SpaceMismatchError, fresh, product, split_product
from hf_align.symmetry.interpreter.values import Value
from hf_align.symmetry.rules.views import dims_of, rearranged
from hf_align.tracing.ops import Trait, runs


@rule_for_numbers("roll", harmless="shifts", traits=Trait.ROLLS)
@rule_for_numbers("flip")
def moved_along(call: Call) -> Value:
    """y_i = x_π(i) with a fixed π."""
    value = call.value(call.argument(0))
    moved = dims_of(call.argument("dims") or None, len(value.axes))
    call.mixes(value, moved)
    call.lower_all((value.axes[i] for i in moved), FIXED, "order")
    return rearranged(value, value.axes)


@rule("tril", "triu", harmless="diagonal")
def triangle(call: Call) -> Value:
    """y_ij = x_ij for i ≥ j, else 0 (or the reverse)."""
    value = call.value(call.argument(0))
    call.lower_all(value.axes[-2:], FIXED, "triangle")
    return Value(value.axes)


@rule_for_numbers("unfold", harmless="size step")
def unfold(call: Call) -> Value:
    """y_…i…k = x_…(i·step + k): windows along one axis."""
    value = call.value(call.argument(0))
    axes = list(value.axes)
    dim = call.argument(1) % len(axes)
    call.lower(axes[dim], FIXED, "windows")
    axes[dim] = fresh(call.shape[dim], FIXED)
    return rearranged(value, [*axes, fresh(call.shape[-1], FIXED)])


@rule_for_numbers("as_strided", harmless="size stride storage_offset")
def strided(call: Call) -> Value:
    """y_j = x_π(j), π fixed by the places in memory: an axis of y that steps along one of x alone is that axis."""
    value, places = call.value(call.argument(0)), places_shown(call.node)
    if bool((places < 0).any()):
        raise SpaceMismatchError("memory that the operand does not show")
    sizes = [a.size for a in value.axes]
    found = torch.unravel_index(places, sizes)
    passed = {k: i for k, n in enumerate(call.shape) for i, m in enumerate(sizes)
              if n == m > 1 and _steps_along(found, i, k)}  # fmt: skip
    call.lower_all((a for i, a in enumerate(value.axes) if i not in passed.values()), FIXED, "windows")
    return rearranged(value, (value.axes[passed[k]] if k in passed else fresh(n, FIXED)
                              for k, n in enumerate(call.shape)))  # fmt: skip


@runs("as_strided")
def _by_places(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The operand may lie in memory otherwise than it was traced."""
    places = places_shown(node)
    return node.target(*args, **kwargs) if bool((places < 0).any()) else args[0].reshape(-1)[places]  # type: ignore[operator]


def places_shown(node: fx.Node) -> Tensor:
    """Of `as_strided`, where in the operand each entry of the result stands, counted in row-major order; -1 if
    nowhere."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    laid_out: Tensor = operand.meta["val"]
    size, stride, *start = node.args[1:]
    behind = sum((n - 1) * s for n, s in zip(laid_out.shape, laid_out.stride(), strict=True)) + 1
    memory = torch.full((behind,), -1)
    memory.as_strided(laid_out.shape, laid_out.stride()).copy_(torch.arange(laid_out.numel()).reshape(laid_out.shape))
    first = start[0] - int(laid_out.storage_offset()) if start and isinstance(start[0], int) else 0
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))  # type: ignore[arg-type]
    if first < 0 or last >= behind:
        return torch.full(size, -1)  # type: ignore[arg-type]
    return memory.as_strided(size, stride, first)  # type: ignore[arg-type]


def _steps_along(found: Sequence[Tensor], i: int, k: int) -> bool:
    """Whether a step along axis k of the result is one along axis i of the operand, from end to end."""
    steps = torch.arange(found[i].shape[k]).reshape(-1, *[1] * (found[i].dim() - 1 - k))
    alone = all(bool((f == f.narrow(k, 0, 1)).all()) for j, f in enumerate(found) if j != i)
    return alone and bool((found[i] == steps).all())


@rule_for_numbers("im2col", harmless="kernel_size dilation padding stride")
def im2col(call: Call) -> Value:
    """y_(ck)p = x_c(p+k): windows of an image, channels outermost."""
    value = call.value(call.argument(0))
    batch, channels = value.axes[:-3], value.axes[-3]
    call.lower_all(value.axes[-2:], FIXED, "windows")
    cells = fresh(call.shape[-2] // channels.size, FIXED)
    return Value((*batch, product([channels, cells]), fresh(call.shape[-1], FIXED)))


@rule("view_as_complex", traits=Trait.LINEAR)
@rule("view_as_real", traits=Trait.LINEAR | Trait.AS_PAIRS)
@rule("real", "imag")
def complex_view(call: Call) -> Value:
    """Pairs of reals as one complex number, and back."""
    axes = call.value(call.argument(0)).axes
    if len(call.shape) < len(axes):
        call.lower(axes[-1], FIXED, "complex")
        return Value(axes[:-1])
    return Value((*axes, *(fresh(n, FIXED) for n in call.shape[len(axes) :])))


@rule_for_numbers("diagonal", harmless="offset dim1 dim2")
def diagonal(call: Call) -> Value:
    """y_i = x_ii."""
    axes = call.value(call.argument(0)).axes
    call.lower_all(axes, FIXED, "diagonal")
    return Value(tuple(fresh(n, FIXED) for n in call.shape))


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn",
      "fft_ifftn", "fft_rfftn", "fft_irfftn", harmless="n s norm")  # fmt: skip
def fourier(call: Call) -> Value:
    """y_k = Σ_n exp(-2πi kn/N) x_n along some axes."""
    value, everywhere = call.value(call.argument(0)), {"n": None, "2": (-2, -1)}
    kind = call.node.target._opname[-1]  # type: ignore[union-attr]
    transformed = dims_of(call.argument("dim", everywhere.get(kind, -1)), len(value.axes))
    call.lower_all((value.axes[i] for i in transformed), FIXED, "Fourier")
    return Value(tuple(fresh(call.shape[i], FIXED) if i in transformed else a for i, a in enumerate(value.axes)))


@rule("col2im", harmless="output_size kernel_size dilation padding stride")
def col2im(call: Call) -> Value:
    """y_c(p+k) += x_(ck)p: windows add up to an image, channels outermost."""
    *batch, columns, places = call.value(call.argument(0)).axes
    channels, cells = split_product(columns, call.shape[-3])
    call.lower_all((cells, places), FIXED, "windows")
    return Value((*batch, channels, *(fresh(n, FIXED) for n in call.shape[-2:])))
