"""The lattice of groups: for each, its random elements, its Lie algebra, its gauge, and its nearest element.

A cross matrix M[a, b] = Σ A[a, ·] B[b, ·] compares coordinate a of the target with coordinate b of the source; the
nearest element of a group maximises ⟨g, M⟩, that is, brings gB closest to A. Cross matrices come by power of the
action (+1 primal, -1 dual, 0 permutation only), for a scale moves them differently.

Sources: Procrustes and assignment as in Git Re-Basin (arXiv 2209.04836, section 3.2) and Theus et al. (2506.22712,
section 4); balancing by the geometric mean of two Grams, after which the general linear gauge is reduced to an
orthogonal one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor

from hf_align.symmetry.bounds import Bound, Scalars
from hf_align.symmetry.elements import Element, Matrix, Monomial
from hf_align.symmetry.rotations import Rotations

Cross = Mapping[int, Tensor]
"""Cross matrices [*index, n, n] float64, by power."""


def polar(m: Tensor) -> Tensor:
    """The orthogonal matrix nearest to m: U Vᵀ of its singular value decomposition."""
    u, _, vh = torch.linalg.svd(m)
    return u @ vh


def geometric_mean_gauge(primal: Tensor, dual: Tensor) -> Tensor:
    """The positive g with g P g = g⁻¹ D g⁻¹, for Gram matrices P, D [*, n, n]: g² = P⁻¹ # D."""
    if not primal.shape[-1]:
        return primal
    root, inverse_root = _symmetric_power(primal, 0.5), _symmetric_power(primal, -0.5)
    squared = inverse_root @ _symmetric_power(root @ dual @ root, 0.5) @ inverse_root
    return _symmetric_power(squared, 0.5)


def _symmetric_power(m: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(m)
    floor = 1e-12 * values.amax(-1, keepdim=True).abs().clamp_min(1e-300)
    return (vectors * values.clamp_min(floor).unsqueeze(-2) ** power) @ vectors.mH


def assign(gain: Tensor) -> Tensor:
    """The orders [*, n] that maximise the sum of gain[i, order[i]]; gain [*, n, n]."""
    flat = gain.reshape(-1, *gain.shape[-2:])
    orders = [torch.from_numpy(linear_sum_assignment(g.cpu().numpy(), maximize=True)[1]) for g in flat]
    return torch.stack(orders).reshape(gain.shape[:-1])


@dataclass(frozen=True)
class Group(ABC):
    """All elements that a space of `size` dimensions admits."""

    size: int

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def has_gauge(self) -> bool:
        """Whether elements change lengths, so that a gauge must be fixed before weights are compared."""
        return False

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Continuous dimensions."""

    @abstractmethod
    def identity(self, index: tuple[int, ...]) -> Element: ...

    @abstractmethod
    def random(self, index: tuple[int, ...], rng: Generator) -> Element:
        """A random element for each index, continuous and discrete parts alike, well conditioned."""

    @abstractmethod
    def nearest(self, cross: Cross) -> Element:
        """argmax ⟨g, M⟩ over the elements that preserve length."""

    @abstractmethod
    def tangents(self) -> Tensor:
        """A basis [k, n, n] of the Lie algebra; k = 0 for a discrete group."""

    def balance(self, grams: Cross) -> Element:
        """The gauge in which primal and dual weights have equal Grams; the identity where there is none."""
        return self.identity(tuple(next(iter(grams.values())).shape[:-2]))

    def score(self, cross: Cross) -> Tensor:
        """max ⟨g, M⟩ [*index]."""
        element = self.nearest(cross)
        return torch.stack([(element.as_matrix(p).sign() * m).sum((-1, -2)) if isinstance(element, Monomial)
                            else (element.as_matrix() * m).sum((-1, -2)) for p, m in cross.items()]).sum(0)  # fmt: skip


def _total(cross: Cross) -> Tensor:
    return torch.stack(list(cross.values())).sum(0)


class _Dense(Group):
    def identity(self, index: tuple[int, ...]) -> Matrix:
        return Matrix(torch.eye(self.size, dtype=torch.float64).expand(*index, -1, -1).contiguous())

    def _noise(self, index: tuple[int, ...], rng: Generator) -> Tensor:
        return torch.randn(*index, self.size, self.size, generator=rng, dtype=torch.float64)


@dataclass(frozen=True)
class Orthogonal(_Dense):
    """O(n): rotations and reflections."""

    @property
    def dimension(self) -> int:
        return self.size * (self.size - 1) // 2

    def random(self, index: tuple[int, ...], rng: Generator) -> Matrix:
        return Matrix(torch.linalg.qr(self._noise(index, rng))[0])

    def nearest(self, cross: Cross) -> Matrix:
        return Matrix(polar(_total(cross)))

    def score(self, cross: Cross) -> Tensor:
        return torch.linalg.svdvals(_total(cross)).sum(-1)

    def tangents(self) -> Tensor:
        rows, columns = torch.triu_indices(self.size, self.size, 1)
        basis = torch.zeros(len(rows), self.size, self.size, dtype=torch.float64)
        steps = torch.arange(len(rows))
        basis[steps, rows, columns], basis[steps, columns, rows] = 1.0, -1.0
        return basis


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

    def balance(self, grams: Cross) -> Matrix:
        if not {1, -1} <= set(grams):
            return self.identity(tuple(next(iter(grams.values())).shape[:-2]))
        return Matrix(geometric_mean_gauge(grams[1], grams[-1]))

    def tangents(self) -> Tensor:
        return torch.eye(self.size**2, dtype=torch.float64).view(-1, self.size, self.size)


@dataclass(frozen=True)
class OrthogonalFixingOnes(Orthogonal):
    """O(n-1): orthogonal maps with g1 = 1, what a LayerNorm leaves."""

    @property
    def dimension(self) -> int:
        return (self.size - 1) * (self.size - 2) // 2

    def _complement(self) -> Tensor:
        """An orthonormal basis [n, n-1] of the vectors of mean zero."""
        ones = torch.ones(self.size, 1, dtype=torch.float64)
        return torch.linalg.qr(torch.cat([ones, torch.eye(self.size, dtype=torch.float64)[:, :-1]], 1))[0][:, 1:]

    def _lift(self, inner: Tensor) -> Tensor:
        basis = self._complement()
        return basis @ inner @ basis.T + 1 / self.size

    def random(self, index: tuple[int, ...], rng: Generator) -> Matrix:
        return Matrix(self._lift(Orthogonal(self.size - 1).random(index, rng).matrix))

    def nearest(self, cross: Cross) -> Matrix:
        basis = self._complement()
        return Matrix(self._lift(polar(basis.T @ _total(cross) @ basis)))

    def score(self, cross: Cross) -> Tensor:
        return (self.nearest(cross).matrix * _total(cross)).sum((-1, -2))

    def tangents(self) -> Tensor:
        basis = self._complement()
        return basis @ Orthogonal(self.size - 1).tangents() @ basis.T


@dataclass(frozen=True)
class RotaryCommutant(_Dense):
    """The maps that commute with rotary embedding: GL(m, ℂ) on m planes of equal frequency, GL on what stands still."""

    rotations: Rotations

    @property
    def dimension(self) -> int:
        return sum(2 * len(planes) ** 2 for planes in self.rotations.planes) + len(self.rotations.still) ** 2

    @property
    def has_gauge(self) -> bool:
        return True

    def _complex_blocks(self) -> list[tuple[Tensor, Tensor]]:
        """Real and imaginary coordinates [classes, m], batched over classes of as many planes."""
        by_multiplicity: dict[int, list[tuple[tuple[int, int], ...]]] = {}
        for planes in self.rotations.planes:
            by_multiplicity.setdefault(len(planes), []).append(planes)
        pairs = [torch.tensor(classes) for classes in by_multiplicity.values()]
        return [(p[..., 0], p[..., 1]) for p in pairs]

    def _restrict(self, m: Tensor) -> tuple[list[Tensor], Tensor]:
        """The part of a matrix that lies in the commutant: complex blocks [*, classes, m, m] and the still block."""

        def pick(a: Tensor, b: Tensor) -> Tensor:
            return m[..., a.unsqueeze(-1), b.unsqueeze(-2)]

        blocks = [torch.complex(pick(i, i) + pick(j, j), pick(j, i) - pick(i, j)) / 2
                  for i, j in self._complex_blocks()]  # fmt: skip
        still = torch.tensor(self.rotations.still, dtype=torch.long)
        return blocks, m[..., still[:, None], still[None, :]]

    def _assemble(self, blocks: list[Tensor], still: Tensor) -> Tensor:
        index = still.shape[:-2]
        out = torch.zeros(*index, self.size, self.size, dtype=torch.float64)
        for (i, j), z in zip(self._complex_blocks(), blocks, strict=True):
            i1, i2, j1, j2 = i.unsqueeze(-1), i.unsqueeze(-2), j.unsqueeze(-1), j.unsqueeze(-2)
            out[..., i1, i2], out[..., j1, j2], out[..., j1, i2], out[..., i1, j2] = z.real, z.real, z.imag, -z.imag
        at = torch.tensor(self.rotations.still, dtype=torch.long)
        out[..., at[:, None], at[None, :]] = still
        return out

    def random(self, index: tuple[int, ...], rng: Generator) -> Matrix:
        blocks, _ = self._restrict(self._noise(index, rng))
        unitary = [polar(z) @ torch.matrix_exp(0.3 * w) for z, w in
                   zip(blocks, self._restrict(self._noise(index, rng))[0], strict=True)]  # fmt: skip
        still = GeneralLinear(len(self.rotations.still)).random(index, rng).matrix
        return Matrix(self._assemble(unitary, still))

    def nearest(self, cross: Cross) -> Matrix:
        blocks, still = self._restrict(_total(cross))
        return Matrix(self._assemble([_complex_polar(z) for z in blocks], polar(still)))

    def score(self, cross: Cross) -> Tensor:
        blocks, still = self._restrict(_total(cross))
        parts = [2 * torch.linalg.svdvals(z).sum((-1, -2)) for z in blocks]
        return torch.stack([*parts, torch.linalg.svdvals(still).sum(-1)]).sum(0)

    def balance(self, grams: Cross) -> Matrix:
        if not {1, -1} <= set(grams):
            return self.identity(tuple(next(iter(grams.values())).shape[:-2]))
        primal, still_primal = self._restrict(grams[1])
        dual, still_dual = self._restrict(grams[-1])
        blocks = [geometric_mean_gauge(p, d) for p, d in zip(primal, dual, strict=True)]
        return Matrix(self._assemble(blocks, geometric_mean_gauge(still_primal, still_dual)))

    def tangents(self) -> Tensor:
        basis = []
        for planes in self.rotations.planes:
            for i, j in planes:
                for k, m in planes:
                    real, imag = torch.zeros(2, self.size, self.size, dtype=torch.float64)
                    real[i, k] = real[j, m] = imag[j, k] = 1.0
                    imag[i, m] = -1.0
                    basis += [real, imag]
        for i in self.rotations.still:
            for k in self.rotations.still:
                one = torch.zeros(self.size, self.size, dtype=torch.float64)
                one[i, k] = 1.0
                basis.append(one)
        return torch.stack(basis)


def _complex_polar(z: Tensor) -> Tensor:
    if z.shape[-1] == 1:
        size = z.abs()
        return torch.where(size > 0, z / size.clamp_min(1e-300), torch.ones_like(z))
    return polar(z)


@dataclass(frozen=True)
class ScaledPermutation(Group):
    """Permutations times non-zero factors: one hidden unit between linear maps."""

    scalars: ClassVar[Scalars] = Scalars.NONZERO

    @property
    def dimension(self) -> int:
        return self.size if self.has_gauge else 0

    @property
    def has_gauge(self) -> bool:
        return self.scalars in (Scalars.POSITIVE, Scalars.NONZERO)

    def identity(self, index: tuple[int, ...]) -> Monomial:
        return Monomial.permutation(torch.arange(self.size).expand(*index, -1).contiguous())

    def random(self, index: tuple[int, ...], rng: Generator) -> Monomial:
        noise = torch.randn(3, *index, self.size, generator=rng, dtype=torch.float64)
        scale = torch.ones_like(noise[0])
        if self.has_gauge:
            scale = (0.5 * noise[1]).exp()
        if self.scalars in (Scalars.SIGN, Scalars.NONZERO):
            scale = scale * torch.where(noise[2] < 0, -1.0, 1.0)
        return Monomial(noise[0].argsort(-1), scale)

    def nearest(self, cross: Cross) -> Monomial:
        even = torch.stack([m for p, m in cross.items() if p % 2 == 0] or [torch.zeros_like(_total(cross))]).sum(0)
        odd = torch.stack([m for p, m in cross.items() if p % 2] or [torch.zeros_like(even)]).sum(0)
        signed = self.scalars in (Scalars.SIGN, Scalars.NONZERO)
        order = assign(even + odd.abs() if signed else even + odd)
        chosen = odd.gather(-1, order.unsqueeze(-1)).squeeze(-1)
        scale = torch.where(chosen < 0, -1.0, 1.0).double() if signed else torch.ones_like(chosen)
        return Monomial(order, scale)

    def balance(self, grams: Cross) -> Monomial:
        element = self.identity(tuple(next(iter(grams.values())).shape[:-2]))
        if not self.has_gauge or not {1, -1} <= set(grams):
            return element
        primal, dual = grams[1].diagonal(dim1=-2, dim2=-1), grams[-1].diagonal(dim1=-2, dim2=-1)
        usable = (primal > 0) & (dual > 0)
        ratio = torch.where(usable, dual / primal.clamp_min(1e-300), torch.ones_like(primal))
        return Monomial(element.order, ratio**0.25)

    def tangents(self) -> Tensor:
        if not self.has_gauge:
            return torch.zeros(0, self.size, self.size, dtype=torch.float64)
        return torch.diag_embed(torch.eye(self.size, dtype=torch.float64))


@dataclass(frozen=True)
class PositiveScaledPermutation(ScaledPermutation):
    """Permutations times positive factors: ReLU and its like."""

    scalars: ClassVar[Scalars] = Scalars.POSITIVE


@dataclass(frozen=True)
class SignedPermutation(ScaledPermutation):
    """Permutations and signs: odd functions, norms whose gain stays."""

    scalars: ClassVar[Scalars] = Scalars.SIGN


@dataclass(frozen=True)
class Permutation(ScaledPermutation):
    """S_n: any elementwise function, heads, experts."""

    scalars: ClassVar[Scalars] = Scalars.ONE


@dataclass(frozen=True)
class Scaling(ScaledPermutation):
    """Factors alone, the order is fixed: a gain between spaces whose own maps are pinned.

    `classes` labels coordinates that must share a factor (the two of a rotary plane).
    """

    classes: tuple[int, ...]
    kind: Scalars

    @property
    def dimension(self) -> int:
        return len(set(self.classes)) if self.has_gauge else 0

    @property
    def has_gauge(self) -> bool:
        return self.kind in (Scalars.POSITIVE, Scalars.NONZERO)

    def _members(self) -> Tensor:
        """[classes, size], one where a coordinate belongs to a class."""
        labels = torch.tensor(self.classes)
        return (labels == labels.unique()[:, None]).double()

    def random(self, index: tuple[int, ...], rng: Generator) -> Monomial:
        members = self._members()
        noise = torch.randn(2, *index, len(members), generator=rng, dtype=torch.float64)
        scale = (0.5 * noise[0]).exp() if self.has_gauge else torch.ones_like(noise[0])
        if self.kind in (Scalars.SIGN, Scalars.NONZERO):
            scale = scale * torch.where(noise[1] < 0, -1.0, 1.0)
        return Monomial(self.identity(index).order, scale @ members)

    def nearest(self, cross: Cross) -> Monomial:
        members = self._members()
        odd = [m.diagonal(dim1=-2, dim2=-1) for p, m in cross.items() if p % 2]
        first = next(iter(cross.values())).diagonal(dim1=-2, dim2=-1)
        fit = (torch.stack(odd).sum(0) if odd else torch.zeros_like(first)) @ members.T
        signed = self.kind in (Scalars.SIGN, Scalars.NONZERO)
        scale = torch.where((fit < 0) & torch.tensor(signed), -1.0, 1.0).double()
        return Monomial(self.identity(tuple(first.shape[:-1])).order, scale @ members)

    def balance(self, grams: Cross) -> Monomial:
        first = next(iter(grams.values()))
        element = self.identity(tuple(first.shape[:-2]))
        if not self.has_gauge or not {1, -1} <= set(grams):
            return element
        members = self._members()
        primal, dual = (grams[p].diagonal(dim1=-2, dim2=-1) @ members.T for p in (1, -1))
        usable = (primal > 0) & (dual > 0)
        ratio = torch.where(usable, dual / primal.clamp_min(1e-300), torch.ones_like(primal))
        return Monomial(element.order, ratio**0.25 @ members)

    def tangents(self) -> Tensor:
        if not self.has_gauge:
            return torch.zeros(0, self.size, self.size, dtype=torch.float64)
        return torch.diag_embed(self._members())


_MONOMIAL: dict[Scalars, type[ScaledPermutation]] = {
    g.scalars: g for g in (ScaledPermutation, PositiveScaledPermutation, SignedPermutation, Permutation)
}


def group_of(bound: Bound, size: int) -> Group | None:
    """The largest group of the lattice below a bound; None for the identity alone.

    One entry stays: broadcasting pairs it with axes of any size, and nothing follows what it pairs.
    """
    if bound.fixed or size <= 1:
        return None
    if bound.monomial is not None:
        return None if bound.rotations is not None else _MONOMIAL[bound.monomial](size)
    if bound.rotations is not None:
        return None if bound.metric or bound.ones else RotaryCommutant(size, bound.rotations)
    if bound.ones:
        return OrthogonalFixingOnes(size)
    return Orthogonal(size) if bound.metric else GeneralLinear(size)
