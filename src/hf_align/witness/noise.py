"""How far two sets of answers are apart, and how far rounding alone takes them."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Generator, Tensor

from hf_align.checkpoints.checkpoint import is_finite
from hf_align.checkpoints.ondemand import OnDemand

Answers = Mapping[str, Tensor]

FACTOR = 32.0
"""How much more than a random half unit in the last place of every weight an alignment may cost. Each gauge and each
axis that moves rounds a weight once, four to six times in all, and a product in float32 errs by a few units of a
typical entry, not by half a unit; elements that scale are no rotations, and pass errors of large entries to small ones.
"""
FLOOR = 16.0
"""Units in the last place of the largest output, where noise is none by chance: outputs are rounded themselves."""
MEANINGLESS = 1e-2
"""Answers that change by more than this when every weight moves by half a unit in the last place say nothing about a
basis: so do those of code that reads the last bits of numbers."""
JUMP = 16.0
"""How much farther than half of all rows of outputs rounding moves a row where something jumps: a router that is
undecided between two experts is ten thousand times farther, and where nothing jumps rows differ by less."""
FAR = 8.0
"""How many times as far weights are moved to see where something jumps: at least as far as an alignment rounds them."""
_EPS = torch.finfo(torch.float32).eps
"""Also for models of float64, whose code computes norms and angles in float32 all the same."""
_ODD = 0x9E3779B1 - 2**32
"""2^32 over the golden ratio, as 32 bits with a sign: the first byte of a product with it depends on all bits."""
_UNIT = 0.75 * _EPS
"""An entry that is moved by so much of itself becomes its neighbour."""


class Jittered(OnDemand):
    """Weights with every finite entry moved by half a unit in its last place on average: to a neighbour, or not at all.

    Equal entries are moved alike, for a change of basis keeps equal rows equal, too: experts that score alike are
    chosen by their order, and rounding does not explain another choice.

    Args:
        times: how many times as far, and which way round.
        alike: move entries of every size as far as those of size one, zeros too, so that no two stay equal.
    """

    def __init__(self, weights: Mapping[str, Tensor], times: float = 1.0, *, alike: bool = False) -> None:
        super().__init__(weights)
        self._weights = weights
        self._step = times * _UNIT / 128
        self._alike = alike

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        if not weight.is_floating_point():
            return weight
        draws = _drawn(name, weight) if self._alike else _mixed(weight)
        sizes = torch.ones_like(weight) if self._alike else weight
        moved = torch.addcmul(weight, sizes, draws.to(weight.dtype), value=self._step)
        return moved if is_finite(moved) else moved.where(weight.isfinite(), weight)


def _drawn(name: str, weight: Tensor) -> Tensor:
    """A random number for each entry, of the shape of the weight, int8."""
    rng = Generator().manual_seed(crc32(name.encode()))
    eight = torch.empty(weight.numel() // 8 + 1, dtype=torch.int64).random_(-(2**63), None, generator=rng)
    return eight.view(torch.int8)[: weight.numel()].view(weight.shape)


def _mixed(weight: Tensor) -> Tensor:
    """A number for each entry that looks random and is made of the entry alone, of the shape of the weight, int8."""
    return (weight.float().view(torch.int32) * _ODD).bitwise_right_shift_(24).to(torch.int8)


def bound(rounding: float) -> float:
    """The largest change that is one of rounding.

    Args:
        rounding: what half a unit in the last place of every weight changes.
    """
    return FACTOR * rounding + FLOOR * _EPS


def calm(noise: Tensor, typical: float) -> Tensor:
    """The rows in which nothing jumps.

    Args:
        noise: what rounding changes in each row.
        typical: half of all rows change less.
    """
    return noise <= JUMP * max(typical, _EPS)


def changes(before: Answers, after: Answers) -> Tensor:
    """The largest change in each row of all answers, over the largest entry of the same answer; [rows], float64.

    What is no finite number in both is left out; infinite where it is one in one of them only, and everywhere where the
    answers are not of one kind.
    """
    alike = before.keys() == after.keys() and all(before[n].shape == after[n].shape for n in before)
    rows = torch.cat([_rows(before[n], after[n] if alike else before[n]) for n in before])
    return rows if alike else torch.full_like(rows, torch.inf)


def _rows(before: Tensor, after: Tensor) -> Tensor:
    if not before.numel():  # where no position is asked for
        return torch.zeros(1, dtype=torch.float64)
    if not before.is_floating_point():
        before, after = before.double(), after.double()
    finite = before.isfinite()
    size = before.where(finite, 0.0).abs().max().double()
    change = (after - before).abs().where(finite, 0.0).double()
    change = change.where(after.isfinite() == finite, torch.inf)
    rows = change.reshape(-1, change.shape[-1] if change.dim() > 1 else change.numel()).amax(-1)
    return rows / size if size > 0 else rows
