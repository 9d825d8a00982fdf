"""Cross matrices: how well each coordinate of B fits each coordinate of A, summed over all weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from hf_align.running.network import Weights
from hf_align.runtime.devices import CPU
from hf_align.runtime.processes import ALONE, Processes
from hf_align.symmetry.action import Elements, act, as_gain, occurrences
from hf_align.symmetry.elements import Element, Power
from hf_align.symmetry.groups import Group, ScaledPermutation
from hf_align.symmetry.spec import SymmetrySpec

_PARTS = 16
"""In which the weights of a space are shared out."""


def cross(
    spec: SymmetrySpec,
    space: str,
    a: Weights,
    b: Weights,
    elements: Elements,
    only: Iterable[str] | None = None,
    processes: Processes = ALONE,
    device: torch.device = CPU,
) -> dict[Power, Tensor]:
    """M[a, b] = Σ A[a, ·] B[b, ·] over every weight that carries the space, by power of the action.

    Args:
        elements: what already acts on B; the space itself stands still where it is compared.
        only: the parameters to sum over; by default all that carry the space.
        processes: that each take some of the weights; all get the sum.
        device: where the sum is given. Several processes tell each other of it on the CPU.

    Returns:
        power -> [*index, n, n] float64.
    """
    names = list(spec.uses(space) if only is None else only)
    total: dict[Power, Tensor] = {}
    for part in processes.in_order(
        _parts(spec, names), lambda few: _sum_over(spec, space, a, b, elements, few, device)
    ):
        for power, matrix in part.items():
            total[power] = total[power].add_(matrix) if power in total else matrix
    return total


def _sum_over(
    spec: SymmetrySpec, space: str, a: Weights, b: Weights, elements: Elements, names: list[str], device: torch.device
) -> dict[Power, Tensor]:
    total: dict[Power, Tensor] = {}
    for name in names:
        rows_a = occurrences(a[name], name, spec, space)
        rows_b = occurrences(b[name], name, spec, space, elements)
        for (power, x), (_, y) in zip(rows_a, rows_b, strict=True):
            term = x @ y.mT
            total[power] = total[power].add_(term) if power in total else term.double()
    return {power: matrix.to(device) for power, matrix in total.items()}


def _parts(spec: SymmetrySpec, names: list[str]) -> list[list[str]]:
    """Runs of weights of about one size together: always the same ones, so that how many processes share them does
    not change in which order they are summed."""
    sizes = [math.prod(spec.shape(name)) for name in names]
    parts: dict[int, list[str]] = {}
    before = 0
    for name, size in zip(names, sizes, strict=True):
        parts.setdefault(_PARTS * before // max(1, sum(sizes)), []).append(name)
        before += size
    return list(parts.values())


def inner_product(
    spec: SymmetrySpec,
    a: Weights,
    b: Weights,
    elements: Elements,
    processes: Processes = ALONE,
    only: Iterable[str] | None = None,
) -> float:
    """⟨A, gB⟩: the objective of weight matching, over all weights or only these; of gains as what they stand for, as
    groups move them."""

    def product(name: str) -> float:
        sides = a[name], act(b[name], name, spec, elements)
        left, right = (as_gain(side, name, spec) for side in sides)
        return float((left * right).sum(dtype=torch.float64))

    return over_weights(spec, spec.parameters if only is None else only, processes, product)


def rise(
    spec: SymmetrySpec, a: Weights, b: Weights, elements: Elements, found: Elements, processes: Processes = ALONE
) -> float:
    """By how much ⟨A, gB⟩ rises with new elements of some spaces."""
    names = dict.fromkeys(name for space in found for name in spec.uses(space))
    sides = (elements, {**elements, **found})
    before, after = (inner_product(spec, a, b, side, processes, names) for side in sides)
    return after - before


def over_weights(spec: SymmetrySpec, names: Iterable[str], processes: Processes, term: Callable[[str], float]) -> float:
    """The sum of one term for each weight."""
    return sum(processes.spread(list(names), lambda n: math.prod(spec.shape(n)), lambda own: list(map(term, own))))


def nearest(group: Group, matrices: Mapping[Power, Tensor], device: torch.device) -> Element:
    """The element of a group that fits cross matrices best, on the CPU; what is found entry by entry is found there,
    polar factors and the gains of assignments on the device."""
    place = CPU if isinstance(group, ScaledPermutation) and not group.permutes else device
    return group.nearest({power: matrix.to(place) for power, matrix in matrices.items()}).to(CPU)
