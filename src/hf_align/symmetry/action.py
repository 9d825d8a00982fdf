"""How elements move weights: the action of an alignment on one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.symmetry.elements import Element, Power
from hf_align.symmetry.spec import Factor, Segment, SymmetrySpec, extent

Elements = Mapping[str, Element]
"""One element for each space that moves; a space that is absent stands still."""


@dataclass(frozen=True)
class Block:
    """A part of a tensor, regularly spaced, in which every axis is one product of factors."""

    segments: tuple[Segment, ...]

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all axes in order; their sizes are the shape of the factored view."""
        return tuple(f for s in self.segments for f in s)

    def factored(self, tensor: Tensor) -> Tensor:
        """The block of a tensor with one axis for each factor: a view."""
        at = 0
        for segment in self.segments:
            for i, factor in enumerate(segment):
                behind = extent(segment[i + 1 :])
                if factor.within is not None:
                    tensor = tensor.narrow(at, factor.within[0], factor.size * behind)
                tensor = tensor.unflatten(at, (factor.size, behind))
                at += 1
            tensor = tensor.squeeze(at)
        return tensor

    def occurrences(self, space: str) -> Iterator[int]:
        """The axes of the factored view that a space moves."""
        return (i for i, f in enumerate(self.factors) if f.is_moved_by(space))

    def index_axes(self, spec: SymmetrySpec, axis: int, space: str) -> list[int]:
        """The axes of the factored view over which the element of `space` at `axis` varies, in the order of its index.

        Where an outer space occurs twice, the one beside the inner is meant: each head's values are read with the
        element of that head, whatever other heads the weight writes to.
        """
        of_tensor = [i for i, segment in enumerate(self.segments) for _ in segment]
        chosen = []
        for outer in spec.spaces[space].index:
            places = list(self.occurrences(outer))
            chosen.append(next((i for i in places if of_tensor[i] == of_tensor[axis]), places[0]))
        return chosen


def blocks(spec: SymmetrySpec, name: str) -> Iterator[Block]:
    """The blocks of a parameter: the grid of the segments of its axes."""
    return (Block(grid) for grid in itertools.product(*spec.parameters[name]))


def act(
    tensor: Tensor,
    name: str,
    spec: SymmetrySpec,
    elements: Elements,
) -> Tensor:
    """The parameter `name` moved by the elements of all its spaces; the same shape and dtype.

    A gain that is stored as its difference from one is moved as the gain that it stands for.
    """
    if not any(space in elements for axis in spec.parameters[name] for s in axis for f in s for space in f.powers):
        return tensor
    offset = spec.gains.get(name, 0.0)
    tensor = tensor + offset if offset else tensor
    found = list(blocks(spec, name))
    if len(found) == 1 and all(f.within is None for f in found[0].factors):
        moved = act_on_block(found[0].factored(tensor), found[0], spec, elements).reshape(tensor.shape)
    else:
        moved = tensor.clone(memory_format=torch.contiguous_format)
        for block in found:
            block.factored(moved).copy_(act_on_block(block.factored(tensor), block, spec, elements))
    return moved - offset if offset else moved


def act_on_block(
    view: Tensor, block: Block, spec: SymmetrySpec, elements: Elements, still: tuple[str, int] | None = None
) -> Tensor:
    """Move the factored view of a block, but not by the space on the axis that stands still. Outer spaces go first: an
    inner element belongs to the new position of its head."""
    for space in spec.spaces:
        if space not in elements:
            continue
        for axis in block.occurrences(space):
            if (space, axis) != still:
                index, power = block.index_axes(spec, axis, space), block.factors[axis].powers[space]
                view = _along(view, axis, index, elements[space], power)
    return view


def _along(view: Tensor, axis: int, index: list[int], element: Element, power: Power) -> Tensor:
    front = list(range(len(index)))
    arranged = view.movedim([*index, axis], [*front, -1])
    return element.act(arranged, power).movedim([*front, -1], [*index, axis])


def occurrences(
    tensor: Tensor, name: str, spec: SymmetrySpec, space: str, elements: Elements | None = None
) -> Iterator[tuple[Power, Tensor]]:
    """Every place where a space moves a parameter, as (power, rows [*index, n, rest]).

    With `elements`, all is moved by them but this place by this space.
    """
    offset = spec.gains.get(name, 0.0)
    tensor = tensor + offset if offset else tensor
    for block in blocks(spec, name):
        for axis in block.occurrences(space):
            view = block.factored(tensor)
            if elements is not None:
                view = act_on_block(view, block, spec, elements, still=(space, axis))
            index = block.index_axes(spec, axis, space)
            rows = view.movedim([*index, axis], [*range(len(index) + 1)])
            yield block.factors[axis].powers[space], rows.reshape(*rows.shape[: len(index) + 1], -1)
