"""The spaces that move by themselves; of them the streams, which tables write, and the widest, the residual stream.

Nothing but the stream moves a table, so what the products of tables say of it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from hf_align.matching.anchors import anchored
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import cross
from hf_align.matching.head_families import HeadFamily, head_families
from hf_align.symmetry.elements import Power
from hf_align.symmetry.spec import SymmetrySpec

Tables = Mapping[str, Mapping[Power, Tensor]]
"""By stream, the cross matrices of its tables [n, n] float64, by power."""


def residual(spec: SymmetrySpec) -> str | None:
    """The space that most weights carry, not with heads and not only towards interfaces: the residual stream."""
    return next(_meeting_others(spec), None)


def streams(spec: SymmetrySpec) -> list[str]:
    """The residual stream, and those of other towers: what a table connects to an interface of the model."""
    wide = list(_meeting_others(spec))
    return [s for s in wide if s == wide[0] or any(len(spec.parameters[name]) > 1 for name in anchored(spec, s))]


def products_of_tables(models: Balanced) -> Tables:
    """What the tables of every stream say of it: the vocabulary's, positions, patches."""
    spec = models.spec
    plain = [s for s in streams(spec) if anchored(spec, s) and not spec.spaces[s].index]
    return {s: cross(spec, s, models.a, models.b, {}, anchored(spec, s), models.processes) for s in plain}


def _meeting_others(spec: SymmetrySpec) -> Iterator[str]:
    """Of the spaces that move by themselves those that meet other spaces, of most weights first."""
    return (s for s in alone(spec, head_families(spec)) if len(spec.uses(s)) > len(anchored(spec, s)))


def alone(spec: SymmetrySpec, families: list[HeadFamily]) -> list[str]:
    """The spaces that move by themselves, not with the heads they lie in; those of most weights first."""
    grouped = frozenset[str]().union(*(t.spaces for t in families))
    widest_first = sorted(spec.spaces, key=lambda s: -len(spec.uses(s)))
    return [s for s in widest_first if s not in grouped and spec.spaces[s].group is not None]
