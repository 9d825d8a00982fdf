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


def greedy_signs(matrices: Cross, free: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
    """Signs [k, *shape] of each entry of M_p [*shape] under which Σ_p Π_k sign_k^p_k M_p is large, and that sum.

    The heaviest M_p become positive, as long as their exponents are independent of each other modulo 2; these decide
    all signs (the greedy algorithm of a matroid: exact where all are independent). A scale that is not free keeps its
    sign. Scales have exponentially many choices of signs, so those of a chain of convolutions cannot all be tried.
    """
    heaviest = sorted(matrices, key=lambda power: -float(matrices[power].abs().sum()))
    solved: dict[int, tuple[set[int], Tensor]] = {}
    for power in heaviest:
        odd, negative = {k for k, may in enumerate(free) if may and power[k] % 2}, matrices[power] < 0
        for pivot, (scales, before) in solved.items():
            if pivot in odd:
                odd, negative = odd ^ scales, negative ^ before
        if odd:
            solved[min(odd)] = odd, negative
    signs = [torch.ones_like(matrices[heaviest[0]]) for _ in free]
    for pivot, (scales, negative) in reversed(solved.items()):
        signs[pivot] = math.prod((signs[k] for k in scales - {pivot}), start=torch.where(negative, -1.0, 1.0).double())
    total = torch.zeros_like(signs[0])
    for power, matrix in matrices.items():
        total += math.prod((signs[k] for k, exponent in enumerate(power) if exponent % 2), start=matrix)
    return torch.stack(signs), total


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
    orders = [_assign(matrix) for matrix in gain.reshape(-1, *gain.shape[-2:])]
    return torch.stack(orders).reshape(gain.shape[:-1])


def _assign(gain: Tensor) -> Tensor:
    """The best order [n]; where the largest gain of each row is in a column of its own, as in models that are alike,
    none can be better."""
    largest = gain.argmax(-1)
    if len(largest.unique()) == len(largest):
        return largest
    return torch.from_numpy(linear_sum_assignment(gain.cpu().numpy(), maximize=True)[1]).to(gain.device)
