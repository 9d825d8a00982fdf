"""Maps that are fixed and linear along some axes: Fourier transforms, and windows added up to an image."""

from __future__ import annotations

from hf_align.symmetry.bounds import FIXED
from hf_align.symmetry.interpreter import Call, Value, rule
from hf_align.symmetry.rules.views import dims_of
from hf_align.symmetry.spaces import fresh, split_product


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
