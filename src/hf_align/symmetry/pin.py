"""A space that stands still after all: the spec with it pinned, for a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hf_align.symmetry.elements import PRIMAL
from hf_align.symmetry.spec import Factor, SpaceSpec, SymmetrySpec
from hf_align.tracing.program import Evidence


def pin(spec: SymmetrySpec, name: str, why: Evidence) -> SymmetrySpec:
    """The spec in which nothing moves a space."""
    space = replace(because(space_of(spec, name), why), group=None)
    if spec.indexed_by(name):  # others still differ along it
        return replace(spec, spaces={**spec.spaces, name: space})
    spaces = {n: s for n, s in spec.spaces.items() if n != name}
    pinned = {**spec.pinned, name: replace(space, index=())}
    found = replace(spec, spaces=spaces, pinned=pinned)
    for other in _beside(spec, name):  # what it moves elsewhere must not move alone
        found = pin(found, other, why)
    return with_factors(found, name, lambda f: _pinned(f, name))


def because(space: SpaceSpec, why: Evidence) -> SpaceSpec:
    """A space with one reason more, the first."""
    return replace(space, reasons=(why, *space.reasons))


def _beside(spec: SymmetrySpec, name: str) -> dict[str, None]:
    """The spaces that move all that a space moves, and more."""
    return dict.fromkeys(other for f in spec.factors() if f.space == name for other, _ in f.beside)


def _pinned(factor: Factor, name: str) -> Factor:
    if factor.space != name:
        return replace(factor, beside=tuple(move for move in factor.beside if move[0] != name))
    return replace(factor, space=None, power=PRIMAL, pin=name, beside=())


def space_of(spec: SymmetrySpec, name: str) -> SpaceSpec:
    """A space by its name, moving or pinned."""
    return spec.spaces[name] if name in spec.spaces else spec.pinned[name]


def with_factors(spec: SymmetrySpec, name: str, change: Callable[[Factor], Factor]) -> SymmetrySpec:
    """Every factor of a space, moving or pinned, changed."""
    parameters = {
        parameter: tuple(tuple(tuple(change(f) if name in (*f.powers, f.pin) else f for f in segment)
                               for segment in axis) for axis in axes)
        for parameter, axes in spec.parameters.items()
    }  # fmt: skip
    return replace(spec, parameters=parameters)
