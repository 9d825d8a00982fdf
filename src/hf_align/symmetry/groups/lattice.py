"""From a bound to the largest group below it."""

from __future__ import annotations

from hf_align.symmetry.groups.dense import GeneralLinear, Orthogonal, OrthogonalFixingOnes, OrthogonalFixingOnesUpToSign
from hf_align.symmetry.groups.group import Group
from hf_align.symmetry.groups.monomial import (
    Permutation,
    PermutationUpToSign,
    PositiveScaledPermutation,
    ScaledPermutation,
    SignedPermutation,
)
from hf_align.symmetry.groups.rotary import RotaryCommutant, RotaryUnitary
from hf_align.symmetry.interpreter.bounds import Bound, Ones, Scalars

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
