"""How far a space may be changed: the largest group of maps that every op on it allows.

A bound starts at the general linear group and only ever falls. It is kept as the set of structures an element must
preserve, so that the meet of two bounds is the union of their structures; the named groups of the lattice (`groups.py`)
are read off at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from hf_align.symmetry.rotations import Rotations


class Scalars(IntEnum):
    """Which non-zero factors the entries of a monomial matrix may have; `meet` is their intersection."""

    ONE = 1
    SIGN = 2
    POSITIVE = 3
    NONZERO = 6

    def meet(self, other: Scalars) -> Scalars:
        if self is other or other is Scalars.NONZERO:
            return self
        return other if self is Scalars.NONZERO else Scalars.ONE


@dataclass(frozen=True)
class Bound:
    """The invertible maps g that keep every structure named here.

    Attributes:
        fixed: only the identity; the axis is an interface of the model or an op needs its exact order.
        monomial: g is a permutation times these factors (elementwise functions); None if g may mix coordinates.
        metric: gᵀg = 1 (norms and lengths).
        ones: g1 = 1 and gᵀ1 = 1 (means over the axis, constants added along it).
        rotations: g commutes with these rotations (rotary position embedding).
    """

    fixed: bool = False
    monomial: Scalars | None = None
    metric: bool = False
    ones: bool = False
    rotations: Rotations | None = None

    @property
    def free(self) -> bool:
        """True for the general linear group."""
        return self == FREE

    def meet(self, other: Bound) -> Bound:
        """The largest bound below both."""
        rotations = self.rotations or other.rotations
        clash = self.rotations is not None and other.rotations not in (None, self.rotations)
        monomial = self.monomial
        if other.monomial is not None:
            monomial = other.monomial if monomial is None else monomial.meet(other.monomial)
        fixed = self.fixed or other.fixed or clash
        if fixed:
            return FIXED
        return replace(self, monomial=monomial, metric=self.metric or other.metric,
                       ones=self.ones or other.ones, rotations=rotations)._settled()  # fmt: skip

    def _settled(self) -> Bound:
        """Lengths leave only signs of the factors of a monomial matrix; fixing the all-ones vector leaves none."""
        if self.monomial is None:
            return self
        scalars = self.monomial
        if self.ones:
            scalars = Scalars.ONE
        elif self.metric:
            scalars = scalars.meet(Scalars.SIGN)
        return Bound(monomial=scalars, rotations=self.rotations)


FREE = Bound()
FIXED = Bound(fixed=True)
METRIC = Bound(metric=True)
ONES = Bound(ones=True)


def monomial(scalars: Scalars) -> Bound:
    """Permutations times the given factors."""
    return Bound(monomial=scalars)


PERMUTATION = monomial(Scalars.ONE)
