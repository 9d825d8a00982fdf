"""The spaces that move by themselves, and the widest of them, the residual stream."""

from __future__ import annotations

from hf_align.matching.anchors import anchored
from hf_align.matching.heads import Tree, trees
from hf_align.symmetry.spec import SymmetrySpec


def residual(spec: SymmetrySpec) -> str | None:
    """The space that most weights carry, not with heads and not only towards interfaces: the residual stream."""
    wide = [s for s in alone(spec, trees(spec)) if len(list(spec.uses(s))) > len(anchored(spec, s))]
    return wide[0] if wide else None


def alone(spec: SymmetrySpec, families: list[Tree]) -> list[str]:
    """The spaces that move by themselves, not with the heads they lie in; those of most weights first."""
    grouped = frozenset[str]().union(*(t.spaces for t in families))
    widest_first = sorted(spec.spaces, key=lambda s: -len(list(spec.uses(s))))
    return [s for s in widest_first if s not in grouped and spec.spaces[s].group is not None]
