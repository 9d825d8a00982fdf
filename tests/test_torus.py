"""The independent scales of atoms that elementwise products join."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_align.symmetry.derivation.derive import _by_atoms, _monomial_group
from hf_align.symmetry.derivation.torus import torus
from hf_align.symmetry.interpreter.bounds import FIXED, PERMUTATION, Bound, Scalars, monomial
from hf_align.symmetry.interpreter.spaces import fresh

POSITIVE, SIGN, NONZERO = monomial(Scalars.POSITIVE), monomial(Scalars.SIGN), monomial(Scalars.NONZERO)
BOUNDS = [FIXED, PERMUTATION, POSITIVE, SIGN, NONZERO]


@pytest.mark.parametrize(
    ("gate", "up", "kinds"),
    [(PERMUTATION, NONZERO, [Scalars.NONZERO]), (POSITIVE, NONZERO, [Scalars.NONZERO, Scalars.POSITIVE]),
     (SIGN, NONZERO, [Scalars.NONZERO, Scalars.SIGN]), (SIGN, SIGN, [Scalars.SIGN]),
     (POSITIVE, SIGN, [Scalars.POSITIVE, Scalars.SIGN]),
     (PERMUTATION, FIXED, [Scalars.ONE]), (NONZERO, NONZERO, [Scalars.NONZERO] * 2)],
)  # fmt: skip
def test_a_gated_unit(gate: Bound, up: Bound, kinds: list[Scalars]) -> None:
    product, left, right = fresh(4, NONZERO), fresh(4, gate), fresh(4, up)
    found = torus([product, left, right], [(product, left, right)])
    assert list(found.kinds) == kinds


@pytest.mark.parametrize("left", BOUNDS)
def test_one_entry_has_no_scale(left: Bound) -> None:
    """Broadcasting pairs it with axes of any size, and what is added to it does not follow."""
    atoms = [fresh(1, NONZERO), fresh(1, left), fresh(1, NONZERO)]
    assert _monomial_group(atoms, torus(atoms, [(atoms[0], atoms[1], atoms[2])])) is None


def test_what_stands_still_may_be_beside_several_atoms() -> None:
    """It may be cut anywhere without being split, so that a product and its factors are cut elsewhere."""
    whole, rest = fresh(3, FIXED), fresh(9, FIXED)
    left, right = [fresh(n, FIXED) for n in (2, 1, 9)], [fresh(n, NONZERO) for n in (2, 1, 9)]
    found = _by_atoms(list(zip(left, right, strict=True)), [(whole, left[0]), (rest, left[2])])
    products = (whole, whole, rest)
    assert [tuple(a.root.space.serial for a in atoms) for atoms in found] == [
        tuple(a.space.serial for a in atoms) for atoms in zip(products, left, right, strict=True)
    ]


def test_a_square_has_the_square_of_a_scale() -> None:
    square, root = fresh(4, NONZERO), fresh(4, NONZERO)
    found = torus([square, root], [(square, root, root)])
    assert found.kinds == (Scalars.NONZERO,)
    assert found.exponents == {square.space.serial: (2,), root.space.serial: (1,)}


@given(st.lists(st.sampled_from(BOUNDS), min_size=5, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_scales_solve_every_equation_within_the_bounds(bounds: list[Bound], duals: list[bool]) -> None:
    atoms = [fresh(4, b) for b in bounds]
    axes = [a.dual if d else a for a, d in zip(atoms, duals, strict=True)]
    relations = [(axes[0], axes[1], axes[2]), (axes[3], axes[2], axes[4])]
    found = torus(atoms, relations)
    if found.kinds == (Scalars.ONE,):
        return
    for k, kind in enumerate(found.kinds):
        power = {a.space.serial: found.exponents[a.space.serial][k] for a in atoms}
        for relation in relations:
            product, left, right = (-power[a.space.serial] if a.is_dual else power[a.space.serial] for a in relation)
            assert product == left + right or (kind is Scalars.SIGN and (product - left - right) % 2 == 0)
        for atom, bound in zip(atoms, bounds, strict=True):
            exponent, own = power[atom.space.serial], Scalars.ONE if bound.fixed else bound.monomial
            assert not exponent or own is Scalars.NONZERO or own is kind or (
                own is Scalars.POSITIVE and kind is Scalars.NONZERO and exponent % 2 == 0)  # fmt: skip
