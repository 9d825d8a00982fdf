"""The second sweep over models of many layers: some layers speak for their neighbours."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
import transformers
from torch import Generator

from hf_align.matching import weights as matching
from hf_align.matching.balanced import Balanced
from hf_align.matching.head_families import HeadFamily
from hf_align.matching.memory import Step
from hf_align.matching.metric import weighted
from hf_align.matching.solver import Solution, Solver
from hf_align.matching.sweep import Sweep, neighbours
from hf_align.matching.weights import match_weights, steps_of
from hf_align.symmetry.action import Elements
from hf_align.symmetry.certificate.random_copy import Weights, random_elements, random_weights, transform
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.trace import trace

LAYERS = 12
UNITS = [f"model.layers.{layer}.mlp.hidden" for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def spec() -> SymmetrySpec:
    return derive(trace(transformers.LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=12, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )))  # fmt: skip


def pair(spec: SymmetrySpec, alike: range) -> tuple[Weights, Weights]:
    """Two models; the second has the first one's layers of these numbers, with some noise, in another basis."""
    rng = Generator().manual_seed(0)
    a, other = (canonical(spec, random_weights(spec, rng)) for _ in range(2))
    unlike = [f"model.layers.{layer}." for layer in range(LAYERS) if layer not in alike]
    b = {name: other[name] if name.startswith(tuple(unlike)) else 0.9 * w + 0.1 * other[name] for name, w in a.items()}
    return a, transform(spec, b, random_elements(spec, rng))


def canonical(spec: SymmetrySpec, weights: Weights) -> Weights:
    return dict(CanonicalWeights(weights, spec.gauges))


def matched(
    spec: SymmetrySpec, models: tuple[Weights, Weights], monkeypatch: pytest.MonkeyPatch, again: int
) -> tuple[Elements, float, list[Counter[Step]]]:
    """The elements, the objective, and the steps that were solved in each sweep, where this sweep spares some."""
    objectives, solved = list[float](), [Counter[Step]()]
    usual = Solver.solve

    def solve(self: Solver, together: list[Step], elements: Elements) -> list[Solution]:
        solved[-1].update(together)
        return list(usual(self, together, elements))

    def after(_: int, objective: float) -> None:
        objectives.append(objective)
        solved.append(Counter())

    with monkeypatch.context() as patched:
        patched.setattr(matching, "_AGAIN", again)
        patched.setattr(Solver, "solve", solve)
        found, _ = match_weights(Balanced.of(spec, *models), after)
    return found, objectives[-1], solved[:-1]


def test_layers_that_gain_nothing_speak_for_their_neighbours(
    spec: SymmetrySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pair(spec, range(LAYERS))
    _, most, in_all = matched(spec, models, monkeypatch, 0)
    _, objective, spared = matched(spec, models, monkeypatch, 2)
    assert sum(in_all[1][units] for units in UNITS) == LAYERS
    assert [units for units in UNITS if spared[1][units]] == [UNITS[2], UNITS[8]]
    assert objective == pytest.approx(most, rel=1e-5)


def test_layers_that_gain_have_their_neighbours_visited(spec: SymmetrySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [step for step in steps_of(spec) if isinstance(step, HeadFamily)]
    _, _, spared = matched(spec, pair(spec, range(0)), monkeypatch, 2)
    assert [spared[1][family] for family in heads] == [1] * LAYERS


def test_each_speaks_for_its_own_neighbours(spec: SymmetrySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweep, "_gain", lambda _, step: 1.0 if step == UNITS[8] else 0.0)
    _, _, spared = matched(spec, pair(spec, range(LAYERS)), monkeypatch, 2)
    assert [units for units in UNITS if spared[1][units]] == [UNITS[2], *UNITS[6:]]


def test_copies_are_found_all_the_same(spec: SymmetrySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Generator().manual_seed(1)
    a = canonical(spec, random_weights(spec, rng))
    models = a, transform(spec, a, random_elements(spec, rng))
    _, objective, _ = matched(spec, models, monkeypatch, 2)
    assert objective == pytest.approx(matching._limit(weighted(Balanced.of(spec, *models))), rel=1e-7)


def test_neighbours_are_layers_of_one_kind_that_follow_each_other(spec: SymmetrySpec) -> None:
    steps = steps_of(spec)
    found = neighbours(spec, steps)
    assert Counter(chain.from_iterable(found)) == Counter(steps)
    units = [part for part in found if part[0] in UNITS]
    assert [part[0] for part in units] == [UNITS[8], UNITS[2]]
    assert [set(part) for part in units] == [{*UNITS[6:]}, {*UNITS[:6]}]
    assert [part for part in found if "residual" in part] == [["residual"]]
    few = list[Step](UNITS[:9])
    assert neighbours(spec, few) == [[step] for step in few]
