"""Matching quarter turns together with the signs that each head has beside them.

Queries and keys behind norms of their own are turned alike in all heads that share the gains, but each key head has
signs. Held at the wrong ones, a turn that fits would not be seen to; so the signs are left open for every turn that is
compared, and chosen after.
"""

from __future__ import annotations

import torch

from hf_align.matching.cross import cross
from hf_align.running.network import Weights
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import Element
from hf_align.symmetry.groups import QuarterTurns
from hf_align.symmetry.spec import SymmetrySpec


def signed_beside(spec: SymmetrySpec, space: str) -> list[str]:
    """The spaces of signs beside which a space moves an axis."""
    if not isinstance(spec.group(space), QuarterTurns):
        return []
    return list(dict.fromkeys(f.space for f in spec.factors() if f.space is not None and space in dict(f.beside)))


def match_turns(spec: SymmetrySpec, space: str, a: Weights, b: Weights, elements: Elements) -> dict[str, Element]:
    """The best turns of a space and the best signs beside them, all others held at `elements`."""
    group, signed = spec.group(space), signed_beside(spec, space)
    assert isinstance(group, QuarterTurns)
    others = {s: e for s, e in elements.items() if s not in (space, *signed)}
    seen = {name for s in signed for name in spec.uses(s)}
    gains = cross(spec, space, a, b, others, [name for name in spec.uses(space) if name not in seen])
    heads = [m.reshape(-1, group.size, group.size) for s in signed for m in cross(spec, s, a, b, others).values()]
    found: dict[str, Element] = {space: group.nearest_beside(gains, torch.cat(heads))}
    for name in signed:
        found[name] = spec.group(name).nearest(cross(spec, name, a, b, {**others, **found}))
    return found
