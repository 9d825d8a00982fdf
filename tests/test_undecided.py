"""Models that are undecided themselves: neither sound nor unsound by what rounding alone does as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from traps.tower import MLP, Tower, TowerConfig

from hf_align.symmetry.certificate.certify import certify
from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.certificate.rounding import undecided
from hf_align.symmetry.certificate.soundness import _changes, decided_soundness, measured_soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.program import Program
from hf_align.tracing.trace import trace_first_call


def traced(hidden: Callable[[Tensor], Tensor]) -> Program:
    """A tower of one block, whose MLP has this activation."""
    part = type("Part", (MLP,), {"activate": lambda self, h: hidden(h)})
    kind = type("Undecided", (Tower,), {"mlp": part})
    with torch.device("meta"):
        model = kind(TowerConfig(num_hidden_layers=1)).eval()
    return trace_first_call(model)


def tied(h: Tensor) -> Tensor:
    """Every second place, by lengths that are one but for rounding."""
    lengths = (h / h.norm(dim=-1, keepdim=True)).norm(dim=-1)
    places = lengths.argsort(-1)[:, ::2]
    chosen = torch.zeros_like(lengths).scatter(-1, places, 1.0)
    return torch.tanh(h) * chosen[..., None]


def steep(h: Tensor) -> Tensor:
    """A map that enlarges rounding ten million times."""
    return torch.sin(1e7 * torch.tanh(h))


def growing(h: Tensor) -> Tensor:
    """A map that enlarges rounding where what it reads is large."""
    return torch.sin(torch.exp(h**2))


def overflowing(h: Tensor) -> Tensor:
    """A smooth step, written so that it overflows where what it reads is large."""
    x = torch.exp((h / 0.8) ** 4)
    return torch.tanh(h) * x / (1 + x)


@pytest.fixture(scope="module")
def wrong() -> SymmetrySpec:
    """Units that may be scaled, as no activation here allows."""
    return derive(traced(torch.relu))


def judged(program: Program, spec: SymmetrySpec, seed: int) -> tuple[float, str]:
    rng = torch.Generator().manual_seed(seed)
    error, found = decided_soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng)
    return error, "" if found is None else str(found)


@pytest.mark.parametrize(("hidden", "op"), [(tied, "argsort"), (steep, "sin")])
def test_what_rounding_does_as_well_says_nothing(hidden: Callable[[Tensor], Tensor], op: str) -> None:
    program = traced(hidden)
    errors, said = zip(*(judged(program, derive(program), seed) for seed in range(3)), strict=True)
    assert max(errors) > 1e-9
    assert all(said[i] for i, error in enumerate(errors) if error > 1e-9)
    assert any(f"undecided at {op}" in line and "rounding alone changes its output by" in line for line in said), said


@pytest.mark.parametrize("hidden", [torch.tanh, torch.nn.functional.silu, lambda h: steep(h) * 1e-6 + torch.tanh(h)])
def test_what_is_unsound_is_never_excused(hidden: Callable[[Tensor], Tensor], wrong: SymmetrySpec) -> None:
    """Also where rounding is enlarged, but by far not to what the wrong symmetry does."""
    for seed in range(3):
        error, said = judged(traced(hidden), wrong, seed)
        assert error > 1e-3
        assert not said
    assert measured_soundness(traced(hidden), wrong, torch.Generator().manual_seed(0))[1] == ""


@pytest.mark.parametrize("seed", range(3))
def test_what_is_undecided_at_large_weights_is_measured_at_smaller_ones(seed: int, wrong: SymmetrySpec) -> None:
    program = traced(growing)
    assert "undecided at sin" in judged(program, derive(program), seed)[1]
    error, doubt = measured_soundness(program, derive(program), torch.Generator().manual_seed(seed))
    assert error < 1e-9 and not doubt
    error, doubt = measured_soundness(program, wrong, torch.Generator().manual_seed(seed))
    assert error > 1e-3 and not doubt


@pytest.mark.parametrize("seed", range(3))
def test_what_overflows_at_large_weights_is_measured_and_counted_at_smaller_ones(
    seed: int, wrong: SymmetrySpec
) -> None:
    program = traced(overflowing)
    assert "gives no numbers at div" in judged(program, derive(program), seed)[1]
    error, doubt = measured_soundness(program, derive(program), torch.Generator().manual_seed(seed))
    assert error < 1e-9 and not doubt
    error, doubt = measured_soundness(program, wrong, torch.Generator().manual_seed(seed))
    assert not error < 1e-3 and not doubt  # scaled units may overflow where the model does not


def test_a_certificate_of_what_overflows_at_large_weights_is_whole() -> None:
    program = traced(overflowing)
    found = certify(program.config, traced=program)
    assert found.sound and not found.not_counted


def test_a_tie_in_one_result_does_not_excuse_another() -> None:
    program = traced(tied)
    rng = torch.Generator().manual_seed(0)
    weights, inputs = random_weights(derive(program), rng), random_inputs(program, rng)
    found = _changes(program, derive(program), weights, inputs, rng)
    assert undecided(found, program, weights, inputs, rng)
    (results,) = program.graph.output_node().args
    calm = next(n for n in program.graph.nodes if n.op == "call_function" and n not in program.constants)
    program.graph.output_node().args = ((*results, calm),)
    assert undecided({**found, calm: 0.1}, program, weights, inputs, rng) is None


def test_what_is_no_number_is_not_sound() -> None:
    program = traced(lambda h: torch.sqrt(-1 - h * h))
    found = certify(program.config, traced=program)
    assert not found.sound and not found.complete
    assert found.not_counted == "its outputs are no numbers"
