"""Groups of matrices: general linear, orthogonal, and what keeps the all-ones vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hf_align.symmetry.elements import DUAL, PRIMAL, Element, Matrix
from hf_align.symmetry.groups.fit import Cross, summed
from hf_align.symmetry.groups.group import Group
from hf_align.symmetry.groups.linear_algebra import geometric_mean_gauge, polar

_NO_AGREEMENT = 1e-6
"""Of the length of a cross matrix of float32 products: less than this is nothing."""


class Dense(Group):
    """Elements are matrices."""

    def identity(self, index: tuple[int, ...]) -> Matrix:
        return Matrix(torch.eye(self.size, dtype=torch.float64).expand(*index, -1, -1).contiguous())

    def _noise(self, index: tuple[int, ...], rng: Generator) -> Tensor:
        return torch.randn(*index, self.size, self.size, generator=rng, dtype=torch.float64)


@dataclass(frozen=True)
class Orthogonal(Dense):
    """O(n): rotations and reflections."""

    @property
    def dimension(self) -> int:
        return self.size * (self.size - 1) // 2

    def random(self, index: tuple[int, ...], rng: Generator) -> Matrix:
        return Matrix(torch.linalg.qr(self._noise(index, rng))[0])

    def nearest(self, cross: Cross) -> Matrix:
        return Matrix(polar(summed(cross)))

    def score(self, cross: Cross) -> Tensor:
        return torch.linalg.svdvals(summed(cross)).sum(-1)

    def tangents(self) -> Tensor:
        rows, columns = torch.triu_indices(self.size, self.size, 1)
        basis = torch.zeros(len(rows), self.size, self.size, dtype=torch.float64)
        steps = torch.arange(len(rows))
        basis[steps, rows, columns], basis[steps, columns, rows] = 1.0, -1.0
        return basis

    def algebra(self, x: Tensor) -> Tensor:
        return (x - x.mT) / 2


@dataclass(frozen=True)
class GeneralLinear(Orthogonal):
    """GL(n). After balancing, matching searches its orthogonal part."""

    @property
    def dimension(self) -> int:
        return self.size**2

    @property
    def has_gauge(self) -> bool:
        return True

    def random(self, index: tuple[int, ...], rng: Generator) -> Matrix:
        stretch = torch.matrix_exp(0.3 * self._noise(index, rng) / self.size**0.5)
        return Matrix(super().random(index, rng).matrix @ stretch)

    def balance(self, grams: Cross) -> Element:
        if not {PRIMAL, DUAL} <= set(grams):
            return super().balance(grams)
        return Matrix(geometric_mean_gauge(grams[PRIMAL], grams[DUAL]))

    def tangents(self) -> Tensor:
        return torch.eye(self.size**2, dtype=torch.float64).view(-1, self.size, self.size)

    def algebra(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class OrthogonalFixingOnes(Orthogonal):
    """O(n-1): orthogonal maps with g1 = 1, what norms and means together leave."""

    @property
    def dimension(self) -> int:
        return (self.size - 1) * (self.size - 2) // 2

    def _complement(self) -> Tensor:
        """An orthonormal basis [n, n-1] of the vectors of mean zero."""
        ones = torch.ones(self.size, 1, dtype=torch.float64)
        return torch.linalg.qr(torch.cat([ones, torch.eye(self.size, dtype=torch.float64)[:, :-1]], 1))[0][:, 1:]

    def _lift(self, inner: Tensor) -> Tensor:
        basis = self._complement().to(inner)
        return basis @ inner @ basis.T + 1 / self.size

    def random(self, index: tuple[int, ...], rng: Generator) -> Matrix:
        return Matrix(self._lift(Orthogonal(self.size - 1).random(index, rng).matrix))

    def nearest(self, cross: Cross) -> Matrix:
        total = summed(cross)
        basis = self._complement().to(total)
        return Matrix(self._lift(polar(basis.T @ total @ basis)))

    def score(self, cross: Cross) -> Tensor:
        return (self.nearest(cross).matrix * summed(cross)).sum((-1, -2))

    def tangents(self) -> Tensor:
        basis = self._complement()
        return basis @ Orthogonal(self.size - 1).tangents() @ basis.T

    def algebra(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return super().algebra(centred - centred.mean(-2, keepdim=True))


@dataclass(frozen=True)
class OrthogonalFixingOnesUpToSign(OrthogonalFixingOnes):
    """{±1} × O(n-1): orthogonal maps with g1 = ±1, what a LayerNorm leaves."""

    def random(self, index: tuple[int, ...], rng: Generator) -> Matrix:
        sign = torch.rand(*index, 1, 1, generator=rng, dtype=torch.float64).sub(0.5).sign()
        return Matrix(sign * super().random(index, rng).matrix)

    def nearest(self, cross: Cross) -> Matrix:
        """Of centred weights nothing lies along the ones, and the sign there changes nothing."""
        total = summed(cross)
        along = total.sum((-1, -2), keepdim=True) / self.size
        turned = along < -_NO_AGREEMENT * torch.linalg.matrix_norm(total, keepdim=True)
        return Matrix(super().nearest(cross).matrix - torch.where(turned, 2 / self.size, 0.0))
