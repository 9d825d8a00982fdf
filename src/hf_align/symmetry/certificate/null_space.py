"""Null spaces of Jacobians: of orthonormal directions, which have no effect but what rounding leaves."""

from __future__ import annotations

from collections.abc import Sequence

import scipy.linalg
import torch
from torch import Generator, Tensor

_CLEAR = 1e-10
"""Far above the rounding of zero, relative to the largest of the spectrum."""
_FAR_ABOVE = 180
"""Times zero: what is larger is an effect, however wide the gap above it, as where slow sinusoids hardly tell positions
apart (2e-10 of the largest was seen); rounding has left 1.7e-10 of none at ill-conditioned weights."""
_LEAST = 1e-17
"""Of the longest column's squared length: what rounding leaves of zero in float64, squared."""
_ITERATIONS = 2
"""Of inverse iteration, once and again: each divides what is left of other directions by the square of their gap."""
_CERTAIN = 1e-13
"""Relative to the largest of the spectrum: where a whole block is smaller, no other direction is left in it."""
_ROUNDED = 1e-15
"""Relative to the largest of the spectrum, what rounding leaves of zero: gaps below that say nothing."""
_PANEL = 32
"""Columns that a QR decomposition takes at once."""
_SEEN = 1e-6
"""Of the largest effect: a smaller one may be what rounding has mixed into a null direction, of one that others hardly
see."""
_BLOCK = 32
"""Directions that inverse iteration looks at together."""
_WIDE = 20.0
"""A gap in a part of the spectrum that is taken for the one above zero, whatever lies above that part."""
_LARGE_BLOCK = 256
"""As many more, as long as all of them turn out to be null."""


def missing_directions(jacobian: Tensor, known: Tensor) -> Tensor:
    """The null directions that are orthogonal to the known ones.

    Zero is below the widest gap in the spectrum. No whole spectrum is needed: with the known directions made long, the
    smallest singular values are those of the others, and inverse iteration finds them.

    Args:
        known: null directions, orthonormal, [known, parameters].

    Returns:
        orthonormal, [missing, parameters].
    """
    rows = torch.cat([jacobian, jacobian.norm() * known])
    short = rows.shape[1] - rows.shape[0]
    factor = torch.linalg.qr(torch.cat([rows, rows.new_zeros(max(short, 0), rows.shape[1])]), mode="r")[1]
    length = factor.norm()
    least = _LEAST * length
    # What rounding leaves of zero: without it, small values would be cut off where the known are the only zeros.
    zero = torch.cat([(jacobian @ known.T).norm(dim=0), least[None]]).max()
    factor.diagonal().copy_(torch.where(factor.diagonal().abs() < least, least, factor.diagonal()))
    found, wanted = known[:0], _BLOCK
    while True:
        null, values = _smallest(factor, min(wanted, len(factor)))
        if values[-1] > _CLEAR * length:
            return found
        above = _above_zero(values, zero, length)
        if above is None and wanted < min(_LARGE_BLOCK, len(factor)):
            wanted = _LARGE_BLOCK
            continue
        null = null[above or 0 :]
        found = torch.cat([found, null])
        if not len(null) or len(found) >= len(factor):
            return found
        # Also where some of the block are not null: of many null directions, rounding may leave it only a part.
        factor = _with_rows(factor, length * null)
        wanted = wanted if above else _LARGE_BLOCK


def _above_zero(values: Tensor, zero: Tensor, length: Tensor) -> int | None:
    """How many of the smallest singular values are above zero; None where the widest gap may be above all of them.

    Args:
        values: descending.
        zero: what rounding leaves of it at least, [].
        length: of the matrix, [].
    """
    above = rank(torch.cat([length[None], values, zero[None]])) - 1
    if above or not _CERTAIN * length < values[0] < _SEEN * length:
        return above
    gaps = values / torch.cat([values[1:], zero[None]]).clamp_min(_ROUNDED * length)
    return int(gaps.argmax()) + 1 if gaps.max() > _WIDE else None


def are_null(directions: Tensor, jacobian: Tensor) -> bool:
    """Whether a move along directions of unit length changes no output."""
    return float((jacobian @ directions.T).norm()) < _CLEAR * float(jacobian.norm())


def without_effect(directions: Tensor, effects: Sequence[Tensor], *, zero: float) -> Tensor:
    """What of some orthonormal directions moves no output.

    Args:
        effects: Jacobians, at one point or at several, [outputs, parameters].
        zero: what rounding may leave of an effect that is none, relative to the largest; counted among the sizes of the
            effects, for where all directions have one, the widest gap is the one above zero.
    """
    sizes, basis = _effects(directions, effects)
    one = torch.ones(1).to(sizes)
    above = rank(torch.cat([one, sizes.clamp_min(zero), zero * one])) - 1
    return basis[max(above, int((sizes > _FAR_ABOVE * zero).sum())) :] @ directions


def are_hardly_seen(directions: Tensor, effects: Sequence[Tensor], *, zero: float) -> bool:
    """Whether some of what orthonormal directions do is more than rounding, and so little that it may come of rounding
    in the directions themselves.

    Args:
        effects: as in `without_effect`.
        zero: as there.
    """
    sizes = _effects(directions, effects)[0]
    return bool(((zero < sizes) & (sizes < _SEEN)).any())


def _effects(directions: Tensor, effects: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sizes of what orthonormal directions do, descending, and the combinations of them that do it, in rows."""
    seen = torch.cat([rows @ directions.T / (rows.norm() or 1) for rows in effects])
    return _singular(torch.linalg.qr(seen, mode="r")[1])


def as_few_rows(rows: Tensor) -> Tensor:
    """No more rows than columns, which show the same of every direction: the triangular factor."""
    return torch.linalg.qr(rows, mode="r")[1] if len(rows) > rows.shape[1] else rows


def _with_rows(factor: Tensor, rows: Tensor) -> Tensor:
    """The triangular factor of a matrix that has more rows, from the one without them."""
    return torch.from_numpy(scipy.linalg.lapack.dtpqrt(0, min(_PANEL, len(factor)), factor.numpy(), rows.numpy())[0])


def _smallest(factor: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The right singular vectors of the smallest singular values, [count, parameters], and these, descending."""
    block = torch.randn(len(factor), count, generator=Generator().manual_seed(0), dtype=factor.dtype)
    for _ in range(2):
        for _ in range(_ITERATIONS if count < len(factor) else 0):
            block = torch.linalg.solve_triangular(factor.T, torch.linalg.qr(block)[0], upper=False)
            block = torch.linalg.solve_triangular(factor, torch.linalg.qr(block)[0], upper=True)
        basis = torch.linalg.qr(block)[0]
        values, vectors = _singular(factor @ basis)
        if count == len(factor) or values[0] < _CERTAIN * factor.norm():
            break
    return vectors @ basis.T, values


def null_space(jacobian: Tensor) -> Tensor:
    """Orthonormal null directions, [nullity, parameters]."""
    s, vh = _singular(torch.linalg.qr(jacobian, mode="r")[1])
    return vh[rank(s) :]


def _singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The singular values, descending, and all right singular vectors, in rows.

    Divide and conquer need not converge where many values are the same; the older algorithm is slower, and does.
    """
    rows = torch.cat([matrix, matrix.new_zeros(max(0, matrix.shape[1] - len(matrix)), matrix.shape[1])])
    try:
        return torch.linalg.svd(rows, full_matrices=False)[1:]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        _, values, vectors = scipy.linalg.svd(rows.numpy(), full_matrices=False, lapack_driver="gesvd")
        return torch.from_numpy(values), torch.from_numpy(vectors)


def rank(singular_values: Tensor) -> int:
    """How many of some values, in descending order, are above the widest gap that lies below 1e-6 of the largest."""
    if not len(singular_values):
        return 0
    s = (singular_values / singular_values[0]).clamp_min(1e-17)
    ratios = torch.where(s[1:] < 1e-6, s[:-1] / s[1:], torch.zeros_like(s[1:]))
    return int(ratios.argmax()) + 1 if ratios.any() else len(s)
