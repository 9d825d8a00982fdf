"""Products of tables: nothing but the stream moves them, so what they say of it is computed once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hf_align.matching.anchors import anchored
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import cross
from hf_align.matching.stream import streams
from hf_align.symmetry.elements import Power

Tables = Mapping[str, Mapping[Power, Tensor]]
"""By stream, the cross matrices of its tables [n, n] float64, by power."""


def products_of_tables(models: Balanced) -> Tables:
    """What the tables of every stream say of it: the vocabulary's, positions, patches."""
    spec = models.spec
    plain = [s for s in streams(spec) if anchored(spec, s) and not spec.spaces[s].index]
    return {s: cross(spec, s, models.a, models.b, {}, anchored(spec, s), models.processes) for s in plain}
