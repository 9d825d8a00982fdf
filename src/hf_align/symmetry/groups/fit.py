"""How well elements fit cross matrices.

A cross matrix M[a, b] = Σ A[a, ·] B[b, ·] compares coordinate a of the target with coordinate b of the source; the
nearest element of a group maximises ⟨g, M⟩, that is, brings gB closest to A. Cross matrices come by power of the
action (primal, dual, permutation only), for a scale moves them differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hf_align.symmetry.elements import Element, Monomial, Power

Cross = Mapping[Power, Tensor]
"""Cross matrices [*index, n, n] float64, by power."""


def summed(cross: Cross) -> Tensor:
    """Σ_p M_p, for groups that act alike by all powers: orthogonal maps."""
    return torch.stack(list(cross.values())).sum(0)


def fit(element: Element, cross: Cross) -> Tensor:
    """⟨g, M⟩ [*index]."""
    if not isinstance(element, Monomial):
        return (element.as_matrix() * summed(cross)).sum((-1, -2))
    return torch.stack([fit_by_entry(element, p, m).sum(-1) for p, m in cross.items()]).sum(0)


def fit_by_entry(element: Monomial, power: Power, matrix: Tensor) -> Tensor:
    """What each entry adds to it [*index, n]."""
    order = element.order.expand(matrix.shape[:-1])
    return element.factors(power) * matrix.gather(-1, order.unsqueeze(-1)).squeeze(-1)


def under_signs(matrices: Cross, signs: tuple[int, ...]) -> Tensor:
    """Σ_p Π_k sign_k^p_k M_p, where the scales have these signs [k]."""
    (power, first), *others = matrices.items()
    total = sign(signs, power) * first
    for power, matrix in others:
        total.add_(matrix, alpha=sign(signs, power))
    return total


def sign(signs: tuple[int, ...], power: Power) -> int:
    """What signs [k] of the scales make of an entry that moves by a power."""
    return math.prod(s ** abs(e) for s, e in zip(signs, power, strict=False))


def assign(gain: Tensor) -> Tensor:
    """The orders [*, n] that maximise the sum of gain[i, order[i]]; gain [*, n, n].

    Raises:
        OverflowError: a gain is not finite.
    """
    if not bool(gain.isfinite().all()):
        raise OverflowError("a gain is not finite")
    flat = gain.reshape(-1, *gain.shape[-2:])
    orders = [torch.from_numpy(linear_sum_assignment(g.cpu().numpy(), maximize=True)[1]) for g in flat]
    return torch.stack(orders).reshape(gain.shape[:-1])
