"""Which spaces are of heads, or of experts, and which lie inside them."""

from __future__ import annotations

from dataclasses import dataclass

from hf_align.symmetry.groups import Permutation
from hf_align.symmetry.spec import SymmetrySpec


@dataclass(frozen=True)
class HeadFamily:
    """A space of heads and what is in each of them.

    Attributes:
        inner: the spaces inside each head.
        subheads: the space of heads within a head (query heads that share a key, experts of a group), if any.
        leaves: the spaces inside each sub-head.
        held: other spaces inside, which stay as they are: each meets one of those above in a weight, and heads are
            compared under the best element of one space at a time.
    """

    heads: str
    inner: tuple[str, ...]
    subheads: str | None
    leaves: tuple[str, ...] = ()
    held: tuple[str, ...] = ()

    @property
    def spaces(self) -> frozenset[str]:
        subheads = [self.subheads] if self.subheads else []
        return frozenset((self.heads, *self.inner, *subheads, *self.leaves, *self.held))


def head_families(spec: SymmetrySpec) -> list[HeadFamily]:
    """Every permuted space over which others differ, with those; one of these that is only permuted is of
    sub-heads."""
    found = []
    for name, space in spec.spaces.items():
        inside = {s: spec.spaces[s] for s in spec.indexed_by(name)}
        if space.index or space.group is None or not space.group.permutes:
            continue
        if all(s.index != (name,) for s in inside.values()):
            continue
        sub = next((n for n, s in inside.items() if s.index == (name,) and isinstance(s.group, Permutation)), None)
        moving = {n: s for n, s in inside.items() if s.group is not None and n != sub}
        inner = [n for n, s in moving.items() if s.index == (name,)]
        leaves = [n for n, s in moving.items() if sub is not None and s.index == (name, sub)]
        apart = _apart(spec, [*inner, *leaves])
        held = tuple(n for n in (*inner, *leaves) if n not in apart)
        found.append(HeadFamily(name, tuple(n for n in inner if n in apart), sub,
                          tuple(n for n in leaves if n in apart), held))  # fmt: skip
    return found


def _apart(spec: SymmetrySpec, spaces: list[str]) -> list[str]:
    """Those of spaces that meet no earlier one in a weight."""
    kept: list[str] = []
    for space in spaces:
        blocks = [b for name in spec.uses(space) for b in spec.blocks(name) if any(True for _ in b.occurrences(space))]
        if not any(True for block in blocks for other in kept for _ in block.occurrences(other)):
            kept.append(space)
    return kept
