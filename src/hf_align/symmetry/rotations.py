"""Rotary position embedding as a linear map: which coordinates rotate together, and which maps commute with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TOLERANCE = 1e-5


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
    def from_maps(cls, maps: Tensor) -> Rotations | None:
        """Read the planes off the maps of successive positions; None if they are no such rotations.

        Args:
            maps: [positions, size, size] float64, the matrix that each position applies, all of one length.
        """
        size = maps.shape[-1]
        length = maps[0].norm() / size**0.5
        if length < _TOLERANCE:
            return None
        flipped = torch.allclose(maps[0], -length * torch.eye(size, dtype=maps.dtype))
        maps = maps / (-length if flipped else length)
        coupling = maps.abs().amax(0) > _TOLERANCE
        turns: dict[tuple[int, int], Tensor] = {}
        still = []
        for i in range(size):
            partners = [j for j in torch.nonzero(coupling[i]).flatten().tolist() if j != i]
            if not partners:
                if not torch.allclose(maps[:, i, i], torch.ones_like(maps[:, i, i])):
                    return None
                still.append(i)
            elif len(partners) > 1:
                return None
            elif i < partners[0]:
                j = partners[0]
                turns[i, j] = torch.complex(maps[:, i, i], maps[:, j, i])
        rotations = cls(size, _classes_of_equal_frequency(turns), tuple(still))
        return rotations if rotations._generate(turns, maps) else None

    def _generate(self, turns: dict[tuple[int, int], Tensor], maps: Tensor) -> bool:
        """Whether multiplying each plane by these complex numbers gives back the maps."""
        built = torch.eye(self.size, dtype=maps.dtype).repeat(len(maps), 1, 1)
        for (i, j), turn in turns.items():
            built[:, i, i] = built[:, j, j] = turn.real
            built[:, j, i], built[:, i, j] = turn.imag, -turn.imag
        return torch.allclose(built, maps, atol=_TOLERANCE)


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


def _classes_of_equal_frequency(turns: dict[tuple[int, int], Tensor]) -> tuple[tuple[tuple[int, int], ...], ...]:
    classes: list[tuple[Tensor, list[tuple[int, int]]]] = []
    for (i, j), turn in turns.items():
        for reference, planes in classes:
            if torch.allclose(turn, reference, atol=1e-7):
                planes.append((i, j))
                break
            if torch.allclose(turn.conj(), reference, atol=1e-7):
                planes.append((j, i))
                break
        else:
            classes.append((turn, [(i, j)]))
    return tuple(tuple(planes) for _, planes in classes)
