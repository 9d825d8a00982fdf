"""Functions of matrices: the nearest orthogonal one, and the gauge in which two Grams are equal."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGE, _MOST_STEPS = 512, 30
"""The size from which Newton's iteration is tried before an SVD, and its steps at most."""
_NEARLY = 1e-4
"""The change of Newton's iteration after which two more squarings of the error are float64's rounding."""
_RANK = 1e-10
"""Below which an eigenvalue of a Gram matrix of size one is zero: weights of float32 are rounded by 6e-8."""


def polar(m: Tensor) -> Tensor:
    """The orthogonal matrix nearest to m [*, n, n]: U Vᵀ of its singular value decomposition.

    A large one by Newton's iteration X ← (γX + X⁻ᵀ/γ)/2 with scaling γ (Higham, SIAM J. Sci. Stat. Comput. 7, 1986),
    which takes a half to a quarter of the time and as much for any spectrum; where it finds no inverse, by the
    decomposition.
    """
    if m.dim() == 2 and len(m) >= _LARGE and (found := _newton(m)) is not None:
        return found
    u, _, vh = torch.linalg.svd(m)
    return u @ vh


def _newton(m: Tensor) -> Tensor | None:
    x = m
    for step in range(_MOST_STEPS):
        inverse, singular = torch.linalg.inv_ex(x)
        if singular or not torch.isfinite(inverse).all():
            return None
        # By then convergence is quadratic, and scaling would only disturb it.
        scale = float(_size(inverse) / _size(x)) ** 0.5 if step < 6 else 1.0
        before, x = x, (scale * x + inverse.mT / scale) / 2
        # A change of δ leaves an error of δ²/2, and the last step squares it once more.
        if torch.linalg.norm(x - before) <= _NEARLY * torch.linalg.norm(x):
            return x @ (1.5 * torch.eye(len(x)).to(x) - 0.5 * x.mT @ x)
    return None


def _size(m: Tensor) -> Tensor:
    """A cheap estimate of the spectral norm: √(‖m‖₁ ‖m‖∞)."""
    return (torch.linalg.matrix_norm(m, 1) * torch.linalg.matrix_norm(m, math.inf)).sqrt()


def geometric_mean_gauge(primal: Tensor, dual: Tensor) -> Tensor:
    """The positive g with g P g = g⁻¹ D g⁻¹, for Gram matrices P, D [*, n, n]: g² = P⁻¹ # D.

    There is one where both have full rank. What only one of them has could be scaled down for ever, turn after turn: in
    directions in which P is zero, or D is among the others, g only brings both to one size.
    """
    if not primal.shape[-1]:
        return primal
    grams = [_of_size_one(m) for m in (primal, dual)]
    for at in (0, 1):
        seen = _support(grams[at])
        grams = [seen @ m @ seen for m in grams]
    ratio = torch.linalg.matrix_norm(seen @ dual @ seen, keepdim=True)
    ratio = ratio / torch.linalg.matrix_norm(seen @ primal @ seen, keepdim=True).where(ratio > 0, 1.0)
    rest = torch.eye(primal.shape[-1]).to(seen) - seen
    p, d = (_of_size_one(m) + rest for m in grams)
    root, inverse_root = _symmetric_power(p, 0.5), _symmetric_power(p, -0.5)
    squared = inverse_root @ _symmetric_power(root @ d @ root, 0.5) @ inverse_root
    return _symmetric_power(squared, 0.5) * ratio.where(ratio > 0, 1.0) ** 0.25


def _of_size_one(m: Tensor) -> Tensor:
    size = torch.linalg.matrix_norm(m, keepdim=True)
    return m / size.where(size > 0, 1.0)


def _support(gram: Tensor) -> Tensor:
    """The projector [*, n, n] to all directions in which a Gram matrix of size one is not zero."""
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * (values > _RANK).unsqueeze(-2)) @ vectors.mH


def _symmetric_power(m: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(m)
    floor = 1e-12 * values.amax(-1, keepdim=True).abs().clamp_min(1e-300)
    return (vectors * values.clamp_min(floor).unsqueeze(-2) ** power) @ vectors.mH
