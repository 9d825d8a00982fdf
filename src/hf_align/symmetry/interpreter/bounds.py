"""How far a space may be changed: the largest group of maps that every op on it allows.

A bound starts at the general linear group and only ever falls. It is kept as the set of structures an element must
preserve, so that the meet of two bounds is the union of their structures; the named groups of the lattice (`groups`)
are read off at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

from hf_align.symmetry.interpreter.rotations import Rotations


class Scalars(IntEnum):
    """Which non-zero factors the entries of a monomial matrix may have; `meet` is their intersection.

    Each divides those that contain it, so that the greatest common divisor is the meet.
    """

    ONE = 1
    COMMON_SIGN = 2
    """One sign, the same for all entries."""
    POSITIVE = 3
    SIGN = 4
    NONZERO = 12

    def meet(self, other: Scalars) -> Scalars:
        return Scalars(math.gcd(self, other))


class Ones(IntEnum):
    """What an element does to the all-ones vector: anything, g1 = ±1, or g1 = 1."""

    MOVED = 0
    UP_TO_SIGN = 1
    FIXED = 2


@dataclass(frozen=True)
class Bound:
    """The invertible maps g that keep every structure named here.

    Attributes:
        fixed: only the identity; the axis is an interface of the model or an op needs its exact order.
        monomial: g is a permutation times these factors (elementwise functions); None if g may mix coordinates.
        metric: gᵀg = 1 (norms and lengths).
        ones: g1 = 1 and gᵀ1 = 1 (means over the axis, constants added along it), or both up to one sign (deviations
            from the mean).
        rotations: g commutes with these rotations (rotary position embedding).
    """

    fixed: bool = False
    monomial: Scalars | None = None
    metric: bool = False
    ones: Ones = Ones.MOVED
    rotations: Rotations | None = None

    @property
    def free(self) -> bool:
        """True for the general linear group."""
        return self == FREE

    @property
    def of_parts(self) -> Bound:
        """What is left of it to the parts of a compound space, each of which moves by itself: no two need have the same
        sign, and rotations are of the whole."""
        if self.rotations is not None:
            return FIXED
        ones = Ones.FIXED if self.ones is Ones.UP_TO_SIGN else self.ones
        return replace(self, ones=ones, monomial=Scalars.ONE if self.monomial is Scalars.COMMON_SIGN else self.monomial)

    def meet(self, other: Bound) -> Bound:
        """The largest bound below both."""
        rotations, clash = self.rotations or other.rotations, False
        if self.rotations is not None and other.rotations is not None and self.rotations != other.rotations:
            rotations = self.rotations.meet(other.rotations)
            clash = rotations is None
        monomial = self.monomial
        if other.monomial is not None:
            monomial = other.monomial if monomial is None else monomial.meet(other.monomial)
        fixed = self.fixed or other.fixed or clash
        if fixed:
            return FIXED
        return replace(self, monomial=monomial, metric=self.metric or other.metric,
                       ones=max(self.ones, other.ones), rotations=rotations)._settled()  # fmt: skip

    def _settled(self) -> Bound:
        """Lengths leave only signs of the factors of a monomial matrix; fixing the all-ones vector leaves none, fixing
        it up to sign only one for all."""
        if self.monomial is None:
            return self
        scalars = self.monomial
        if self.ones is not Ones.MOVED:
            scalars = scalars.meet(Scalars.ONE if self.ones is Ones.FIXED else Scalars.COMMON_SIGN)
        elif self.metric:
            scalars = scalars.meet(Scalars.SIGN)
        return Bound(monomial=scalars, rotations=self.rotations)


FREE = Bound()
FIXED = Bound(fixed=True)
METRIC = Bound(metric=True)
ONES = Bound(ones=Ones.FIXED)
ONES_UP_TO_SIGN = Bound(ones=Ones.UP_TO_SIGN)


def monomial(scalars: Scalars) -> Bound:
    """Permutations times the given factors."""
    return Bound(monomial=scalars)


PERMUTATION = monomial(Scalars.ONE)
