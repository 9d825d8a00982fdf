"""Linear interpolation in numpy, bit for bit as torch's `lerp` has it.

torch adds the product in one rounding, by an instruction that numpy does not have (IEEE 754-2019, 5.4.1,
fusedMultiplyAdd). Where the product is exact that is no other; elsewhere it is computed with twice the precision, of
which the last bit is rounded to odd, so that to round again does no harm (Boldo and Melquiond, IEEE Transactions on
Computers 57(4), 2008, theorem 3).
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hf_align.checkpoints.floats import Floats

Doubles = NDArray[np.float64]

_TIE = (1 << 29, 1 << 28)
"""The bits that a float64 has more than a float32: the modulus, and what is left half way between two of those."""
_LARGE, _SMALL = 2.0**900, 2.0**-900
"""Of float64 outside this, products of halves overflow or lose bits."""


def lerp(a: Floats, b: Floats, weight: float) -> Floats:
    """(1 - t) a + t b, from the end that is nearer.

    Args:
        a, b: of one dtype, float32 or float64, and shape.
        weight: t, which is rounded to that dtype.
    """
    t = float(a.dtype.type(weight))
    with np.errstate(all="ignore"):  # the caller looks for what is not finite
        # t - 1 is exact: t is at least a half.
        return _fused(t, b - a, a) if abs(t) < 0.5 else _fused(t - 1, b - a, b)


def _fused(factor: float, step: Floats, start: Floats) -> Floats:
    """factor · step + start, rounded once; factor is a number of their dtype."""
    if _is_exact(factor, step):
        product = step * step.dtype.type(factor)
        product += start
        return product
    if step.dtype == np.float32:
        return _fused_single(factor, step, start)
    return _fused_double(factor, step.astype(np.float64), start.astype(np.float64))


def _is_exact(factor: float, step: Floats) -> bool:
    """Whether no product is rounded: by a power of two only those are that fall below the normal numbers."""
    if factor == 0:
        return True
    return abs(math.frexp(factor)[0]) == 0.5 and _least(step) * abs(factor) >= float(np.finfo(step.dtype).tiny)


def _least(entries: Floats) -> float:
    """The least magnitude but zero; infinity without one."""
    unsigned: np.dtype[np.unsignedinteger] = np.dtype(f"uint{8 * entries.itemsize}")
    bits = entries.view(unsigned) << 1
    bits -= 1  # zero becomes the largest
    least = (bits.min(initial=np.iinfo(unsigned).max, keepdims=True) + 1) >> 1
    return float(least.view(entries.dtype)[0]) or math.inf


def _fused_single(factor: float, step: Floats, start: Floats) -> Floats:
    product = step.astype(np.float64)
    product *= factor  # exact: 48 bits of 53
    total = product + start
    at = _ties(total)
    total[at] = _to_odd(product[at], start[at].astype(np.float64))
    return total.astype(np.float32)


def _ties(total: Doubles) -> NDArray[np.intp]:
    """Where one may be half way between two float32 only because it is rounded."""
    modulus, half = _TIE
    left = total.view(np.int64) & (modulus - 1)
    found = left == half
    if _least(total) < (tiny := float(np.finfo(np.float32).tiny)):
        found |= np.abs(total) < tiny
    return np.flatnonzero(found)


def _fused_double(factor: float, step: Doubles, start: Doubles) -> Doubles:
    """Boldo and Melquiond, figure 5; entry by entry in fractions where halves of the product would be lost."""
    high, low = _product(factor, step)
    mid, rest = _sum(start, low)
    top, bottom = _sum(high, mid)
    found = top + _to_odd(rest, bottom)
    safe = (np.abs(step) < _LARGE) & (np.abs(start) < _LARGE) & ((np.abs(high) > _SMALL) | (step == 0))
    for at in np.flatnonzero(~safe):
        found[at] = _exactly(factor, float(step[at]), float(start[at]))
    return found


def _exactly(factor: float, step: float, start: float) -> float:
    if not (math.isfinite(step) and math.isfinite(start)):
        return factor * step + start
    try:
        return float(Fraction(factor) * Fraction(step) + Fraction(start))
    except OverflowError:
        return math.inf


def _to_odd(x: Doubles, y: Doubles) -> Doubles:
    """The sum; where it is not exact, the one of its two neighbours whose last bit is set."""
    total, error = _sum(x, y)
    even = (error != 0) & (total.view(np.int64) & 1 == 0) & np.isfinite(total)
    return np.where(even, np.nextafter(total, np.copysign(np.inf, error)), total)


def _sum(x: Doubles, y: Doubles) -> tuple[Doubles, Doubles]:
    """The sum and what it was rounded by (Knuth, TAOCP 2, 4.2.2, theorem B)."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


def _product(x: float, y: Doubles) -> tuple[Doubles, Doubles]:
    """The product and what it was rounded by (Dekker, Numerische Mathematik 18, 1971)."""
    total = x * y
    (x1, x2), (y1, y2) = _halves(np.full_like(y, x)), _halves(y)
    return total, ((x1 * y1 - total) + x1 * y2 + x2 * y1) + x2 * y2


def _halves(x: Doubles) -> tuple[Doubles, Doubles]:
    high = 134217729.0 * x
    high = high - (high - x)
    return high, x - high
