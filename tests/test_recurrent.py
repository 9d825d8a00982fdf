"""Recurrences: a state that a weight maps to itself moves on both sides of that weight at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import matched
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_align.matching.cross import cross, inner_product, nearest
from hf_align.matching.recurrent import meets_itself, nearest_step
from hf_align.running.network import Weights
from hf_align.symmetry.action import Elements
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.certificate.random_copy import random_elements
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.elements import Element
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.example import Example
from hf_align.tracing.execute import execute
from hf_align.tracing.program import Program
from hf_align.tracing.recurrence import in_few_steps
from hf_align.tracing.trace import trace_call, trace_model

_WIDTH = 7
_ROUNDING = 1e-5
"""Of outputs: matched models are in float32."""


class Recurrent(nn.Module):
    """A recurrence between linear maps."""

    main_input_name = "hidden_states"

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: int) -> None:
        super().__init__()
        self.config = PretrainedConfig(hidden_size=_WIDTH)
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.loop = kind(_WIDTH, _WIDTH, batch_first=True, **options)
        self.down = nn.Linear((self.loop.proj_size or _WIDTH) * (1 + self.loop.bidirectional), 3)

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = self.down(self.loop(self.up(hidden_states))[0])
        return result


KINDS: dict[str, Callable[[], Recurrent]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "LSTM both ways": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
}


@pytest.fixture(scope="module", params=KINDS)
def recurrence(request: pytest.FixtureRequest) -> tuple[Program, SymmetrySpec]:
    program = trace_model(KINDS[request.param]().eval())  # type: ignore[arg-type]
    return program, derive(program)


def drawn(spec: SymmetrySpec, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {n: 0.5 * torch.randn(spec.shape(n), generator=rng, dtype=torch.float64) for n in spec.parameters}


@pytest.mark.parametrize("seed", range(4))
def test_matching_never_falls_and_leaves_the_function_alone(
    seed: int, recurrence: tuple[Program, SymmetrySpec]
) -> None:
    program, spec = recurrence
    a, b = drawn(spec, 2 * seed), drawn(spec, 2 * seed + 1)
    objectives: list[float] = []
    match = matched(spec, a, b, lambda _, objective: objectives.append(objective))
    assert objectives == sorted(objectives) or max(objectives) - objectives[-1] < 1e-6 * abs(objectives[-1])
    assert match.after is not None and match.before is not None and match.after < match.before
    inputs = {"hidden_states": torch.randn(2, 7, _WIDTH, generator=torch.Generator().manual_seed(seed)).double()}
    aligned = AlignedWeights(b, spec, match.b)
    moved = {n: aligned[n].double() for n in b}
    before, after = (execute(program, w, inputs) for w in (b, moved))
    assert float((after - before).abs().max() / before.abs().max()) < _ROUNDING


Gained = tuple[float, float]


def steps(spec: SymmetrySpec, step: Callable[[str, Weights, Weights, Elements], Element]) -> list[Gained]:
    """⟨A, gB⟩ before and after steps of spaces that meet themselves, from random elements of all spaces."""
    a, b = drawn(spec, 0), drawn(spec, 1)
    spaces = [s for s in spec.spaces if spec.spaces[s].group and meets_itself(spec, s)]
    assert spaces
    found = []
    for seed in range(10):
        start = random_elements(spec, torch.Generator().manual_seed(seed))
        ends = ({**start, space: step(space, a, b, start)} for space in spaces)
        found += [(inner_product(spec, a, b, start), inner_product(spec, a, b, end)) for end in ends]
    return found


def test_where_both_sides_move_the_nearest_element_may_be_worse() -> None:
    spec = derive(trace_model(KINDS["GRU"]().eval()))  # type: ignore[arg-type]

    def naive(space: str, a: Weights, b: Weights, elements: Elements) -> Element:
        return nearest(spec.group(space), cross(spec, space, a, b, elements), torch.device("cpu"))

    assert any(after < before - 1e-3 * abs(before) for before, after in steps(spec, naive))


def test_no_step_leads_down(recurrence: tuple[Program, SymmetrySpec]) -> None:
    _, spec = recurrence

    def step(space: str, a: Weights, b: Weights, elements: Elements) -> Element:
        return nearest_step(spec, space, a, b, elements, torch.device("cpu"))

    assert all(after >= before - 1e-9 * abs(before) for before, after in steps(spec, step))


def moved(program: Program) -> tuple[object, ...]:
    """What a spec moves, and not why; a permutation with signs is its own inverse transpose."""
    spec = derive(program)
    groups = {space: spec.group(space) for space in spec.spaces}
    blocks = {name: str(spec.blocks(name)).replace("power=(-1,)", "power=(1,)") for name in spec.parameters}
    return groups, blocks, [str(gauge) for gauge in spec.gauges]


LONG: dict[str, Callable[[], Recurrent]] = {
    **KINDS,
    "LSTM in layers": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "GRU in layers": lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "LSTM with a projection": lambda: Recurrent(nn.LSTM, proj_size=_WIDTH - 2),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_text_has_the_bases_that_all_its_steps_have_and_few_of_their_ops(kind: str) -> None:
    model, example = LONG[kind]().eval(), Example({"hidden_states": torch.randn(2, 20, _WIDTH)}, {})
    whole = trace_call(model, example)  # type: ignore[arg-type]
    with in_few_steps():
        few, longer = (
            trace_call(model, Example({"hidden_states": torch.randn(2, n, _WIDTH)}, {}))  # type: ignore[arg-type]
            for n in (20, 400)
        )
    assert moved(few) == moved(whole) == moved(longer)
    assert len(longer.graph.nodes) == len(few.graph.nodes)


def test_a_program_whose_values_count_has_all_steps() -> None:
    """Methods that solve layer after layer compute with the program itself."""
    model, given = KINDS["LSTM"]().eval(), torch.randn(2, 40, _WIDTH)
    program = trace_call(model, Example({"hidden_states": given}, {}))  # type: ignore[arg-type]
    made = execute(program, {n: p.detach() for n, p in model.named_parameters()}, {"hidden_states": given})
    assert torch.allclose(made, model(given), atol=1e-6)
