"""Matching on trained models: planted symmetries are recovered, functions unchanged, barriers lowered."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DATA, MODELS, matched
from op_program import Data, OpExample, draw_weights, trace_op

from hf_align.jobs import pipeline
from hf_align.jobs.comparing import verdict
from hf_align.matching import balanced
from hf_align.matching.balanced import Balanced
from hf_align.matching.choices import with_residual
from hf_align.matching.cross import inner_product
from hf_align.matching.heads import best_fit
from hf_align.matching.memory import Step
from hf_align.matching.solver import Solution, Solver
from hf_align.matching.stream import products_of_tables, residual
from hf_align.matching.visits import moved as has_moved
from hf_align.matching.weights import descend, match_weights, steps_of
from hf_align.opening.pairs import Pair, open_pair
from hf_align.runtime.devices import threads
from hf_align.settings.options import Options
from hf_align.symmetry.action import Elements, act
from hf_align.symmetry.alignment import AlignedWeights, compose, squared_distance
from hf_align.symmetry.certificate.random_copy import random_elements, random_inputs
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.elements import Monomial
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.groups import GeneralLinear
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.execute import execute
from hf_align.tracing.trace import trace

FAMILIES = ("llama", "gpt2", "vit")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {f: open_pair(str(MODELS / f / "0"), str(MODELS / f / "1")) for f in FAMILIES}


def in_float64(pair: Pair, spec: SymmetrySpec) -> tuple[Weights, Weights]:
    return tuple({n: m.weights[n].double() for n in spec.parameters} for m in (pair.a, pair.b))  # type: ignore[return-value]


def moved(spec: SymmetrySpec, weights: Weights, seed: int) -> Weights:
    elements = random_elements(spec, torch.Generator().manual_seed(seed))
    canonical = CanonicalWeights(weights, spec.gauges)
    return {n: act(canonical[n], n, spec, elements) for n in spec.parameters}


def difference(pair: Pair, one: Weights, other: Weights, dtype: torch.dtype) -> float:
    program = trace(pair.config)
    inputs = random_inputs(program, torch.Generator().manual_seed(0))
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
    outputs = [execute(program, {n: t.to(dtype) for n, t in w.items()}, inputs) for w in (one, other)]
    return float((outputs[0] - outputs[1]).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("residual", ["orthogonal", "permutation"])
def test_a_planted_symmetry_is_recovered(family: str, seed: int, residual: str, pairs: dict[str, Pair]) -> None:
    spec = pairs[family].spec
    spec = with_residual(spec, residual)
    a, _ = in_float64(pairs[family], spec)
    match = matched(spec, a, moved(spec, a, seed))
    assert match.before is not None and match.after is not None
    assert match.before > 1
    assert match.after / match.before < 1e-4


def test_without_balancing_a_planted_symmetry_is_lost(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balanced, "balance", lambda spec, _, space: spec.group(space).identity(spec.index_shape(space)))
    spec = pairs["gpt2"].spec
    a, _ = in_float64(pairs["gpt2"], spec)
    match = matched(spec, a, moved(spec, a, 0))
    assert match.after is not None and match.before is not None
    assert match.after / match.before > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_alignment_leaves_the_function_alone(family: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[family]
    a, b = in_float64(pair, pair.spec)
    match = matched(pair.spec, a, b)
    for weights, elements in ((a, match.a), (b, match.b)):
        aligned = dict(AlignedWeights(weights, pair.spec, elements))
        assert sum(squared_distance(weights, aligned, name) for name in weights) > 1
        assert difference(pair, weights, aligned, torch.float64) < 1e-9
        narrow = dict(AlignedWeights({n: t.float() for n, t in weights.items()}, pair.spec, elements))
        assert difference(pair, weights, narrow, torch.float32) < 1e-4


def test_rotations_of_each_head_of_each_group_go_where_both_go() -> None:
    example = OpExample("outer", lambda x: x.unsqueeze(-1) * x.unsqueeze(-2), (Data((2, 3, 4)),), "")
    program, rng = trace_op(example), torch.Generator().manual_seed(0)
    spec = derive(program)
    assert {len(space.index) for space in spec.spaces.values()} == {0, 2}
    weights = draw_weights(example, program, rng)
    first, second = (random_elements(spec, rng) for _ in range(2))
    both = compose(spec, second, first)
    for name in spec.parameters:
        expected = act(act(weights[name], name, spec, first), name, spec, second)
        torch.testing.assert_close(act(weights[name], name, spec, both), expected)


def test_composed_elements_act_one_after_the_other(pairs: dict[str, Pair]) -> None:
    spec = pairs["llama"].spec
    a, _ = in_float64(pairs["llama"], spec)
    first, second = (random_elements(spec, torch.Generator().manual_seed(s)) for s in (1, 2))
    both = compose(spec, second, first)
    for name in spec.parameters:
        expected = act(act(a[name], name, spec, first), name, spec, second)
        torch.testing.assert_close(act(a[name], name, spec, both), expected)


def test_descent_never_falls_and_ends(pairs: dict[str, Pair]) -> None:
    spec = pairs["llama"].spec
    a, b = in_float64(pairs["llama"], spec)
    agreement: list[float] = []
    match = matched(spec, a, b, progress=lambda sweep, value: agreement.append(value))
    assert agreement == sorted(agreement)
    assert len(agreement) == match.sweeps < 50


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_said_of_the_objective_is_the_objective(family: str, pairs: dict[str, Pair]) -> None:
    """Most of it is taken from the products of the last step, never from the weights."""
    spec = pairs[family].spec
    models = Balanced.of(spec, *in_float64(pairs[family], spec))
    said: list[float] = []
    found, _ = descend(models, {}, progress=lambda _, value: said.append(value))
    assert said[-1] == pytest.approx(inner_product(spec, models.a, models.b, found), rel=1e-5)


def test_only_what_has_a_neighbour_that_moved_is_solved_again(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = pairs["llama"].spec
    a, b = in_float64(pairs["llama"], spec)
    models = Balanced.of(spec, a, b)
    found, sweeps = match_weights(models)
    assert sweeps > 2
    solved: list[int] = []
    plain = Solver.solve

    def counting(self: Solver, together: list[Step], elements: Elements) -> Sequence[Solution]:
        solved.append(len(together))
        return plain(self, together, elements)

    monkeypatch.setattr(Solver, "solve", counting)
    alone = {s: e for s, e in found.items() if s != residual(spec)}
    others = [step for step in steps_of(spec) if step != residual(spec)]
    monkeypatch.setattr("hf_align.matching.weights.steps_of", lambda _: others)
    again, sweeps = descend(models, alone)
    # Nothing else meets: each is solved once, and no second sweep asks for any.
    assert sweeps == 1 and sum(solved) == len(others)
    assert again.keys() >= alone.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stays_is_seldom_solved_again_and_could_gain_nothing(
    family: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = pairs[family].spec
    models = Balanced.of(spec, *in_float64(pairs[family], spec))
    solved: list[Step] = []
    plain = Solver.solve

    def noting(self: Solver, together: list[Step], elements: Elements) -> Sequence[Solution]:
        solved.extend(together)
        return plain(self, together, elements)

    monkeypatch.setattr(Solver, "solve", noting)
    found, sweeps = descend(models, {})
    steps = steps_of(spec)
    assert len(solved) < sweeps * len(steps)

    def objective(elements: Elements) -> float:
        return inner_product(spec, models.a, models.b, elements)

    solver = Solver(models, products_of_tables(models), best_fit, 1)
    for step in steps:
        (again,) = plain(solver, [step], found)
        assert objective({**found, **again.elements}) < (1 + 2e-5) * objective(found)


def test_steps_side_by_side_share_the_inverse_of_the_stream(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread would invert it, with as many threads of torch, and they would wait for each other."""
    spec = pairs["llama"].spec
    models = Balanced.of(spec, *in_float64(pairs["llama"], spec))
    width, plain = spec.spaces[residual(spec)].size, torch.linalg.inv
    by: list[threading.Thread] = []

    def noting(matrix: torch.Tensor) -> torch.Tensor:
        if matrix.shape[-1] == width:
            by.append(threading.current_thread())
        return plain(matrix)

    monkeypatch.setattr(torch.linalg, "inv", noting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    _, sweeps = descend(models, {})
    assert 0 < len(by) <= sweeps + 1 and {*by} == {threading.main_thread()}


def test_threads_share_those_of_torch() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with threads(2) as pool:
            assert list(pool.map(lambda _: torch.get_num_threads(), range(2))) == [2, 2]
        with threads(8) as pool:
            assert list(pool.map(lambda _: torch.get_num_threads(), range(8))) == [1] * 8
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_two_units_that_change_places_have_moved() -> None:
    order = torch.arange(10_000)
    swapped = order.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert has_moved(Monomial.permutation(order), Monomial.permutation(swapped))
    assert not has_moved(Monomial.permutation(order), Monomial.permutation(order.clone()))


def test_many_query_heads_are_matched_without_trying_all_orders(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_align.matching import heads

    monkeypatch.setattr(heads, "_MOST_ORDERS", 1)
    spec = pairs["llama"].spec
    a, _ = in_float64(pairs["llama"], spec)
    match = matched(spec, a, moved(spec, a, 5))
    assert match.after is not None and match.before is not None
    assert match.after / match.before < 1e-4


LIMITS = {
    ("gpt2", 0, 1): 0.50,
    ("llama", 0, 1): 1.06,
    ("llama", 0, 2): 1.06,
    ("llama", 1, 2): 1.06,
    ("vit", 0, 1): 2.40,
}


QUICK = (("gpt2", 0, 1), ("vit", 0, 1))


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in LIMITS],
)
def test_barriers(family: str, first: int, second: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    full = DATA / ("eval_digits.safetensors" if family == "vit" else "eval_lm_kjv.safetensors")
    held_out = tmp_path / "data.safetensors"
    save_file({k: t if family == "vit" else t[:128].contiguous() for k, t in load_file(full).items()}, held_out)
    a, b = (str(MODELS / family / str(s)) for s in (first, second))
    comparison = pipeline.evaluate(a, b, held_out, Options(points=11))
    assert comparison.aligned.barrier <= LIMITS[family, first, second] < comparison.naive.barrier
    for naive, aligned in zip((0, -1), (0, -1), strict=True):
        assert comparison.aligned.losses[aligned] == pytest.approx(comparison.naive.losses[naive], abs=1e-4)
    assert "lowers the barrier" in verdict(comparison)


def test_no_gain_is_said(tmp_path: Path) -> None:
    a, b = (str(MODELS / "vit" / str(s)) for s in (0, 1))
    options = Options(residual="identity", points=5)
    comparison = pipeline.evaluate(a, b, DATA / "eval_digits.safetensors", options)
    assert not comparison.helps
    assert "does NOT help" in verdict(comparison)


def test_permutations_start_from_the_rotation_that_they_replace() -> None:
    a, b = (str(MODELS / "vit" / str(s)) for s in (0, 1))
    options = Options(residual="permutation", points=5)
    assert pipeline.evaluate(a, b, DATA / "eval_digits.safetensors", options).helps  # from tables it does not


def test_lowering_the_residual_leaves_the_rest(pairs: dict[str, Pair]) -> None:
    spec = pairs["gpt2"].spec
    lowered = with_residual(spec, "permutation")
    changed = [n for n in spec.spaces if spec.spaces[n] != lowered.spaces[n]]
    assert len(changed) == 1
    assert replace(lowered, spaces=spec.spaces) == spec
    assert sum(isinstance(s.group, GeneralLinear) for s in lowered.spaces.values()) == 6


def test_weights_that_do_not_fit_into_memory_are_matched_alike(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs["llama"]
    kept = matched(pair.spec, pair.a.weights, pair.b.weights)
    for most in (0, 200_000):
        monkeypatch.setattr("hf_align.matching.weight_cache.CACHED", most)
        again = matched(pair.spec, pair.a.weights, pair.b.weights)
        assert again.after == kept.after
        for name, element in kept.b.items():
            assert all(torch.equal(t, again.b[name].tensors()[k]) for k, t in element.tensors().items()), name
