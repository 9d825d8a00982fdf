"""What commutes with rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hf_align.symmetry.elements import DUAL, PRIMAL, Element, Matrix
from hf_align.symmetry.groups.dense import Dense, GeneralLinear
from hf_align.symmetry.groups.fit import Cross, summed
from hf_align.symmetry.groups.linear_algebra import geometric_mean_gauge, polar
from hf_align.symmetry.interpreter.rotations import Rotations


@dataclass(frozen=True)
class RotaryCommutant(Dense):
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
        blocks, still = self._restrict(summed(cross))
        return Matrix(self._assemble([_complex_polar(z) for z in blocks], polar(still)))

    def score(self, cross: Cross) -> Tensor:
        blocks, still = self._restrict(summed(cross))
        parts = [2 * torch.linalg.svdvals(z).sum((-1, -2)) for z in blocks]
        return torch.stack([*parts, torch.linalg.svdvals(still).sum(-1)]).sum(0)

    def balance(self, grams: Cross) -> Element:
        if not self.has_gauge or not {PRIMAL, DUAL} <= set(grams):
            return super().balance(grams)
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
