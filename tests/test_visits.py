"""Which steps of a descent are visited: on a stream that turns by little, and on units that stay where they are."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from conftest import MODELS
from torch import Generator

from hf_align.matching.cross import cross, inner_product, nearest
from hf_align.matching.stream import residual
from hf_align.matching.visits import Visits
from hf_align.matching.weights import steps_of
from hf_align.opening.pairs import open_pair
from hf_align.runtime.processes import ALONE
from hf_align.symmetry.certificate.random_copy import random_weights
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.elements import Element, Matrix, Monomial
from hf_align.symmetry.groups.fit import fit
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.trace import trace


@pytest.fixture(scope="module")
def spec() -> SymmetrySpec:
    return open_pair(str(MODELS / "llama" / "0"), str(MODELS / "llama" / "1")).spec


def turned(size: int, part: float) -> Element:
    """A rotation that moves the identity by a part of its square: by 2 - 2 cos φ in each of some planes."""
    angle = math.acos(1 - part * size / 4) if part * size < 8 else math.pi
    matrix = torch.eye(size, dtype=torch.float64)
    matrix[0, 0] = matrix[1, 1] = math.cos(angle)
    matrix[0, 1], matrix[1, 0] = math.sin(angle), -math.sin(angle)
    return Matrix(matrix)


@pytest.mark.parametrize(
    ("part", "at_once", "in_the_end"),
    [(1e-8, False, False), (1e-5, False, False), (1e-3, False, True), (0.02, True, True)],
)
def test_units_that_stayed_rest_until_what_is_around_them_has_moved_far_or_all_is_over(
    spec: SymmetrySpec, part: float, at_once: bool, in_the_end: bool
) -> None:
    steps, stream = steps_of(spec), residual(spec)
    (units,) = [step for step in steps if step == "model.layers.1.mlp.hidden"]
    assert stream is not None
    visits, size = Visits(spec, steps), spec.spaces[stream].size
    order = Monomial.permutation(torch.arange(spec.spaces[str(units)].size))
    elements: dict[str, Element] = {stream: turned(size, 0.0)}
    assert visits.is_due(units, elements)
    for element in (turned(size, 0.0), turned(size, 1e-3)):  # found, then found again though the stream has moved
        elements[stream] = element
        assert visits.is_due(units, elements)
        visits.solved(units, elements, {str(units): order})
        elements[str(units)] = order
        assert not visits.is_due(units, elements)
    elements[stream] = Matrix(turned(size, 1e-3).as_matrix() @ turned(size, part).as_matrix())
    assert visits.is_due(units, elements) == at_once
    if not at_once:
        assert visits.wake(elements) == in_the_end
        assert visits.is_due(units, elements) == in_the_end
    if in_the_end and not at_once:
        assert not visits.is_confirmed
        visits.solved(units, elements, {str(units): order})
        assert visits.is_confirmed


def test_units_that_moved_do_not_rest(spec: SymmetrySpec) -> None:
    steps, stream = steps_of(spec), residual(spec)
    units = "model.layers.1.mlp.hidden"
    assert stream is not None
    visits, count, size = Visits(spec, steps), spec.spaces[units].size, spec.spaces[stream].size
    elements: dict[str, Element] = {stream: turned(size, 0.0)}
    for shift in range(3):
        found = Monomial.permutation(torch.arange(count).roll(shift))
        visits.solved(units, elements, {units: found})
        elements |= {units: found, stream: turned(size, 1e-5 * (shift + 1))}
        assert visits.is_due(units, elements)


def test_what_a_step_says_of_the_objective_counts_gains_as_what_they_stand_for() -> None:
    """Gains on what a block writes into the stream stay where they are, and are stored as their difference from one."""
    config = transformers.Gemma2Config(
        vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, head_dim=4,
        num_key_value_heads=1, architectures=["Gemma2ForCausalLM"],
    )  # fmt: skip
    spec, rng = derive(trace(config)), Generator().manual_seed(0)
    a, b = random_weights(spec, rng), random_weights(spec, rng)
    stream = residual(spec)
    assert stream is not None and any(spec.gains.get(name) for name in spec.uses(stream))
    matrices = cross(spec, stream, a, b, {}, spec.uses(stream), ALONE)
    element = nearest(spec.group(stream), matrices, torch.device("cpu"))
    said = float(fit(element, matrices).sum())
    assert said == pytest.approx(inner_product(spec, a, b, {stream: element}, only=spec.uses(stream)))


def test_a_stream_that_was_turned_since_its_visit_is_visited_again(spec: SymmetrySpec) -> None:
    """So that it is not left where momentum has brought it, nor the objective told by what was found before."""
    steps, stream = steps_of(spec), residual(spec)
    assert stream is not None
    visits, size = Visits(spec, steps), spec.spaces[stream].size
    elements: dict[str, Element] = {}
    visits.solved(stream, elements, {stream: turned(size, 0.0)})
    elements[stream] = turned(size, 0.0)
    assert visits.is_current(stream, elements) and not visits.is_due(stream, elements)
    elements[stream] = turned(size, 1e-3)
    assert visits.is_due(stream, elements) and not visits.is_current(stream, elements)
