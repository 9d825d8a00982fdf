"""Stored floating point numbers as numpy can compute with them, and back; what it has no dtype for is moved by bits."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hf_align.checkpoints.dtypes import BF16, F16, F32, F64, Dtype, Raw
from hf_align.errors import CheckpointError

Floats: TypeAlias = NDArray[np.float32] | NDArray[np.float64]

_UNSIGNED = {size: np.dtype(f"uint{8 * size}") for size in (2, 4, 8)}
_INFINITE = {F64: 0x7FF << 52, F32: 0xFF << 23, F16: 0x1F << 10, BF16: 0xFF << 7}
"""The bits of infinity: those of NaN are more, sign aside, and those of all finite numbers less."""


def widened(raw: Raw, dtype: Dtype) -> Floats:
    """Entries as they are stored, as float32 (float64 stays); nothing is rounded."""
    if dtype == BF16:
        bits = raw.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    entries = raw.view(dtype.bits)
    return entries.astype(np.float64) if dtype == F64 else entries.astype(np.float32)


def rounded(entries: Floats, dtype: Dtype) -> Raw:
    """Entries as they are stored in a dtype, rounded to the nearest, of two the even one.

    As in torch, what is narrower than float32 is rounded from it, so from float64 twice.
    """
    with np.errstate(all="ignore"):  # the caller looks for what is not finite
        if dtype == F64:
            return entries.astype(np.float64, copy=False).view(np.uint8)
        single = entries.astype(np.float32, copy=False)
        if dtype == F16:
            return single.astype(np.float16).view(np.uint8)
    return (_bfloat16(single) if dtype == BF16 else single).view(np.uint8)


def _bfloat16(single: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of the bits, one more where the lower half is more than a half, or a half and the upper odd."""
    bits = single.view(np.uint32)
    upper = bits >> 16
    upper &= 1
    upper += 0x7FFF
    upper += bits
    upper >>= 16
    found = upper.astype(np.uint16)
    if np.isnan(single.max(initial=0)):  # the addition carries some into the sign
        found[np.isnan(single)] = 0x7FC0
    return found


def is_finite(raw: Raw, dtype: Dtype) -> bool:
    """Whether no entry is NaN or infinite."""
    unsigned = raw.view(_UNSIGNED[dtype.itemsize])
    return bool((unsigned << 1).max(initial=0) < _INFINITE[dtype] << 1)


def require_finite(name: str, raw: Raw, dtype: Dtype, origin: str) -> None:
    """See that all entries are finite.

    Raises:
        CheckpointError: there are NaN or infinite ones.
    """
    if not is_finite(raw, dtype):
        raise CheckpointError(f"{name} in {origin} has NaN or infinite entries; this checkpoint is damaged")
