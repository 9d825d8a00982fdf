"""Steepest descent for matrices: every singular direction of the gradient goes equally far.

A step is the polar factor of the momentum, the direction that lowers the loss most among all of its spectral norm
(Carlson et al. 2015; Bernstein & Newhouse, arXiv 2409.20325; with momentum and the polynomial below: Jordan et al.,
"Muon", 2024). In a Lie algebra it turns all planes by the same angle and commutes with every change of basis, where a
rate for each coordinate would depend on the very basis that is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""a, b, c of x ↦ ax + bx³ + cx⁵, which takes singular values from 0.002 on close to one (Muon, Jordan 2024)."""
_TIMES = 6
"""How often it is applied: one time more than in Muon reaches smaller singular values."""


def even(m: Tensor) -> Tensor:
    """About the polar factor of m [*, n, k]: the same singular vectors, and values that are zero or near one.

    An odd polynomial, iterated: m stays in every algebra that is closed under x ↦ x xᵀ x, and all of ours are.
    """
    if m.shape[-2] > m.shape[-1]:  # the smaller of both squares
        return even(m.mT).mT
    a, b, c = _POLYNOMIAL
    x = m / m.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30)
    for _ in range(_TIMES):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


def as_matrices(weight: Tensor) -> Tensor:
    """[*, n, k]: a vector is one row, three axes are a stack of matrices (experts), a kernel has a row per output."""
    if weight.ndim < 2:
        return weight.reshape(1, -1)
    return weight.flatten(1) if weight.ndim > 3 else weight


class Steepest(torch.optim.Optimizer):
    """Steps of spectral norm `lr`, about, against the momentum of the gradient one step ahead (Nesterov).

    Args:
        least: the size of the entries of a gradient below which steps get shorter: rounding alone moves little.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.0,
        momentum: float = 0.9,
        least: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "least": least})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            keep = group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - keep)
                ahead = torch.lerp(parameter.grad, mean, keep)
                size = float(ahead.square().mean().sqrt())
                held = size / (size + group["least"]) if size else 0.0
                parameter.sub_(even(ahead), alpha=group["lr"] * held)
