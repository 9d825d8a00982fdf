"""The independent scales of units that move together.

Atoms that elementwise products join share one permutation, but each may be scaled: a product by the product of the
scales of its factors. So the logarithms of the scales solve s(product) = s(left) + s(right), with s = 0 for an atom
that admits none: positive scales over the rationals, signs over the integers modulo two. A basis of the solutions is
a torus that acts beside the permutation, with an exponent for each atom and each of its coordinates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from hf_align.symmetry.elements import PRIMAL, Power
from hf_align.symmetry.interpreter.bounds import Scalars
from hf_align.symmetry.interpreter.spaces import Axis

Vector = dict[int, int]
"""Coefficients by atom."""
Row = dict[int, Fraction]
Field = Callable[[Fraction], Fraction]
AtomicRelation = tuple[Axis, Axis, Axis]
"""The product, left, and right atoms of an elementwise product."""


@dataclass(frozen=True)
class Torus:
    """The scales of a class of atoms.

    Attributes:
        kinds: which factors each of them may have.
        exponents: by atom, the power of each.
    """

    kinds: tuple[Scalars, ...]
    exponents: Mapping[int, Power]


def _modulo_two(x: Fraction) -> Fraction:
    return x % 2


def _rational(x: Fraction) -> Fraction:
    return x


def torus(atoms: Iterable[Axis], relations: Iterable[AtomicRelation]) -> Torus:
    """The scales that relations and bounds leave to a class of atoms; a single ONE where there is none."""
    allowed = {a.space.serial: Scalars.ONE if a.space.bound.fixed else a.space.bound.monomial or Scalars.NONZERO
               for a in sorted(atoms, key=lambda a: a.space.serial)}  # fmt: skip
    equations = [_equation(r) for r in relations]

    def solve(kinds: tuple[Scalars, ...], field: Field = _rational) -> list[Vector]:
        return _kernel(equations, [a for a, s in allowed.items() if s in kinds], field)

    positive = _basis([*solve((Scalars.NONZERO,)), *solve((Scalars.NONZERO, Scalars.POSITIVE))])
    signs = solve((Scalars.NONZERO, Scalars.SIGN), _modulo_two)
    shared = [*solve((Scalars.COMMON_SIGN,), _modulo_two),
              *solve((Scalars.NONZERO, Scalars.SIGN, Scalars.COMMON_SIGN), _modulo_two)]  # fmt: skip
    found = [*_joined(positive, signs), *_shared(shared, signs)]
    if not found:
        return Torus((Scalars.ONE,), dict.fromkeys(allowed, PRIMAL))
    return Torus(tuple(s for s, _ in found), {a: tuple(v.get(a, 0) for _, v in found) for a in allowed})


def _equation(relation: AtomicRelation) -> Vector:
    """s(product) - s(left) - s(right)."""
    row: Vector = defaultdict(int)
    for atom, sign in zip(relation, (1, -1, -1), strict=True):
        row[atom.space.serial] += -sign if atom.is_dual else sign
    return row


def _joined(positive: list[Vector], signs: list[Vector]) -> Iterator[tuple[Scalars, Vector]]:
    """A positive scale by whose odd powers signs may go as well has both. Of the other signs the one that most atoms
    share is kept, a stream's: beside it each gain of a branch has its own, and none once it is made positive."""
    used: list[Vector] = []
    for vector in positive:
        odd = {a: x % 2 for a, x in vector.items() if x % 2}
        both = _spans(signs, odd) and not _spans(used, odd)
        used += [odd] if both else []
        yield (Scalars.NONZERO if both else Scalars.POSITIVE), vector
    alone = [sign for sign in signs if not _spans(used, sign)]
    if alone:
        yield Scalars.SIGN, max(alone, key=len)


def _shared(vectors: list[Vector], signs: list[Vector]) -> Iterator[tuple[Scalars, Vector]]:
    """Of the signs that all entries of an atom share and none can have for itself, the one that most atoms share."""
    alone = [vector for vector in vectors if not _spans(signs, vector)]
    if alone:
        yield Scalars.COMMON_SIGN, max(alone, key=len)


def _basis(vectors: list[Vector]) -> list[Vector]:
    """Those that are no combination of the ones before."""
    chosen: list[Vector] = []
    for vector in vectors:
        chosen += [] if _spans(chosen, vector, _rational) else [vector]
    return chosen


def _spans(vectors: list[Vector], vector: Vector, field: Field = _modulo_two) -> bool:
    """Whether a vector is a combination of others."""
    return len(_reduce([*vectors, vector], field)) == len(_reduce(vectors, field))


def _kernel(equations: list[Vector], unknowns: list[int], field: Field = _rational) -> list[Vector]:
    """Primitive integer vectors that span the solutions; all but the unknowns are zero."""
    open_ = set(unknowns)
    rows = _reduce([{a: x for a, x in e.items() if a in open_} for e in equations], field)
    free = [a for a in unknowns if a not in rows]
    return [_primitive({a: Fraction(1)} | {at: field(-r[a]) for at, r in rows.items() if a in r}) for a in free]


def _reduce(equations: list[Vector], field: Field) -> dict[int, Row]:
    """The reduced echelon form, rows by pivot."""
    rows: dict[int, Row] = {}
    for equation in equations:
        row = {a: y for a, x in equation.items() if (y := field(Fraction(x)))}
        for pivot in [a for a in row if a in rows]:
            row = _minus(row, row[pivot], rows[pivot], field)
        if row:
            lead = min(row)
            row = {a: x / row[lead] for a, x in row.items()}
            rows = {at: _minus(r, r[lead], row, field) if lead in r else r for at, r in rows.items()} | {lead: row}
    return rows


def _minus(row: Row, factor: Fraction, other: Row, field: Field) -> Row:
    return {a: x for a in {**row, **other} if (x := field(row.get(a, Fraction()) - factor * other.get(a, Fraction())))}


def _primitive(vector: Row) -> Vector:
    common = math.lcm(*(x.denominator for x in vector.values()))
    return {a: int(x * common) for a, x in vector.items()}
