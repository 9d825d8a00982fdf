"""Rotary position embedding as a linear map: which coordinates rotate together, and which maps commute with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TOLERANCE = 1e-5
"""Beside the largest entry, an entry that is none."""
_TABLE_ROUNDING = 1e-6
"""By which part of themselves entries of one plane may differ: tables in float32."""


@dataclass(frozen=True)
class Rotations:
    """A family of rotations, one for each position, in fixed planes of a space; tables of sines and cosines that are
    weights may scale a plane as well.

    Attributes:
        size: dimensions of the space.
        planes: classes of planes that turn at the same frequency; a plane (i, j) turns e_i towards e_j.
        still: coordinates that no position moves.

    The maps that commute with all of them are GL(m, ℂ) for each class of m planes (a rotation and a scale for m = 1)
    and GL on the still coordinates.
    """

    size: int
    planes: tuple[tuple[tuple[int, int], ...], ...]
    still: tuple[int, ...]

    @property
    def classes(self) -> tuple[int, ...]:
        """For each coordinate, a label that it shares with the other coordinate of its plane."""
        partner = {j: i for planes in self.planes for i, j in planes}
        return tuple(partner.get(k, k) for k in range(self.size))

    @classmethod
    def from_maps(cls, maps: Tensor, doubt: Tensor | None = None) -> Rotations | None:
        """Read the planes off the maps of some positions; None if they are no such rotations.

        Nothing that turns at all counts as still, and no two frequencies that differ at all as one.

        Args:
            maps: [positions, size, size] float64, the matrix that each position applies, all of one length; the first
                is the nearest to the identity.
            doubt: [size, size] bool, coordinates that may turn towards each other at other positions.
        """
        size = maps.shape[-1]
        length = maps[0].norm() / size**0.5
        if length < _TOLERANCE:
            return None
        flipped = torch.allclose(maps[0], -length * torch.eye(size, dtype=maps.dtype))
        maps = maps / (-length if flipped else length)
        coupling = (maps != 0).any(0)
        doubt = torch.zeros_like(coupling) if doubt is None else doubt
        turns: dict[tuple[int, int], Tensor] = {}
        still = []
        for i in range(size):
            partners = [j for j in torch.nonzero(coupling[i] | doubt[i]).flatten().tolist() if j != i]
            if not partners:
                if not torch.allclose(maps[:, i, i], torch.ones_like(maps[:, i, i]), rtol=_TABLE_ROUNDING, atol=0):
                    return None
                still.append(i)
            elif len(partners) > 1:
                return None
            elif i < partners[0]:
                j = partners[0]
                turns[i, j] = torch.complex(maps[:, i, i], maps[:, j, i])
        rotations = cls(size, _classes_of_equal_frequency(turns), tuple(still))
        return rotations if _generate(turns, maps, coupling) else None

    def meet(self, other: Rotations) -> Rotations | None:
        """The rotations of both families: what commutes with them commutes with each. None if their planes differ."""
        pairs = {frozenset(pair) for r in (self, other) for planes in r.planes for pair in planes}
        if self.size != other.size or sum(map(len, pairs)) > len(frozenset[int]().union(*pairs)):
            return None
        classes: dict[tuple[tuple[int, bool], ...], list[tuple[int, int]]] = {}
        for i, j in sorted((min(p), max(p)) for p in pairs):
            labels = [r._label(i, j) for r in (self, other)]
            forward = next(along for at, along in labels if at >= 0)
            key = tuple((at, along == forward or at < 0) for at, along in labels)
            classes.setdefault(key, []).append((i, j) if forward else (j, i))
        turning = frozenset[int]().union(*pairs)
        still = tuple(k for k in range(self.size) if k not in turning)
        return Rotations(self.size, tuple(map(tuple, classes.values())), still)

    def _label(self, i: int, j: int) -> tuple[int, bool]:
        """The class of a plane, and whether it turns from i towards j there; -1 if it stands still."""
        for at, planes in enumerate(self.planes):
            if (i, j) in planes or (j, i) in planes:
                return at, (i, j) in planes
        return -1, True


def _generate(turns: dict[tuple[int, int], Tensor], maps: Tensor, coupling: Tensor) -> bool:
    """Whether multiplying each plane by these complex numbers, and nothing else by anything, gives back the maps.

    Args:
        coupling: [size, size] bool, where the maps are not zero.
    """
    still = torch.ones(len(coupling), dtype=torch.bool)
    elsewhere = coupling.clone()
    if turns:
        i, j = torch.tensor(list(turns)).unbind(-1)
        turn = torch.stack(list(turns.values()), -1)
        still[i] = still[j] = False
        for row, column, built in ((i, i, turn.real), (j, j, turn.real), (j, i, turn.imag), (i, j, -turn.imag)):
            elsewhere[row, column] = False
            if not torch.allclose(built, maps[:, row, column], rtol=_TABLE_ROUNDING, atol=0):
                return False
    elsewhere.fill_diagonal_(False)
    unmoved = maps.diagonal(dim1=-2, dim2=-1)[:, still]
    return not elsewhere.any() and torch.allclose(torch.ones_like(unmoved), unmoved, rtol=_TABLE_ROUNDING, atol=0)


def reordering(maps: Tensor) -> tuple[int, ...] | None:
    """Which coordinate each one shows at position zero, if some map is a multiple of a permutation.

    Args:
        maps: [positions, size, size] float64.
    """
    sizes = maps.abs().amax((-1, -2), keepdim=True)
    pattern = (maps.abs() > _TOLERANCE * sizes).double()
    same = (maps - maps.sum(-1, keepdim=True) * pattern).abs().amax((-1, -2)) < _TOLERANCE
    plain = (pattern.sum(-1) == 1).all(-1) & (pattern.sum(-2) == 1).all(-1) & same
    plain &= ((maps.sum(-1) - maps.sum(-1)[:, :1]).abs() < _TOLERANCE).all(-1)
    chosen = plain.nonzero()[:, 0].tolist()
    if not chosen:
        return None
    identity = [k for k in chosen if torch.equal(pattern[k], torch.eye(maps.shape[-1], dtype=torch.float64))]
    return tuple(pattern[(identity or chosen)[0]].argmax(-1).tolist())


def reordering_of_planes(turned: Tensor) -> tuple[int, ...] | None:
    """Which coordinate each one shows at position zero, from a map at another, if what is made of two coordinates shows
    these: of both orders, one makes a rotation of it, and the other a reflection."""
    order = [-1] * len(turned)
    made_of: dict[tuple[int, ...], list[int]] = {}
    for row, entries in enumerate(turned):
        made_of.setdefault(tuple(entries.nonzero()[:, 0].tolist()), []).append(row)
    for columns, rows in made_of.items():
        if len(columns) != len(rows) or len(rows) > 2:
            return None
        if len(rows) == 2 and not turned[rows][:, list(columns)].det() > 0:
            columns = columns[::-1]
        for row, column in zip(rows, columns, strict=True):
            order[row] = column
    return tuple(order)


def _classes_of_equal_frequency(turns: dict[tuple[int, int], Tensor]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Planes that turn by the same angles, to the last bit, or by their negatives. One not seen to turn is alone."""
    classes: list[list[tuple[int, int]]] = []
    known: dict[bytes, list[tuple[int, int]]] = {}
    for (i, j), turn in turns.items():
        angles = _bits(turn) if turn.imag.any() else None
        if angles in known:
            known[angles].append((i, j))
        elif angles is not None and (backwards := _bits(turn.conj())) in known:
            known[backwards].append((j, i))
        else:
            classes.append([(i, j)])
            known.update({} if angles is None else {angles: classes[-1]})
    return tuple(map(tuple, classes))


def _bits(turn: Tensor) -> bytes:
    """The same for numbers that are equal: there are two zeros."""
    return bytes((torch.view_as_real(turn.resolve_conj()) + 0.0).numpy().tobytes())
