"""How elements move weights: the action of an alignment on one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hf_align.symmetry.elements import Element, Power
from hf_align.symmetry.spec import Block, SymmetrySpec

Elements = Mapping[str, Element]
"""One element for each space that moves; a space that is absent stands still."""


def act(
    tensor: Tensor,
    name: str,
    spec: SymmetrySpec,
    elements: Elements,
) -> Tensor:
    """The parameter `name` moved by the elements of all its spaces; the same shape and dtype.

    A gain that is stored as its difference from one is moved as the gain that it stands for.
    """
    if not any(space in elements for space in spec.carried(name)):
        return tensor
    tensor, offset = as_gain(tensor, name, spec), spec.gains.get(name, 0.0)
    found = spec.blocks(name)
    if len(found) == 1 and all(f.within is None for f in found[0].factors):
        moved = act_on_block(found[0].factored(tensor), found[0], elements).reshape(tensor.shape)
    else:
        moved = tensor.clone(memory_format=torch.contiguous_format)
        for block in found:
            block.factored(moved).copy_(act_on_block(block.factored(tensor), block, elements))
    return moved - offset if offset else moved


def as_gain(tensor: Tensor, name: str, spec: SymmetrySpec) -> Tensor:
    """A gain that is stored as its difference from something, as what it stands for; other weights as they are."""
    offset = spec.gains.get(name, 0.0)
    return tensor + offset if offset else tensor


def act_on_block(view: Tensor, block: Block, elements: Elements, still: tuple[str, int] | None = None) -> Tensor:
    """Move the factored view of a block, but not by the space on the axis that stands still."""
    for move in block.moves:
        if move.space in elements and (move.space, move.axis) != still:
            view = _along(view, move.axis, move.index, elements[move.space], move.power)
    return view


def _along(view: Tensor, axis: int, index: tuple[int, ...], element: Element, power: Power) -> Tensor:
    front = list(range(len(index)))
    arranged = view.movedim([*index, axis], [*front, -1])
    return element.act(arranged, power).movedim([*front, -1], [*index, axis])


def occurrences(
    tensor: Tensor, name: str, spec: SymmetrySpec, space: str, elements: Elements | None = None
) -> Iterator[tuple[Power, Tensor]]:
    """Every place where a space moves a parameter, as (power, rows [*index, n, rest]).

    With `elements`, all is moved by them but this place by this space.
    """
    tensor = as_gain(tensor, name, spec)
    for block in spec.blocks(name):
        for move in block.moves:
            if move.space != space:
                continue
            view = block.factored(tensor)
            if elements is not None:
                view = act_on_block(view, block, elements, still=(space, move.axis))
            rows = view.movedim([*move.index, move.axis], [*range(len(move.index) + 1)])
            yield move.power, rows.reshape(*rows.shape[: len(move.index) + 1], -1)
