"""Factors of coordinates in a fixed order, and quarter turns of planes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hf_align.symmetry.elements import Monomial, Power
from hf_align.symmetry.groups.fit import Cross, fit_by_entry
from hf_align.symmetry.groups.monomial import ScaledPermutation
from hf_align.symmetry.interpreter.bounds import Scalars
from hf_align.symmetry.interpreter.rotations import Rotations


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
        return self._by_class({p: m.diagonal(dim1=-2, dim2=-1) for p, m in cross.items()}, self._nearest_signs)

    def even(self, lengths: Cross) -> Monomial:
        return self._by_class(lengths, self._even_scale)

    def _by_class(self, by_entry: Cross, choose: Callable[[Cross], Tensor]) -> Monomial:
        members = self._members()
        total = {p: entries @ members.T for p, entries in by_entry.items()}
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
            fit = {p: fit_by_entry(element, p, m) for p, m in cross.items()}
            gains = {p: m @ members.T for p, m in fit.items() if not p[-1]}
            own = sum((m @ planes.T for p, m in fit.items() if p[-1]), torch.zeros(len(planes), dtype=torch.float64))
            beside = (fit_by_entry(element, self._turning, signed) @ planes.T).abs().sum(0)
            best = self._best_gain(gains) @ inside.T
            values.append(best + own.abs() + beside)
            scale = self._nearest_signs(gains) @ members
            scale[..., -1, :] = torch.where(own < 0, -1.0, 1.0).double() @ planes
            scales.append(scale)
        return self._element(values[1] > values[0], *scales)

    @property
    def _turning(self) -> Power:
        """By which what rotates moves."""
        return (*(0 for _ in self.kinds[1:]), 1)
