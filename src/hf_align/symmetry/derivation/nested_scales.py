"""Scales of heads that are scales of the units in them: kept once, so that balancing does not count them twice."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_align.symmetry.elements import PRIMAL
from hf_align.symmetry.groups import ScaledPermutation, Scaling, group_of
from hf_align.symmetry.interpreter.bounds import PERMUTATION
from hf_align.symmetry.spec import SpaceSpec, SymmetrySpec


def without_repeated_scales(spec: SymmetrySpec) -> SymmetrySpec:
    """The spec in which an outer space is only permuted if the elements of an inner one already scale as it does."""
    repeated = [o for o in spec.spaces.values() if any(_repeats(spec, o, i) for i in spec.indexed_by(o.name))]
    for outer in repeated:
        group = None if isinstance(outer.group, Scaling) else group_of(PERMUTATION, outer.size)
        spec = replace(spec, spaces={**spec.spaces, outer.name: replace(outer, group=group)})
    names = {o.name for o in repeated}
    parameters = {
        name: tuple(tuple(tuple(replace(f, power=PRIMAL) if f.space in names else f for f in s) for s in axis)
                    for axis in axes)
        for name, axes in spec.parameters.items()
    }  # fmt: skip
    return replace(spec, parameters=parameters)


def _repeats(spec: SymmetrySpec, outer: SpaceSpec, inner: str) -> bool:
    """Whether every scale of the outer space acts on all weights as scales of the inner one do."""
    group, within = outer.group, spec.spaces[inner].group
    if not isinstance(group, ScaledPermutation) or not isinstance(within, ScaledPermutation) or not group.has_gauge:
        return False
    rank = torch.linalg.matrix_rank
    theirs, ours = _powers(spec, inner, outer.name), _powers(spec, outer.name, outer.name)
    return bool(rank(theirs) == rank(torch.cat([theirs, ours], 1)))


def _powers(spec: SymmetrySpec, space: str, where: str) -> Tensor:
    """[blocks, scales], the total power of each positive scale of a space in every block that another one moves."""
    group = spec.spaces[space].group
    assert isinstance(group, ScaledPermutation)
    none = (0,) * len(group.scales)
    moved = [b.factors for name in spec.uses(where) for b in spec.blocks(name)]
    found = [[f.powers[space] for f in factors if f.is_moved_by(space)]
             for factors in moved if where in [f.space for f in factors]]  # fmt: skip
    return torch.tensor([[sum(powers) for powers in zip(none, *many, strict=True)] for many in found])[
        :, group.continuous
    ].double()
