"""Which spaces are of heads, or of experts, and which lie inside them."""

from __future__ import annotations

from dataclasses import dataclass

from hf_align.symmetry.groups import Permutation
from hf_align.symmetry.spec import SymmetrySpec


@dataclass(frozen=True)
class Tree:
    """A space of heads and what is in each of them.

    Attributes:
        inner: the spaces inside each head.
        subheads: the space of heads within a head (query heads that share a key, experts of a group), if any.
        leaves: the spaces inside each sub-head.
    """

    heads: str
    inner: tuple[str, ...]
    subheads: str | None
    leaves: tuple[str, ...] = ()

    @property
    def spaces(self) -> frozenset[str]:
        return frozenset((self.heads, *self.inner, *([self.subheads] if self.subheads else []), *self.leaves))


def trees(spec: SymmetrySpec) -> list[Tree]:
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
        inner = tuple(n for n, s in moving.items() if s.index == (name,))
        leaves = tuple(n for n, s in moving.items() if sub is not None and s.index == (name, sub))
        found.append(Tree(name, inner, sub, leaves))
    return found
