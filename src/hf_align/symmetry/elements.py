"""Elements of the groups: what is stored in an alignment and applied to weights.

An element may differ over the index set of its space (one matrix per head); then its arrays carry the index axes in
front. `act` moves one tensor axis, `power` says how: (1,) primal, (-1,) dual (g⁻ᵀ). A monomial element may have several
independent scales, and then one exponent for each; (0,) is the permutation alone, and a squared ReLU gives a two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Power = tuple[int, ...]
PRIMAL: Power = (1,)
DUAL: Power = (-1,)
_ISOMETRY = 1e-6
"""Of a matrix of float64 that keeps lengths, how far its rows may be from an orthonormal basis: what is left where it
was found in float32."""


def dual(power: Power) -> Power:
    """The power by which g⁻ᵀ acts where g acts by this one."""
    return tuple(-x for x in power)


class Element(ABC):
    """A member of a group, [*index, n, n] as a matrix."""

    @abstractmethod
    def as_matrix(self, power: Power = PRIMAL) -> Tensor:
        """The map as dense matrices [*index, n, n], float64: the oracle for every other method."""

    @abstractmethod
    def inverse(self) -> Element: ...

    @abstractmethod
    def __matmul__(self, other: Element) -> Element: ...

    @abstractmethod
    def act(self, tensor: Tensor, power: Power) -> Tensor:
        """Move the last axis of `tensor` [*index, ..., n]; the axes in between are untouched."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The arrays that define it, for saving."""

    def to(self, device: torch.device) -> Element:
        """The same element there."""
        return load_element({key: t.to(device) for key, t in self.tensors().items()})

    def laid_out(self) -> Element:
        """The same, with entries in row-major order."""
        return load_element({key: t.contiguous() for key, t in self.tensors().items()})

    @abstractmethod
    def shifted(self, by: Tensor) -> Element:
        """The element with `by` added to its continuous coordinates."""

    def prepare(self) -> None:  # noqa: B027  -- most have nothing to prepare
        """Compute what its uses share, before many threads use it: each of them would compute it."""


@dataclass(frozen=True)
class Matrix(Element):
    """A dense map, `matrix` [*index, n, n]."""

    matrix: Tensor

    def as_matrix(self, power: Power = PRIMAL) -> Tensor:
        if power == PRIMAL:
            return self.matrix
        if power == DUAL:
            return self._inverse.mT
        raise ValueError(f"a dense element has no power {power}")

    @cached_property
    def _inverse(self) -> Tensor:
        """Kept, for every weight that reads the space needs it."""
        return torch.linalg.inv(self.matrix)

    def prepare(self) -> None:
        _ = self._inverse, self.keeps_lengths

    def inverse(self) -> Matrix:
        return Matrix(self._inverse)

    def __matmul__(self, other: Element) -> Matrix:
        return Matrix(self.matrix @ other.as_matrix())

    @cached_property
    def keeps_lengths(self) -> bool:
        gram = self.matrix @ self.matrix.mT
        return bool((gram - torch.eye(gram.shape[-1]).to(gram)).abs().max() <= _ISOMETRY)

    def act(self, tensor: Tensor, power: Power) -> Tensor:
        """As `Element.act`, rounded once where lengths change: large terms may cancel then, and what float32 rounds of
        them would be many units of the sum. That product is taken where the element is, in its own dtype."""
        matrix = self.as_matrix(power)
        if tensor.dtype == torch.float64 or matrix.dtype != torch.float64 or self.keeps_lengths:
            matrix = matrix.to(tensor)
        flat = tensor.reshape(*matrix.shape[:-2], -1, tensor.shape[-1]).to(matrix)
        return (flat @ matrix.mT).reshape(tensor.shape).to(tensor)

    def shifted(self, by: Tensor) -> Matrix:
        return Matrix(self.matrix + by)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}


@dataclass(frozen=True)
class Monomial(Element):
    """A permutation and factors: (g x)[i] = Π_k scale[k, i]^power[k] · x[order[i]]; `order` is [*index, n] and `scale`
    [*index, k, n]."""

    order: Tensor
    scale: Tensor

    @classmethod
    def permutation(cls, order: Tensor) -> Monomial:
        return cls(order, torch.ones(order.shape, dtype=torch.float64).unsqueeze(-2))

    def factors(self, power: Power) -> Tensor:
        """What multiplies each entry, [*index, n]."""
        return (self.scale ** torch.tensor(power, device=self.scale.device)[:, None]).prod(-2)

    def as_matrix(self, power: Power = PRIMAL) -> Tensor:
        eye = torch.eye(self.order.shape[-1], dtype=torch.float64)
        return self.factors(power)[..., None] * eye[self.order]

    def inverse(self) -> Monomial:
        order = self.order.argsort(-1)
        return Monomial(order, 1 / self._reordered(order))

    def __matmul__(self, other: Element) -> Element:
        if not isinstance(other, Monomial):
            return Matrix(self.as_matrix() @ other.as_matrix())
        return Monomial(other.order.gather(-1, self.order), self.scale * other._reordered(self.order))

    def _reordered(self, order: Tensor) -> Tensor:
        return torch.take_along_dim(self.scale, order.unsqueeze(-2), -1)

    def act(self, tensor: Tensor, power: Power) -> Tensor:
        between = tensor.dim() - self.order.dim()
        shape = (*self.order.shape[:-1], *(1,) * between, self.order.shape[-1])
        order = self.order.to(tensor.device)
        alike = order.dim() == 1
        moved = tensor.index_select(-1, order) if alike else torch.take_along_dim(tensor, order.view(shape), -1)
        return moved * self.factors(power).view(shape).to(tensor) if any(power) else moved

    def shifted(self, by: Tensor) -> Monomial:
        return Monomial(self.order, self.scale + by)

    def tensors(self) -> dict[str, Tensor]:
        return {"order": self.order, "scale": self.scale}


def load_element(tensors: dict[str, Tensor]) -> Element:
    """The inverse of `Element.tensors`."""
    return Matrix(tensors["matrix"]) if "matrix" in tensors else Monomial(tensors["order"], tensors["scale"])
