"""Products of tables: nothing but the stream moves them, so what they say of it is computed once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hf_align.matching.anchors import anchored
from hf_align.matching.cross import Weights, cross
from hf_align.matching.stream import streams
from hf_align.runtime.processes import ALONE, Processes
from hf_align.symmetry.elements import Power
from hf_align.symmetry.spec import SymmetrySpec

Tables = Mapping[str, Mapping[Power, Tensor]]
"""By stream, the cross matrices of its tables [n, n] float64, by power."""


def products_of_tables(spec: SymmetrySpec, a: Weights, b: Weights, processes: Processes = ALONE) -> Tables:
    """What the tables of every stream say of it: the vocabulary's, positions, patches."""
    plain = [s for s in streams(spec) if anchored(spec, s) and not spec.spaces[s].index]
    return {s: cross(spec, s, a, b, {}, anchored(spec, s), processes) for s in plain}
