"""The lattice of groups: for each, its random elements, its Lie algebra, its gauge, and its nearest element.

Sources: Procrustes and assignment as in Git Re-Basin (arXiv 2209.04836, section 3.2) and Theus et al. (2506.22712,
section 4); balancing by the geometric mean of two Grams, after which the general linear gauge is reduced to an
orthogonal one.
"""

from hf_align.symmetry.groups.dense import GeneralLinear, Orthogonal, OrthogonalFixingOnes, OrthogonalFixingOnesUpToSign
from hf_align.symmetry.groups.fit import Cross, assign, sign
from hf_align.symmetry.groups.group import Group
from hf_align.symmetry.groups.lattice import group_of
from hf_align.symmetry.groups.linear_algebra import geometric_mean_gauge, polar
from hf_align.symmetry.groups.monomial import (
    Permutation,
    PermutationUpToSign,
    PositiveScaledPermutation,
    ScaledPermutation,
    SignedPermutation,
    TorusPermutation,
)
from hf_align.symmetry.groups.rotary import RotaryCommutant, RotaryUnitary
from hf_align.symmetry.groups.scaling import QuarterTurns, Scaling

__all__ = [
    "Cross",
    "GeneralLinear",
    "Group",
    "Orthogonal",
    "OrthogonalFixingOnes",
    "OrthogonalFixingOnesUpToSign",
    "Permutation",
    "PermutationUpToSign",
    "PositiveScaledPermutation",
    "QuarterTurns",
    "RotaryCommutant",
    "RotaryUnitary",
    "ScaledPermutation",
    "Scaling",
    "SignedPermutation",
    "TorusPermutation",
    "assign",
    "geometric_mean_gauge",
    "group_of",
    "polar",
    "sign",
]
