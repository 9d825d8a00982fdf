"""Cross matrices: how well each coordinate of B fits each coordinate of A, summed over all weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hf_align.symmetry.action import Elements, occurrences
from hf_align.symmetry.elements import Power
from hf_align.symmetry.spec import SymmetrySpec

Weights = Mapping[str, Tensor]


def cross(
    spec: SymmetrySpec, space: str, a: Weights, b: Weights, elements: Elements, only: Iterable[str] | None = None
) -> dict[Power, Tensor]:
    """M[a, b] = Σ A[a, ·] B[b, ·] over every weight that carries the space, by power of the action.

    Args:
        elements: what already acts on B; the space itself stands still where it is compared.
        only: the parameters to sum over; by default all that carry the space.

    Returns:
        power -> [*index, n, n] float64.
    """
    total: dict[Power, Tensor] = {}
    for name in spec.uses(space) if only is None else only:
        rows_a = occurrences(a[name], name, spec, space)
        rows_b = occurrences(b[name], name, spec, space, elements)
        for (power, x), (_, y) in zip(rows_a, rows_b, strict=True):
            total[power] = total.get(power, torch.zeros((), dtype=torch.float64)) + (x @ y.mT).double()
    return total


def inner_product(spec: SymmetrySpec, a: Weights, b: Weights, elements: Elements) -> float:
    """⟨A, gB⟩ over all weights: the objective of weight matching."""
    from hf_align.symmetry.action import act

    return sum(float((a[n] * act(b[n], n, spec, elements)).sum()) for n in spec.parameters)
