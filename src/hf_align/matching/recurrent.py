"""Spaces that meet themselves in a weight, as the state of a recurrence does: ⟨A, gBgᵀ⟩ is quadratic in g.

What fits best while the other side of such a weight is held still may fit worse once both sides move. The agreement
falls short of its tangent by no more than 2|A||B| for each unit of |g - g₀|²/2; pulled back to g₀ by as much, a step
never leads down. Less is enough almost always.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_align.matching.cross import cross, nearest, rise
from hf_align.running.network import Weights
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import Element
from hf_align.symmetry.spec import SymmetrySpec

_PULLS = (0.0, 1 / 16, 1 / 4, 1.0)
"""How strongly a step is pulled back to where it began, the weakest that raises the objective first."""


def meets_itself(spec: SymmetrySpec, space: str) -> list[str]:
    """The weights that a space moves along more than one axis."""
    return [name for name in spec.uses(space) if any([m.space for m in b.moves].count(space) > 1
                                                     for b in spec.blocks(name))]  # fmt: skip


def nearest_step(
    spec: SymmetrySpec, space: str, a: Weights, b: Weights, elements: Elements, device: torch.device
) -> Element:
    """An element of a space that meets itself which fits better than the one where it is, else that one."""
    here = elements[space] if space in elements else spec.group(space).identity(spec.index_shape(space))
    matrices = cross(spec, space, a, b, elements)
    power, tangent = next(iter(matrices.items()))
    steepest = 2 * sum(float(a[name].norm() * b[name].norm()) for name in meets_itself(spec, space))
    for pull in _PULLS:
        pulled = {**matrices, power: tangent + pull * steepest * here.as_matrix(power)}
        found = {space: nearest(spec.group(space), pulled, device)}
        if kept := unless_worse(spec, found, a, b, {**elements, space: here}):
            return kept[space]
    return here


def unless_worse(
    spec: SymmetrySpec, found: Mapping[str, Element], a: Weights, b: Weights, elements: Elements
) -> dict[str, Element]:
    """New elements, or none if they lower the agreement of the weights that they move."""
    return dict(found) if rise(spec, a, b, elements, found) >= 0 else {}
