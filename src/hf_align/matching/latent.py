"""Elements with a gradient: what learned matching moves.

A continuous group is walked along its exponential map: at every step the gradient is taken in the Lie algebra at the
present element g, and the step ξ leads to exp(ξ) g (a Riemannian step with the exponential as retraction; Absil,
Mahony & Sepulchre 2008, section 4.1). Nothing is differentiated but the identity chart, so an orthogonal map of any
size costs one matrix exponential a step and no backward pass through it.

A permutation is the assignment nearest to a latent matrix Z; its gradient is passed on to Z as if the assignment were
the identity (straight through; Theus et al., arXiv 2506.22712, algorithm 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_align.matching.descent import Moving
from hf_align.runtime.devices import as_double
from hf_align.symmetry.elements import DUAL, PRIMAL, Element, Matrix, Monomial, Power
from hf_align.symmetry.groups import Group, ScaledPermutation, assign


@dataclass(frozen=True)
class Pair(Matrix):
    """A dense map [*index, n, n] with its inverse transpose at hand, so that neither is inverted under a gradient."""

    inverse_transpose: Tensor

    def as_matrix(self, power: Power = PRIMAL) -> Tensor:
        return self.inverse_transpose if power == DUAL else super().as_matrix(power)


@dataclass(frozen=True)
class Blend(Monomial):
    """A monomial element whose order has a gradient: `weights` [*index, n, n] equals the permutation in value, or is
    any other mixture of the entries."""

    weights: Tensor

    def act(self, tensor: Tensor, power: Power) -> Tensor:
        return Matrix(self.factors(power)[..., None] * self.weights).act(tensor, PRIMAL)


class Latent(Moving, ABC):
    """An element that moves.

    Attributes:
        turns: what an optimiser moves along a group of matrices: members of the Lie algebra, zero between steps.
        stretches: the same for logarithms of factors.
        choices: what it moves freely: latent matrices of permutations.
    """

    turns: tuple[Tensor, ...] = ()
    stretches: tuple[Tensor, ...] = ()
    choices: tuple[Tensor, ...] = ()

    @abstractmethod
    def element(self) -> Element:
        """The present element, differentiable by all that moves."""

    @abstractmethod
    def retract(self) -> None:
        """Move to where the optimiser's step points; no gradient."""

    @abstractmethod
    def resolved(self, group: Group) -> Element:
        """The present element in float64, on the group to rounding."""


class Turning(Latent):
    """An element of a dense group, [*index, n, n].

    Args:
        stretching: how far a step goes that stretches, for one that turns.
    """

    kept = ("_primal", "_dual")

    def __init__(self, group: Group, start: Element, device: torch.device, stretching: float = 1.0) -> None:
        self._group, self._stretching = group, stretching
        self._primal = start.as_matrix().to(device, torch.float32)
        self._dual = start.as_matrix(DUAL).to(device, torch.float32)
        self._step = torch.zeros_like(self._primal, requires_grad=True)
        self.turns = (self._step,)

    def element(self) -> Pair:
        step = self._group.algebra(self._step)
        return Pair(self._primal + step @ self._primal, self._dual - step.mT @ self._dual)

    @torch.no_grad()
    def retract(self) -> None:
        """The dual is computed anew: a product of all steps would, rounded, soon be the inverse of nothing."""
        step = self._group.algebra(self._step)
        turn, stretch = (step - step.mT) / 2, (step + step.mT) / 2
        self._primal = torch.matrix_exp(turn + self._stretching * stretch) @ self._primal
        gauge = self._group.has_gauge
        self._dual = torch.linalg.inv(as_double(self._primal)).mT.to(self._primal) if gauge else self._primal
        self._step.zero_()

    def resolved(self, group: Group) -> Element:
        matrix = Matrix(self._primal.cpu().double())
        return matrix if group.has_gauge else group.nearest({PRIMAL: matrix.matrix})


class Stretching(Latent):
    """A monomial element whose factors [*index, k, n] move by their logarithms, and whose order stands still."""

    kept: ClassVar[tuple[str, ...]] = ("_scale",)

    def __init__(self, group: ScaledPermutation, start: Monomial, device: torch.device) -> None:
        self._group = group
        self._order = start.order.to(device)
        self._scale = start.scale.to(device, torch.float32)
        self._step = torch.zeros_like(self._scale, requires_grad=True)
        self.stretches = (self._step,) if group.continuous else ()

    def element(self) -> Monomial:
        return Monomial(self._order, self._scale * self._group.algebra(self._step).exp())

    @torch.no_grad()
    def retract(self) -> None:
        self._scale = self._scale * self._group.algebra(self._step).exp()
        self._step.zero_()

    def resolved(self, group: Group) -> Monomial:
        return Monomial(self._order.cpu(), self._scale.cpu().double())


class Arranging(Stretching):
    """A monomial element whose order moves as well, by the latent matrix [*index, n, n].

    Attributes:
        margin: by how much the latent matrix favours the start: how soon a gradient moves an entry.
    """

    margin: ClassVar[float] = 0.05
    kept = ("_scale", "_order", "_latent")

    def __init__(self, group: ScaledPermutation, start: Monomial, device: torch.device) -> None:
        super().__init__(group, start, device)
        one = Monomial.permutation(start.order).as_matrix().to(device, torch.float32)
        self._latent = (self.margin * one).requires_grad_()
        self.choices = (self._latent,)

    def element(self) -> Blend:
        moved = super().element()
        hard = torch.nn.functional.one_hot(moved.order, moved.order.shape[-1]).to(self._latent)
        return Blend(moved.order, moved.scale, hard + self._latent - self._latent.detach())

    @torch.no_grad()
    def retract(self) -> None:
        """The factors were learned for entries of B, and go where the new order takes these."""
        super().retract()
        before, self._order = self._order, assign(self._latent)
        came_from = before.argsort(-1).gather(-1, self._order)
        self._scale = torch.take_along_dim(self._scale, came_from.unsqueeze(-2), -1)
