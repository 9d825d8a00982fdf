"""What the symmetries of a spec change in a function: nothing but rounding, under random elements of all groups."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from hf_align.symmetry.certificate.random_copy import (
    SIZES,
    Weights,
    random_elements,
    random_inputs,
    random_weights,
    transform,
)
from hf_align.symmetry.certificate.rounding import EXACT, Changes, Undecided, changes, undecided
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.execute import run
from hf_align.tracing.program import Program

_DRAWS = 5
"""Random elements, and as many random inputs."""


def measured_soundness(program: Program, spec: SymmetrySpec, rng: Generator) -> tuple[float, str]:
    """The largest change under some elements and inputs, and why nothing follows from it, if so.

    Where the model is undecided, other weights are drawn, and smaller ones: scores may tie by chance, and large numbers
    overflow.
    """
    usual, smaller = SIZES
    weights = random_weights(spec, rng, usual)
    decided, others, doubt = list[float](), list[float](), ""
    while len(decided) < _DRAWS and len(others) < _DRAWS:
        error, undecided_ = decided_soundness(program, spec, weights, random_inputs(program, rng), rng)
        (decided if undecided_ is None else others).append(error)
        if undecided_ is not None:
            weights, doubt = random_weights(spec, rng, smaller), str(undecided_)
    seen = float(torch.tensor(decided).max()) if decided else 0.0
    if len(decided) == _DRAWS or not seen < EXACT:
        return seen, ""
    return float(torch.tensor(others).max()), doubt


def soundness(
    program: Program, spec: SymmetrySpec, weights: Weights, inputs: dict[str, Tensor], rng: Generator
) -> float:
    """The largest change of a result under random elements of all groups, over the largest of its entries."""
    return _largest(_changes(program, spec, weights, inputs, rng))


def decided_soundness(
    program: Program, spec: SymmetrySpec, weights: Weights, inputs: dict[str, Tensor], rng: Generator
) -> tuple[float, Undecided | None]:
    """As `soundness`, and where the model is undecided, if all that changes may have changed by rounding alone, or if
    its outputs are no numbers."""
    found = _changes(program, spec, weights, inputs, rng)
    error = _largest(found)
    return error, None if error < EXACT else undecided(found, program, weights, inputs, rng)


def _changes(
    program: Program, spec: SymmetrySpec, weights: Weights, inputs: dict[str, Tensor], rng: Generator
) -> Changes:
    moved = transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng))
    return changes(run(program, weights, inputs), run(program, moved, inputs), program)


def _largest(found: Changes) -> float:
    return float(torch.tensor(list(found.values()), dtype=torch.float64).max())  # what is no number is the largest
