"""Spaces and the algebra of reshapes: every tensor axis is a product of spaces, or a sum of such products.

`view` refines an axis into a product, `split` and `cat` into a sum, and an op that needs two axes to agree unifies
them. The state is a union-find forest whose links carry a parity: `g` on the child is `g` or `g⁻ᵀ` on the parent. An
axis that meets its own dual (a length: x·x) must therefore satisfy g = g⁻ᵀ, which is how orthogonality is *derived*.

The algebra of reshapes follows the view ops of `torch.distributed.tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from hf_align.symmetry.interpreter.bounds import FIXED, FREE, METRIC, Bound
from hf_align.tracing.program import Evidence

_serial = count()


class SpaceMismatchError(Exception):
    """Two axes cannot be made to agree; the rule that asked pins what it touches instead."""


class Kind(Enum):
    """What a space is made of."""

    ATOM = "atom"
    PRODUCT = "product"
    SUM = "sum"


@dataclass(eq=False)
class Space:
    """A vector space of `size` dimensions; atoms carry a bound, products (row-major) and sums carry parts."""

    size: int
    kind: Kind = Kind.ATOM
    parts: tuple[Axis, ...] = ()
    bound: Bound = FREE
    evidence: list[Evidence] = field(default_factory=list)
    link: Axis | None = None
    serial: int = field(default_factory=lambda: next(_serial))


@dataclass(frozen=True)
class Axis:
    """A space as one tensor carries it: primal (g acts) or dual (g⁻ᵀ acts).

    Attributes:
        order: which coordinate of the space each entry is, where an op has reordered them.
    """

    space: Space
    is_dual: bool = False
    order: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.space.size

    @property
    def dual(self) -> Axis:
        return Axis(self.space, not self.is_dual, self.order)

    def _oriented(self, parts: Iterable[Axis]) -> tuple[Axis, ...]:
        return tuple(p.dual if self.is_dual else p for p in parts)

    @property
    def root(self) -> Axis:
        """What this axis was found to be the same as; the way there is halved for those who come next.

        Reference:
            Tarjan & van Leeuwen, Worst-case analysis of set union algorithms, 1984, section 2 (path halving).
        """
        space, is_dual = self.space, self.is_dual
        while (link := space.link) is not None:
            if (onward := link.space.link) is not None:
                link = space.link = Axis(onward.space, onward.is_dual != link.is_dual)
            space, is_dual = link.space, link.is_dual != is_dual
        return self if space is self.space else Axis(space, is_dual, self.order)

    @property
    def factors(self) -> tuple[Axis, ...]:
        """The axis as a product, outermost first; empty for an axis of size one."""
        axis = self.root
        if axis.space.kind is Kind.PRODUCT:
            return tuple(f for p in axis._oriented(axis.space.parts) for f in p.factors)
        return () if axis.size == 1 and axis.space.kind is Kind.ATOM else (axis,)

    @property
    def segments(self) -> tuple[Axis, ...]:
        """The axis as a sum, in order."""
        axis = self.root
        if axis.space.kind is Kind.SUM:
            return tuple(s for p in axis._oriented(axis.space.parts) for s in p.segments)
        return (axis,)

    @property
    def atoms(self) -> tuple[Axis, ...]:
        """Every atom below this axis, in order, repeated as often as it occurs."""
        axis = self.root
        if axis.space.kind is Kind.ATOM:
            return (axis,)
        return tuple(a for p in axis._oriented(axis.space.parts) for a in p.atoms)


def fresh(size: int, bound: Bound = FREE) -> Axis:
    """A new space that nothing is known about."""
    return Axis(Space(size, bound=bound))


def unit() -> Axis:
    """An axis of size one, which nothing moves."""
    return fresh(1)


def product(axes: Iterable[Axis]) -> Axis:
    """The row-major product of axes, flattened."""
    factors = tuple(f for a in axes for f in a.factors)
    if len(factors) == 1:
        return factors[0]
    return Axis(Space(math.prod(f.size for f in factors), Kind.PRODUCT, factors)) if factors else unit()


def direct_sum(axes: Iterable[Axis]) -> Axis:
    """The concatenation of axes, flattened."""
    segments = tuple(s for a in axes for s in a.segments if s.size)
    if len(segments) == 1:
        return segments[0]
    return Axis(Space(sum(s.size for s in segments), Kind.SUM, segments))


def lower(axis: Axis, bound: Bound, why: Evidence) -> None:
    """Lower every atom of the axis to `bound`, remembering why."""
    bound = bound if axis.root.space.kind is Kind.ATOM else bound.of_parts
    for atom in axis.atoms:
        met = atom.space.bound.meet(bound)
        if met != atom.space.bound:
            atom.space.bound = met
            atom.space.evidence.append(why)


def require_same_order(a: Axis, b: Axis) -> None:
    """Entries correspond only where both show the coordinates of their spaces in the same order.

    Raises:
        SpaceMismatchError: they do not.
    """
    if a.order != b.order:
        raise SpaceMismatchError("reordered coordinates meet others")


def bind(axis: Axis, target: Axis) -> None:
    """Replace the atom `axis` by `target`, which inherits its bound."""
    axis, target = axis.root, target.root
    require_same_order(axis, target)
    if axis.space is target.space:
        return
    if any(atom.space is axis.space for atom in target.atoms):
        raise SpaceMismatchError("an axis would contain itself")
    plain = Axis(target.space, target.is_dual)
    axis.space.link = plain.dual if axis.is_dual else plain
    bound = axis.space.bound if target.space.kind is Kind.ATOM else axis.space.bound.of_parts
    for atom in target.atoms:
        atom.space.bound = atom.space.bound.meet(bound)
        atom.space.evidence.extend(axis.space.evidence)


def _stands_still(axis: Axis) -> bool:
    """Whether nothing moves an axis, so that it may be cut anywhere."""
    return all(a.space.bound.fixed for a in axis.atoms)


def split_product(axis: Axis, outer: int) -> tuple[Axis, Axis]:
    """Factor an axis as (outer, rest); refines atoms where it must.

    Raises:
        SpaceMismatchError: the sizes do not divide along factor boundaries.
    """
    axis = axis.root
    if outer == 1:
        return unit(), axis
    if outer == axis.size:
        return axis, unit()
    if axis.size % outer:
        raise SpaceMismatchError(f"an axis of {axis.size} cannot be viewed with {outer} rows")
    if axis.space.kind is Kind.ATOM:
        high, low = fresh(outer), fresh(axis.size // outer)
        bind(axis, product([high, low]))
        return high, low
    if axis.space.kind is Kind.PRODUCT:
        return _split_factors(axis.factors, outer)
    return _split_sum_into_rows(axis, outer)


def _split_factors(factors: tuple[Axis, ...], outer: int) -> tuple[Axis, Axis]:
    done = 1
    for i, factor in enumerate(factors):
        if done == outer:
            return product(factors[:i]), product(factors[i:])
        if done * factor.size > outer:
            if outer % done:
                raise SpaceMismatchError(f"{outer} does not fall between the factors {[f.size for f in factors]}")
            high, low = split_product(factor, outer // done)
            return product([*factors[:i], high]), product([low, *factors[i + 1 :]])
        done *= factor.size
    return product(factors), unit()


def _split_sum_into_rows(axis: Axis, outer: int) -> tuple[Axis, Axis]:
    """A sum of blocks seen as rows: all rows share one space, and the order of the rows is fixed."""
    row = axis.size // outer
    if any(s.size % row for s in axis.segments):
        if _stands_still(axis):
            return fresh(outer, FIXED), fresh(row, FIXED)
        raise SpaceMismatchError(f"segments {[s.size for s in axis.segments]} are not whole rows of {row}")
    highs, low = [], None
    for segment in axis.segments:
        high, inner = split_product(segment, segment.size // row)
        highs.append(high if high.size > 1 else fresh(1))
        if low is not None:
            unify(low, inner)
        low = inner
    assert low is not None
    high = fresh(outer, FIXED)
    for part in highs:
        for atom in part.atoms:
            atom.space.bound = FIXED
    axis.space.link = product([high, low]).dual if axis.is_dual else product([high, low])
    return high, low


def split_sum(axis: Axis, first: int) -> tuple[Axis, Axis]:
    """Cut an axis into (first, rest); refines atoms where it must.

    Raises:
        SpaceMismatchError: the cut falls inside a product.
    """
    axis = axis.root
    if axis.space.kind is Kind.ATOM:
        if axis.space.bound.fixed:
            return fresh(first, FIXED), fresh(axis.size - first, FIXED)
        head, tail = fresh(first), fresh(axis.size - first)
        bind(axis, direct_sum([head, tail]))
        return head, tail
    if axis.space.kind is Kind.PRODUCT:
        factors = axis.factors
        row = axis.size // factors[0].size
        if first % row and _stands_still(axis):
            return fresh(first, FIXED), fresh(axis.size - first, FIXED)
        if first % row:
            raise SpaceMismatchError(f"a cut at {first} falls inside a row of {row}")
        head, tail = split_sum(factors[0], first // row)
        return product([head, *factors[1:]]), product([tail, *factors[1:]])
    done = 0
    segments = axis.segments
    for i, segment in enumerate(segments):
        if done == first:
            return direct_sum(segments[:i]), direct_sum(segments[i:])
        if done + segment.size > first:
            head, tail = split_sum(segment, first - done)
            return direct_sum([*segments[:i], head]), direct_sum([tail, *segments[i + 1 :]])
        done += segment.size
    raise SpaceMismatchError(f"a cut at {first} lies beyond an axis of {axis.size}")


def cut(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Cut an axis into consecutive pieces of the given sizes."""
    pieces, rest = [], axis
    for size in sizes[:-1]:
        head, rest = split_sum(rest, size)
        pieces.append(head)
    return [*pieces, rest]


def pair_atoms(a: Axis, b: Axis, visit: Callable[[Axis, Axis], None]) -> None:
    """Refine two axes of equal size until their atoms correspond, and visit each corresponding pair.

    Raises:
        SpaceMismatchError: no common refinement exists.
    """
    a, b = a.root, b.root
    if a.size != b.size:
        raise SpaceMismatchError(f"axes of {a.size} and {b.size} dimensions meet")
    if a.space is b.space and a.is_dual == b.is_dual and a.space.kind is not Kind.ATOM:
        for atom in a.atoms:
            visit(atom, atom)
        return
    if Kind.ATOM in (a.space.kind, b.space.kind):
        visit(a, b)
        return
    if a.space.kind is not b.space.kind:
        _pair_product_with_sum(a, b, visit)
        return
    of_product = a.space.kind is Kind.PRODUCT
    left = list(a.factors if of_product else a.segments)
    right = list(b.factors if of_product else b.segments)
    divide = split_product if of_product else split_sum
    while left and right:
        x, y = left.pop(0).root, right.pop(0).root
        if x.size < y.size:
            y, rest = divide(y, x.size)
            right = [*(rest.factors if of_product else rest.segments), *right]
        elif y.size < x.size:
            x, rest = divide(x, y.size)
            left = [*(rest.factors if of_product else rest.segments), *left]
        pair_atoms(x, y, visit)


def _pair_product_with_sum(a: Axis, b: Axis, visit: Callable[[Axis, Axis], None]) -> None:
    whole, blocks = (a, b) if a.space.kind is Kind.PRODUCT else (b, a)
    swap = whole is b
    pieces = cut(whole, [s.size for s in blocks.segments])
    for piece, block in zip(pieces, blocks.segments, strict=True):
        pair_atoms(block, piece, visit) if swap else pair_atoms(piece, block, visit)


def unify(a: Axis, b: Axis, why: Evidence | None = None) -> None:
    """Make two axes carry the same element. An axis that meets its own dual becomes orthogonal."""

    def join(x: Axis, y: Axis) -> None:
        x, y = x.root, y.root
        require_same_order(x, y)
        if x.space is y.space:
            if x.is_dual != y.is_dual and why is not None:
                lower(x, METRIC, why)
            elif x.is_dual != y.is_dual:
                x.space.bound = x.space.bound.meet(METRIC)
        elif x.space.kind is Kind.ATOM:
            bind(x, y)
        else:
            bind(y, x)

    pair_atoms(a, b, join)
