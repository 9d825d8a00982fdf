"""The spaces that move by themselves; of them the streams, which tables write, and the widest, the residual stream."""

from __future__ import annotations

from hf_align.matching.anchors import anchored
from hf_align.matching.head_families import HeadFamily, head_families
from hf_align.symmetry.spec import SymmetrySpec


def residual(spec: SymmetrySpec) -> str | None:
    """The space that most weights carry, not with heads and not only towards interfaces: the residual stream."""
    wide = [s for s in alone(spec, head_families(spec)) if _meets_others(spec, s)]
    return wide[0] if wide else None


def streams(spec: SymmetrySpec) -> list[str]:
    """The residual stream, and those of other towers: what a table connects to an interface of the model."""
    first = residual(spec)
    others = [
        s for s in alone(spec, head_families(spec)) if s != first and _meets_others(spec, s) and _has_table(spec, s)
    ]
    return others if first is None else [first, *others]


def _meets_others(spec: SymmetrySpec, space: str) -> bool:
    return len(spec.uses(space)) > len(anchored(spec, space))


def _has_table(spec: SymmetrySpec, space: str) -> bool:
    return any(len(spec.parameters[name]) > 1 for name in anchored(spec, space))


def alone(spec: SymmetrySpec, families: list[HeadFamily]) -> list[str]:
    """The spaces that move by themselves, not with the heads they lie in; those of most weights first."""
    grouped = frozenset[str]().union(*(t.spaces for t in families))
    widest_first = sorted(spec.spaces, key=lambda s: -len(spec.uses(s)))
    return [s for s in widest_first if s not in grouped and spec.spaces[s].group is not None]
