"""The lattice of groups: for each, its random elements, its Lie algebra, its gauge, and its nearest element.

A cross matrix M[a, b] = Σ A[a, ·] B[b, ·] compares coordinate a of the target with coordinate b of the source; the
nearest element of a group maximises ⟨g, M⟩, that is, brings gB closest to A. Cross matrices come by power of the
action (primal, dual, permutation only), for a scale moves them differently.

Sources: Procrustes and assignment as in Git Re-Basin (arXiv 2209.04836, section 3.2) and Theus et al. (2506.22712,
section 4); balancing by the geometric mean of two Grams, after which the general linear gauge is reduced to an
orthogonal one.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor

from hf_align.symmetry.bounds import Bound, Ones, Scalars
from hf_align.symmetry.elements import DUAL, PRIMAL, Element, Matrix, Monomial, Power
from hf_align.symmetry.rotations import Rotations

Cross = Mapping[Power, Tensor]
"""Cross matrices [*index, n, n] float64, by power."""
_CONTINUOUS = (Scalars.POSITIVE, Scalars.NONZERO)
_SIGNED = (Scalars.SIGN, Scalars.NONZERO)
_SHARED = (Scalars.COMMON_SIGN,)
_LARGE, _MOST_STEPS = 512, 30
_ROUNDING = 1e-6
"""Of the length of a cross matrix of float32 products: less than this is nothing."""


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
        if torch.linalg.norm(x - before) <= 1e-8 * torch.linalg.norm(x):
            return x @ (1.5 * torch.eye(len(x)).to(x) - 0.5 * x.mT @ x)
    return None


def _size(m: Tensor) -> Tensor:
    """A cheap estimate of the spectral norm: √(‖m‖₁ ‖m‖∞)."""
    return (torch.linalg.matrix_norm(m, 1) * torch.linalg.matrix_norm(m, math.inf)).sqrt()


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
    def permutes(self) -> bool:
        """Whether every order of the entries is an element."""
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
        """A basis of the Lie algebra in the coordinates of an element: [d, n, n], of k scales [d, k, n]."""

    @abstractmethod
    def algebra(self, x: Tensor) -> Tensor:
        """The orthogonal projection on the Lie algebra, of matrices [*, n, n], or of the logarithms of k scales
        [*, k, n]; differentiable."""

    def balance(self, grams: Cross) -> Element:
        """The gauge in which primal and dual weights have equal Grams; the identity where there is none."""
        return self.identity(tuple(next(iter(grams.values())).shape[:-2]))

    def score(self, cross: Cross) -> Tensor:
        """max ⟨g, M⟩ [*index]."""
        element = self.nearest(cross)
        if isinstance(element, Monomial):
            return _fit(element, cross)
        return torch.stack([(element.as_matrix() * m).sum((-1, -2)) for m in cross.values()]).sum(0)


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

    def balance(self, grams: Cross) -> Matrix:
        if not {PRIMAL, DUAL} <= set(grams):
            return self.identity(tuple(next(iter(grams.values())).shape[:-2]))
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
        total = _total(cross)
        basis = self._complement().to(total)
        return Matrix(self._lift(polar(basis.T @ total @ basis)))

    def score(self, cross: Cross) -> Tensor:
        return (self.nearest(cross).matrix * _total(cross)).sum((-1, -2))

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
        total = _total(cross)
        along = total.sum((-1, -2), keepdim=True) / self.size
        turned = along < -_ROUNDING * torch.linalg.matrix_norm(total, keepdim=True)
        return Matrix(super().nearest(cross).matrix - torch.where(turned, 2 / self.size, 0.0))


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
        out = still.new_zeros(*index, self.size, self.size)
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
        if not {PRIMAL, DUAL} <= set(grams):
            return self.identity(tuple(next(iter(grams.values())).shape[:-2]))
        primal, still_primal = self._restrict(grams[PRIMAL])
        dual, still_dual = self._restrict(grams[DUAL])
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

    def algebra(self, x: Tensor) -> Tensor:
        return self._assemble(*self._restrict(x))


@dataclass(frozen=True)
class RotaryUnitary(RotaryCommutant):
    """The orthogonal maps that commute with rotary embedding, for lengths taken after it: U(m) and O."""

    @property
    def dimension(self) -> int:
        still = len(self.rotations.still)
        return sum(len(planes) ** 2 for planes in self.rotations.planes) + still * (still - 1) // 2

    @property
    def has_gauge(self) -> bool:
        return False

    def random(self, index: tuple[int, ...], rng: Generator) -> Matrix:
        return self.nearest({PRIMAL: self._noise(index, rng)})

    def balance(self, grams: Cross) -> Matrix:
        return self.identity(tuple(next(iter(grams.values())).shape[:-2]))

    def tangents(self) -> Tensor:
        general = super().tangents()
        skew = (general - general.mT) / 2
        basis = torch.linalg.svd(skew.flatten(1), full_matrices=False)[2][: self.dimension]
        return basis.view(-1, self.size, self.size)

    def algebra(self, x: Tensor) -> Tensor:
        general = super().algebra(x)
        return (general - general.mT) / 2


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
    def permutes(self) -> bool:
        return True

    @property
    def scales(self) -> tuple[Scalars, ...]:
        """For each independent scale of an entry, which factors it may have."""
        return (self.scalars,)

    @property
    def dimension(self) -> int:
        return self.size * len(self.continuous)

    @property
    def has_gauge(self) -> bool:
        return bool(self.continuous)

    @property
    def continuous(self) -> list[int]:
        """Which of the scales change lengths."""
        return [k for k, s in enumerate(self.scales) if s in _CONTINUOUS]

    def signs(self, kinds: tuple[Scalars, ...] = _SIGNED) -> list[tuple[int, ...]]:
        """All signs that the scales of such kinds may have together, none first."""
        return list(itertools.product(*((1, -1) if s in kinds else (1,) for s in self.scales)))

    def identity(self, index: tuple[int, ...]) -> Monomial:
        order = torch.arange(self.size).expand(*index, -1).contiguous()
        return Monomial(order, torch.ones(*index, len(self.scales), self.size, dtype=torch.float64))

    def random(self, index: tuple[int, ...], rng: Generator) -> Monomial:
        order = torch.rand(*index, self.size, generator=rng, dtype=torch.float64).argsort(-1)
        return Monomial(order, self._random_scale((*index, self.size), rng))

    def _random_scale(self, shape: tuple[int, ...], rng: Generator) -> Tensor:
        """Of entries of a shape [*index, n], as [*index, k, n]."""
        noise = torch.randn(2, *shape, len(self.scales), generator=rng, dtype=torch.float64)
        shared = torch.tensor([s in _SHARED for s in self.scales])
        noise[1] = torch.where(shared, noise[1][..., :1, :], noise[1])
        size = torch.tensor([s in _CONTINUOUS for s in self.scales])
        sign = torch.tensor([s in _SIGNED + _SHARED for s in self.scales])
        return ((0.5 * noise[0] * size).exp() * torch.where(sign & (noise[1] < 0), -1.0, 1.0)).mT

    def nearest(self, cross: Cross) -> Monomial:
        """The best of the elements that are nearest for each choice of the signs that all entries share."""
        best = self._nearest_entries(cross)
        for signs in self.signs(_SHARED)[1:]:
            flips = torch.tensor(signs, dtype=torch.float64)[:, None]
            found = self._nearest_entries({p: sign(signs, p) * m for p, m in cross.items()})
            turned = Monomial(found.order, flips * found.scale)
            better = _fit(turned, cross) > _fit(best, cross)
            best = Monomial(torch.where(better[..., None], turned.order, best.order),
                            torch.where(better[..., None, None], turned.scale, best.scale))  # fmt: skip
        return best

    def _nearest_entries(self, cross: Cross) -> Monomial:
        best, *others = self.signs()
        gain = _signed(cross, best)
        for signs in others:
            torch.maximum(gain, _signed(cross, signs), out=gain)
        order = assign(gain)
        chosen = {p: m.gather(-1, order.unsqueeze(-1)).squeeze(-1) for p, m in cross.items()}
        return Monomial(order, self._nearest_signs(chosen))

    def _nearest_signs(self, fit: Cross) -> Tensor:
        """The signs [*index, k, n] that fit best, entry by entry; `fit` [*index, n]."""
        signs = self.signs()
        best = torch.stack([_signed(fit, s) for s in signs]).argmax(0)
        return torch.tensor(signs, dtype=torch.float64)[best].mT

    def balance(self, grams: Cross) -> Monomial:
        lengths = {p: m.diagonal(dim1=-2, dim2=-1) for p, m in grams.items()}
        element = self.identity(tuple(next(iter(lengths.values())).shape[:-1]))
        return Monomial(element.order, self._even_scale(lengths))

    def _even_scale(self, lengths: Cross) -> Tensor:
        """The positive scales [*index, k, n] that bring the squared lengths g_p of an entry closest to each other.

        With scales exp x they become g_p exp(2 p·x), so x = -½ P⁺ log g for the matrix P of all powers.
        """
        powers = torch.tensor(list(lengths), dtype=torch.float64)[:, self.continuous]
        g = torch.stack(list(lengths.values()), -1)
        logs = torch.where((g > 0).all(-1, keepdim=True), g.clamp_min(1e-300).log(), torch.zeros_like(g))
        scale = torch.ones(*g.shape[:-1], len(self.scales), dtype=torch.float64)
        scale[..., self.continuous] = (-0.5 * logs @ torch.linalg.pinv(powers).T).exp()
        return scale.mT

    def tangents(self) -> Tensor:
        return self._along(torch.eye(self.size, dtype=torch.float64))

    def algebra(self, x: Tensor) -> Tensor:
        mask = x.new_tensor([float(k in self.continuous) for k in range(len(self.scales))])
        return x * mask[:, None]

    def _along(self, runs: Tensor) -> Tensor:
        """[d, k, n]: each continuous scale of each run of entries; `runs` [m, n]."""
        basis = torch.zeros(len(self.continuous), len(runs), len(self.scales), self.size, dtype=torch.float64)
        for i, k in enumerate(self.continuous):
            basis[i, :, k] = runs
        return basis.flatten(0, 1)


def _fit(element: Monomial, cross: Cross) -> Tensor:
    """⟨g, M⟩ [*index]."""
    return torch.stack([_fit_by_entry(element, p, m).sum(-1) for p, m in cross.items()]).sum(0)


def _fit_by_entry(element: Monomial, power: Power, matrix: Tensor) -> Tensor:
    """What each entry adds to it [*index, n]."""
    order = element.order.expand(matrix.shape[:-1])
    return element.factors(power) * matrix.gather(-1, order.unsqueeze(-1)).squeeze(-1)


def _signed(fit: Cross, signs: tuple[int, ...]) -> Tensor:
    """Σ_p Π_k sign_k^p_k M_p."""
    (power, first), *others = fit.items()
    total = sign(signs, power) * first
    for power, matrix in others:
        total.add_(matrix, alpha=sign(signs, power))
    return total


def sign(signs: tuple[int, ...], power: Power) -> int:
    """What signs [k] of the scales make of an entry that moves by a power."""
    return math.prod(s ** abs(e) for s, e in zip(signs, power, strict=False))


@dataclass(frozen=True)
class PositiveScaledPermutation(ScaledPermutation):
    """Permutations times positive factors: ReLU and its like."""

    scalars: ClassVar[Scalars] = Scalars.POSITIVE


@dataclass(frozen=True)
class SignedPermutation(ScaledPermutation):
    """Permutations and signs: odd functions, norms whose gain stays."""

    scalars: ClassVar[Scalars] = Scalars.SIGN


@dataclass(frozen=True)
class PermutationUpToSign(ScaledPermutation):
    """{±1} × S_n: a stream that LayerNorms read as it stands."""

    scalars: ClassVar[Scalars] = Scalars.COMMON_SIGN


@dataclass(frozen=True)
class Permutation(ScaledPermutation):
    """S_n: any elementwise function, heads, experts."""

    scalars: ClassVar[Scalars] = Scalars.ONE


@dataclass(frozen=True)
class TorusPermutation(ScaledPermutation):
    """Permutations times several independent factors: units whose uses share an order but not a scale, as where two
    linear maps meet in an elementwise product."""

    kinds: tuple[Scalars, ...]

    @property
    def scales(self) -> tuple[Scalars, ...]:
        return self.kinds


@dataclass(frozen=True)
class Scaling(ScaledPermutation):
    """Factors alone, the order is fixed: a gain between spaces whose own maps are pinned.

    `classes` labels coordinates that must share their factors (the two of a rotary plane).
    """

    classes: tuple[int, ...]
    kinds: tuple[Scalars, ...]

    @property
    def permutes(self) -> bool:
        return False

    @property
    def scales(self) -> tuple[Scalars, ...]:
        return self.kinds

    @property
    def dimension(self) -> int:
        return len(set(self.classes)) * len(self.continuous)

    def _members(self) -> Tensor:
        """[classes, size], one where a coordinate belongs to a class."""
        labels = torch.tensor(self.classes)
        return (labels == labels.unique()[:, None]).double()

    def random(self, index: tuple[int, ...], rng: Generator) -> Monomial:
        members = self._members()
        return Monomial(self.identity(index).order, self._random_scale((*index, len(members)), rng) @ members)

    def _nearest_entries(self, cross: Cross) -> Monomial:
        return self._by_class(cross, self._nearest_signs)

    def balance(self, grams: Cross) -> Monomial:
        return self._by_class(grams, self._even_scale)

    def _by_class(self, matrices: Cross, choose: Callable[[Cross], Tensor]) -> Monomial:
        members = self._members()
        total = {p: m.diagonal(dim1=-2, dim2=-1) @ members.T for p, m in matrices.items()}
        index = tuple(next(iter(total.values())).shape[:-1])
        return Monomial(self.identity(index).order, choose(total) @ members)

    def tangents(self) -> Tensor:
        return self._along(self._members())

    def algebra(self, x: Tensor) -> Tensor:
        members = self._members().to(x)
        return super().algebra(x) @ members.T / members.sum(-1) @ members


@dataclass(frozen=True)
class QuarterTurns(Scaling):
    """Factors of what multiplies a rotating space entry by entry, and quarter turns of its planes with signs: the
    monomial maps that commute with the rotations.

    The turn (x, y) ↦ (-y, x) is an exchange and a sign. The signs are the last of the scales, one for each plane, by
    which only what rotates moves, and by no other; so it is turned, and what multiplies it is exchanged.

    Attributes:
        rotations: planes that turn as another does stay as they are.
    """

    rotations: Rotations

    def random(self, index: tuple[int, ...], rng: Generator) -> Monomial:
        scaled = super().random(index, rng).scale
        planes, turned = self._planes(), torch.randn(*index, len(self._planes()), 2, generator=rng, dtype=torch.float64)
        scaled[..., -1, :] = turned[..., 0].sign() @ planes
        return self._element(turned[..., 1] > 0, scaled, scaled)

    def _element(self, turned: Tensor, scale: Tensor, scale_of_turned: Tensor) -> Monomial:
        """From whether each plane is turned [*index, planes], and then scaled by what [*index, k, n]."""
        turn, still = self._turn(), self.identity(())
        at = (turned.double() @ self._planes()) > 0
        scale = torch.where(at[..., None, :], scale_of_turned * turn.scale, scale)
        return Monomial(torch.where(at, turn.order, still.order), scale)

    def _turn(self) -> Monomial:
        """All planes that may be, turned once."""
        element = self.identity(())
        for planes in self.rotations.planes:
            if len(planes) == 1:
                ((i, j),) = planes
                element.order[i], element.order[j], element.scale[-1, i] = j, i, -1.0
        return element

    def _planes(self) -> Tensor:
        """[planes, size], one where a coordinate belongs to a plane, or is one by itself that stands still."""
        labels = torch.tensor(self.rotations.classes)
        return (labels == labels.unique()[:, None]).double()

    def _nearest_entries(self, cross: Cross) -> Monomial:
        return self.nearest_beside(cross, torch.zeros(0, self.size, self.size, dtype=torch.float64))

    def nearest_beside(self, cross: Cross, signed: Tensor) -> Monomial:
        """The best element where what rotates is compared by other cross matrices too, [m, n, n], each of which has
        signs of its own for every plane."""
        members, planes = self._members(), self._planes()
        inside = ((planes @ members.T) > 0).double()
        values, scales = [], []
        for element in (self.identity(()), self._turn()):
            fit = {p: _fit_by_entry(element, p, m) for p, m in cross.items()}
            gains = {p: m @ members.T for p, m in fit.items() if not p[-1]}
            own = sum((m @ planes.T for p, m in fit.items() if p[-1]), torch.zeros(len(planes), dtype=torch.float64))
            beside = (_fit_by_entry(element, self._turning, signed) @ planes.T).abs().sum(0)
            best = torch.stack([_signed(gains, signs) for signs in self.signs()]).amax(0) @ inside.T
            values.append(best + own.abs() + beside)
            scale = self._nearest_signs(gains) @ members
            scale[..., -1, :] = torch.where(own < 0, -1.0, 1.0).double() @ planes
            scales.append(scale)
        return self._element(values[1] > values[0], *scales)

    @property
    def _turning(self) -> Power:
        """By which what rotates moves."""
        return (*(0 for _ in self.kinds[1:]), 1)


_MONOMIAL: dict[Scalars, type[ScaledPermutation]] = {
    g.scalars: g
    for g in (ScaledPermutation, PositiveScaledPermutation, SignedPermutation, PermutationUpToSign, Permutation)
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
        if bound.ones is not Ones.MOVED:
            return None
        return RotaryUnitary(size, bound.rotations) if bound.metric else RotaryCommutant(size, bound.rotations)
    if bound.ones is not Ones.MOVED:
        return OrthogonalFixingOnes(size) if bound.ones is Ones.FIXED else OrthogonalFixingOnesUpToSign(size)
    return Orthogonal(size) if bound.metric else GeneralLinear(size)
