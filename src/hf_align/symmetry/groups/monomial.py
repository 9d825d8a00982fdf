"""Permutations, with factors or without."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from hf_align.symmetry.elements import Monomial
from hf_align.symmetry.groups.fit import Cross, assign, fit, greedy_signs, sign, under_signs
from hf_align.symmetry.groups.group import Group
from hf_align.symmetry.interpreter.bounds import Scalars

_CONTINUOUS = (Scalars.POSITIVE, Scalars.NONZERO)
_SIGNED = (Scalars.SIGN, Scalars.NONZERO)
_SHARED = (Scalars.COMMON_SIGN,)
_TRIED = 8
"""Signs of one entry of which all choices are tried."""


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
            flips = best.scale.new_tensor(signs)[:, None]
            found = self._nearest_entries({p: sign(signs, p) * m for p, m in cross.items()})
            turned = Monomial(found.order, flips * found.scale)
            better = fit(turned, cross) > fit(best, cross)
            best = Monomial(torch.where(better[..., None], turned.order, best.order),
                            torch.where(better[..., None, None], turned.scale, best.scale))  # fmt: skip
        return best

    def _nearest_entries(self, cross: Cross) -> Monomial:
        order = assign(self._best_gain(cross))
        chosen = {p: m.gather(-1, order.unsqueeze(-1)).squeeze(-1) for p, m in cross.items()}
        return Monomial(order, self._nearest_signs(chosen))

    def _best_gain(self, cross: Cross) -> Tensor:
        """How well each entry of B fits each of A under the best of its signs [*index, n, n]; so too of fits [*, n]."""
        if self._too_many_signs:
            return greedy_signs(cross, self._signed)[1]
        best, *others = self.signs()
        gain = under_signs(cross, best)
        for signs in others:
            torch.maximum(gain, under_signs(cross, signs), out=gain)
        return gain

    @property
    def _signed(self) -> tuple[bool, ...]:
        """Which scales an entry may have another sign of than its neighbours."""
        return tuple(s in _SIGNED for s in self.scales)

    @property
    def _too_many_signs(self) -> bool:
        """Whether an entry has more choices of signs than can be tried one by one."""
        return sum(self._signed) > _TRIED

    def _nearest_signs(self, fit: Cross) -> Tensor:
        """The signs [*index, k, n] that fit best, entry by entry; `fit` [*index, n]."""
        if self._too_many_signs:
            return greedy_signs(fit, self._signed)[0].movedim(0, -2)
        signs = self.signs()
        best = torch.stack([under_signs(fit, s) for s in signs]).argmax(0)
        return torch.tensor(signs, dtype=torch.float64, device=best.device)[best].mT

    def balance(self, grams: Cross) -> Monomial:
        return self.even({p: m.diagonal(dim1=-2, dim2=-1) for p, m in grams.items()})

    def even(self, lengths: Cross) -> Monomial:
        """As `balance`, from the squared lengths of all entries alone, [*index, n]: all that scales need of Grams."""
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
