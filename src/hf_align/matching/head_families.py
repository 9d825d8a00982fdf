"""Which spaces are of heads, or of experts, and which lie inside them."""

from __future__ import annotations

from collections.abc import Collection
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
        held: other spaces inside, which lie in no weight without one of those above: heads are not compared by them.
        meeting: all spaces inside that meet another one in a weight, as the channels that a convolution in groups reads
            and writes. Heads are compared by other weights; then each of these is solved by itself.
    """

    heads: str
    inner: tuple[str, ...]
    subheads: str | None
    leaves: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    meeting: tuple[str, ...] = ()

    @property
    def spaces(self) -> frozenset[str]:
        subheads = [self.subheads] if self.subheads else []
        return frozenset((self.heads, *self.inner, *subheads, *self.leaves, *self.held))


def spaces_of_heads(spec: SymmetrySpec) -> frozenset[str]:
    """The permuted spaces of heads: in some axis each of their elements is a run of entries that another space moves.

    Those of one shared key or value are among them, inside which nothing differs from head to head.
    """
    segments = (segment for axes in spec.parameters.values() for axis in axes for segment in axis)
    outer = (factor.space for segment in segments for at, factor in enumerate(segment)
             if any(inside.space is not None for inside in segment[at + 1 :]))  # fmt: skip
    groups = {name: spec.spaces[name].group for name in outer if name is not None}
    return frozenset(name for name, group in groups.items() if group is not None and group.permutes)


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
        seen = _together(spec, name, {*inner, *leaves})
        alone = {s for spaces in seen if len(spaces) == 1 for s in spaces}
        meeting = {s for spaces in seen if len(spaces) > 1 for s in spaces}
        found.append(HeadFamily(
            name, tuple(n for n in inner if n in alone), sub, tuple(n for n in leaves if n in alone),
            tuple(n for n in (*inner, *leaves) if n not in alone), tuple(n for n in (*inner, *leaves) if n in meeting),
        ))  # fmt: skip
    return found


def _together(spec: SymmetrySpec, heads: str, inside: Collection[str]) -> list[set[str]]:
    """Which spaces inside of heads each block of a weight has."""
    names = dict.fromkeys(name for space in inside for name in spec.uses(space))
    blocks = [block for name in names for block in spec.blocks(name)]
    return [
        {move.space for move in block.moves} & {*inside}
        for block in blocks
        if any(True for _ in block.occurrences(heads))
    ]
