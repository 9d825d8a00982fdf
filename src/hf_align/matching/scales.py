"""Scales of spaces that share weights, balanced together.

The sum of squares of all weights is a convex function of the logarithms of the scales. Spaces take turns, each with the
scales that are best while the others stay. All that a turn asks of a weight is how long its rows are under the scales
of its other axes: a sum of its squares, weighted. So the squares are made once, and no weight is moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.symmetry.elements import Element, Monomial, Power
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.spec import Block, Move, SymmetrySpec

TURNS = 50
"""That spaces which share weights take at most until they are balanced together."""
STILL = 1e-7
"""A change of scale that is none."""


@dataclass(frozen=True)
class Squares:
    """The squares of a block of a weight, summed over all axes that no scale knows.

    Attributes:
        axes: those of the factored block that are left.
        moves: by which scales, along which of them.
    """

    entries: Tensor
    axes: tuple[int, ...]
    moves: tuple[Move, ...]

    @classmethod
    def of(cls, block: Block, weight: Tensor, names: Collection[str]) -> Squares:
        moves = tuple(move for move in block.moves if move.space in names)
        axes = tuple(sorted({axis for move in moves for axis in _axes(move)}))
        squares = block.factored(weight).double().square()
        others = [axis for axis in range(squares.dim()) if axis not in axes]
        return cls(squares.sum(others) if others else squares, axes, moves)

    def lengths(self, move: Move, scales: Mapping[str, Element]) -> Tensor:
        """[*index, n], the squared lengths of what a scale multiplies, under all scales."""
        operands: list[Tensor | tuple[int, ...]] = [self.entries, self.axes]
        for other in self.moves:
            if other is not move:
                operands += [_squared(other, scales), _axes(other)]
        return torch.einsum(*operands, _axes(move)) * _squared(move, scales)


def settle_scales(
    spec: SymmetrySpec, weights: Mapping[str, Tensor], names: Collection[str], scales: Mapping[str, Element]
) -> dict[str, Element]:
    """The scales of some spaces at which none of them would move any more.

    Args:
        scales: where they start.
    """
    settled = dict(scales)
    uses: dict[str, list[tuple[Squares, Move]]] = defaultdict(list)
    for squares in _all_squares(spec, weights, names):
        for move in squares.moves:
            uses[move.space].append((squares, move))
    for _ in range(TURNS):
        moved = 0.0
        for name in names:
            lengths: dict[Power, Tensor] = {}
            for squares, move in uses[name]:
                lengths[move.power] = squares.lengths(move, settled) + lengths.get(move.power, 0)
            group = spec.group(name)
            assert isinstance(group, ScaledPermutation)
            step = group.even(lengths)
            moved = max(moved, float((step.scale - 1).abs().max()))
            settled[name] = step @ settled[name]
        if moved < STILL:
            break
    return settled


def _all_squares(spec: SymmetrySpec, weights: Mapping[str, Tensor], names: Collection[str]) -> Iterator[Squares]:
    for parameter in dict.fromkeys(p for name in names for p in spec.uses(name)):
        weight = weights[parameter].cpu() + spec.gains.get(parameter, 0.0)
        for block in spec.blocks(parameter):
            squares = Squares.of(block, weight, names)
            if squares.moves:
                yield squares


def _axes(move: Move) -> tuple[int, ...]:
    return (*move.index, move.axis)


def _squared(move: Move, scales: Mapping[str, Element]) -> Tensor:
    element = scales[move.space]
    assert isinstance(element, Monomial)
    return element.factors(move.power).square()
