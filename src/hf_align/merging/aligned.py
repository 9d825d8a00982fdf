"""Two models in one basis, and what a merge of them is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_align.running.network import Weights
from hf_align.symmetry.spec import SymmetrySpec

Mix = Callable[[str, float], Tensor]
"""The merge of a parameter, by its name in memory and the weight of B; in the dtype of A's."""


@dataclass(frozen=True)
class Aligned:
    """Two models of one architecture in one basis.

    Attributes:
        a, b: weights by name in memory, computed as they are read.
    """

    spec: SymmetrySpec
    a: Weights
    b: Weights
