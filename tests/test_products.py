"""Where two values are multiplied entry by entry, the result's space has the structure of theirs, or stands still."""

from __future__ import annotations

import pytest

from hf_align.symmetry.interpreter.call import refine
from hf_align.symmetry.interpreter.spaces import Axis, direct_sum, fresh, product
from hf_align.symmetry.interpreter.values import Relation


def twice(size: int) -> Axis:
    """(1 + 1) ⊗ n: one space, seen in two blocks."""
    return product([direct_sum([fresh(1), fresh(1)]), fresh(size)])


@pytest.mark.parametrize("size", [2, 4])
def test_two_spaces_are_no_product_of_what_one_space_fills(size: int) -> None:
    """Of two entries each, the atoms are as large together as those of the factors: no size tells them apart."""
    blocks = [fresh(size), fresh(size)]
    relations = [Relation(direct_sum(blocks), twice(size), twice(size))]
    refine(relations)
    assert relations == []
    assert all(block.root.space.bound.fixed for block in blocks)


def test_a_product_that_has_no_structure_takes_that_of_its_factors() -> None:
    relation = Relation(fresh(8), twice(4), twice(4))
    refine(relations := [relation])
    assert relations == [relation]
    assert [atom.size for atom in relation.product.atoms] == [1, 1, 4]
    assert not any(atom.space.bound.fixed for atom in relation.product.atoms)
