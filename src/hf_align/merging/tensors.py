"""Merging two tensors that share a basis, by nothing but their entries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TensorMethod = Callable[[Tensor, Tensor, float], Tensor]


def linear(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """(1-t)·a + t·b, t the weight of b; any shape, one float dtype."""
    return torch.lerp(a, b, weight)


def slerp(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """Along the great circle between the directions of a and b, with lengths mixed linearly (Shoemake 1985)."""
    norm_a, norm_b = a.norm(), b.norm()
    if norm_a == 0 or norm_b == 0:
        return linear(a, b, weight)
    cosine = float((a * b).sum() / (norm_a * norm_b))
    angle = torch.arccos(torch.tensor(cosine).clamp(-1, 1))
    if float(angle.sin()) < 1e-4:
        return linear(a, b, weight)
    mixed = ((1 - weight) * angle).sin() * a / norm_a + (weight * angle).sin() * b / norm_b
    length = (1 - weight) * norm_a + weight * norm_b
    return mixed / angle.sin() * length


TENSORWISE: dict[str, TensorMethod] = {"linear": linear, "slerp": slerp}
ELEMENTWISE = frozenset({"linear"})
"""Methods that look at one entry at a time, so that a tensor can be mixed in slices."""
