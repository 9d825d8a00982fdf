"""The spaces that move by themselves; of them the streams, which tables write, and the widest, the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

from hf_align.matching.anchors import anchored
from hf_align.matching.head_families import HeadFamily, head_families
from hf_align.symmetry.spec import SymmetrySpec


def residual(spec: SymmetrySpec) -> str | None:
    """The space that most weights carry, not with heads and not only towards interfaces: the residual stream."""
    return next(_meeting_others(spec), None)


def streams(spec: SymmetrySpec) -> list[str]:
    """The residual stream, and those of other towers: what a table connects to an interface of the model."""
    wide = list(_meeting_others(spec))
    return [s for s in wide if s == wide[0] or any(len(spec.parameters[name]) > 1 for name in anchored(spec, s))]


def _meeting_others(spec: SymmetrySpec) -> Iterator[str]:
    """Of the spaces that move by themselves those that meet other spaces, of most weights first."""
    return (s for s in alone(spec, head_families(spec)) if len(spec.uses(s)) > len(anchored(spec, s)))


def alone(spec: SymmetrySpec, families: list[HeadFamily]) -> list[str]:
    """The spaces that move by themselves, not with the heads they lie in; those of most weights first."""
    grouped = frozenset[str]().union(*(t.spaces for t in families))
    widest_first = sorted(spec.spaces, key=lambda s: -len(spec.uses(s)))
    return [s for s in widest_first if s not in grouped and spec.spaces[s].group is not None]
