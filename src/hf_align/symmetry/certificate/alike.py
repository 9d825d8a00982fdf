"""Elements that are the same all along another space, and need not be: one permutation of units for all experts.

A count of directions does not see them. So each space is tried with an element of its own for every entry of each other
space that accompanies it in all weights: if nothing changes, the derivation has missed that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import Generator

from hf_align.symmetry.certificate.random_copy import random_elements, random_inputs, random_weights, transform
from hf_align.symmetry.certificate.rounding import EXACT, changes
from hf_align.symmetry.derivation.index_sets import only_exchanges
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.spec import AxisActions, Factor, SpaceSpec, SymmetrySpec
from hf_align.tracing.execute import run
from hf_align.tracing.program import Program


def alike(program: Program, spec: SymmetrySpec, rng: Generator) -> Iterator[tuple[str, str]]:
    """Each space whose element could differ along another, and that other."""
    weights, inputs = dict(CanonicalWeights(random_weights(spec, rng), spec.gauges)), random_inputs(program, rng)
    before = run(program, weights, inputs)
    for name, space in spec.spaces.items():
        if space.group is None or space.size == 1:
            continue
        for other in sorted(_beside(spec, name)):
            wider = _differing(spec, name, other)
            after = run(program, transform(wider, weights, random_elements(wider, rng)), inputs)
            if all(change < EXACT for change in changes(before, after, program).values()):
                yield name, other


def _beside(spec: SymmetrySpec, name: str) -> set[str]:
    """The spaces that accompany one wherever it is, each once, and that do no more than exchange entries."""
    beside: set[str] | None = None
    for parameter in spec.parameters:
        for block in spec.blocks(parameter):
            if any(f.is_moved_by(name) for f in block.factors):
                counts = Counter(_name(f) for f in block.factors)
                once = {other for other, count in counts.items() if count == 1 and other != name}
                beside = once if beside is None else beside & once
    return {other for other in beside or () if _may_count(spec, name, other)}


def _name(factor: Factor) -> str:
    return factor.space or factor.pin or ""


def _may_count(spec: SymmetrySpec, name: str, other: str) -> bool:
    space = _space(spec, other)
    if space is None or space.size == 1 or other in spec.spaces[name].index or name in space.index:
        return False
    return only_exchanges(space.group)


def _space(spec: SymmetrySpec, name: str) -> SpaceSpec | None:
    return spec.spaces.get(name) or spec.pinned.get(name)


def _differing(spec: SymmetrySpec, name: str, other: str) -> SymmetrySpec:
    """The spec with an element of one space for every entry of another."""

    def counted(axis: AxisActions) -> AxisActions:
        return tuple(tuple(replace(f, pin=None, space=other) if f.pin == other else f for f in s) for s in axis)

    outer = _space(spec, other)
    assert outer is not None
    spaces = {other: outer, **spec.spaces}
    wider = replace(spaces[name], index=(*spaces[name].index, other))
    parameters = {n: tuple(map(counted, axes)) for n, axes in spec.parameters.items()}
    return replace(spec, spaces=spaces | {name: wider}, parameters=parameters)
