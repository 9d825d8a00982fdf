"""More than two models in one basis: consistent, in no order, and better than averaging."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import DATA, MODELS, run
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_align.jobs.opened import Opened
from hf_align.jobs.writing import record
from hf_align.matching import universe
from hf_align.matching.balanced import Balanced
from hf_align.matching.find import Search, find
from hf_align.matching.universe import Mean, match_universe
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Network
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule
from hf_align.symmetry.action import act
from hf_align.symmetry.alignment import compose, inverse
from hf_align.symmetry.certificate.random_copy import random_elements
from hf_align.symmetry.elements import Element


@pytest.fixture(scope="module", autouse=True)
def few_rounds() -> Iterator[None]:
    """Later rounds gain little, and none of this hangs on them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(universe, "_ROUNDS", 4)
        yield


@pytest.fixture(scope="module")
def pair() -> Pair:
    return open_pair(str(MODELS / "llama" / "0"), str(MODELS / "llama" / "1"))


@pytest.fixture(scope="module")
def three(pair: Pair) -> Balanced:
    third = open_pair(str(MODELS / "llama" / "2"), str(MODELS / "llama" / "1")).a
    return Balanced.of(pair.spec, pair.a.weights, pair.b.weights, third.weights)


@pytest.fixture(scope="module")
def matched(three: Balanced) -> list[dict[str, Element]]:
    return match_universe(three)[0]


def merged(models: Balanced, elements: list[dict[str, Element]]) -> dict[str, Tensor]:
    return dict(Mean([models.moved(e, i) for i, e in enumerate(elements)]))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_inverse_undoes(family: str) -> None:
    pair = open_pair(str(MODELS / family / "0"), str(MODELS / family / "1"))
    elements = random_elements(pair.spec, torch.Generator().manual_seed(0))
    back = inverse(pair.spec, elements)
    both = compose(pair.spec, back, elements)
    for name in pair.spec.parameters:
        weight = pair.a.weights[name].double()
        moved = act(weight, name, pair.spec, elements)
        torch.testing.assert_close(act(moved, name, pair.spec, back), weight)
        torch.testing.assert_close(act(weight, name, pair.spec, both), weight)


def test_planted_symmetries_of_one_model_meet(pair: Pair) -> None:
    model = {n: pair.a.weights[n].double() for n in pair.spec.parameters}
    canonical = dict(Balanced.of(pair.spec, model).a)
    planted = [random_elements(pair.spec, torch.Generator().manual_seed(seed)) for seed in range(3)]
    copies = [{n: act(t, n, pair.spec, elements) for n, t in canonical.items()} for elements in planted]
    models = Balanced.of(pair.spec, *copies)
    elements, _ = match_universe(models)
    moved = [dict(models.moved(e, i)) for i, e in enumerate(elements)]
    for first, second in itertools.combinations(moved, 2):
        for name in first:
            torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_the_order_of_the_models_does_not_matter(
    rounds: int, pair: Pair, three: Balanced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(universe, "_ROUNDS", rounds)
    order = (1, 2, 0)
    turned = Balanced(pair.spec, tuple(three.models[i] for i in order), tuple(three.gauges[i] for i in order))
    expected, found = (merged(models, match_universe(models)[0]) for models in (three, turned))
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=2e-6, rtol=1e-6)  # products are in single precision


def test_three_models_meet_below_naive_averaging(
    pair: Pair, three: Balanced, matched: list[dict[str, Element]]
) -> None:
    data = {"input_ids": load_file(DATA / "eval_lm_kjv.safetensors")["input_ids"][:64].long()}
    evaluator = Evaluator(Network(pair.config), data)
    losses = [evaluator.loss({n: t.float() for n, t in merged(three, e).items()}) for e in ([{}, {}, {}], matched)]
    assert losses[1] < losses[0] - 0.8
    said: list[str] = []
    search = Search("learned", Schedule(steps=15, rows=12), own=64, length=32)
    learned, _ = find(three, Network(pair.config), search, None, said.append)
    assert any(line.startswith("round") for line in said)
    assert evaluator.loss({n: t.float() for n, t in merged(three, [{}, *learned]).items()}) < losses[1] - 0.05
    for i, elements in [*enumerate(matched), *enumerate(learned, start=1)]:
        alone = [{n: t.float() for n, t in w.items()} for w in (three.models[i], three.moved(elements, i))]
        assert evaluator.loss(alone[0]) == pytest.approx(evaluator.loss(alone[1]), abs=1e-3)


def test_three_models_are_merged_from_the_command_line(
    pair: Pair, three: Balanced, matched: list[dict[str, Element]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = load_file(DATA / "eval_lm_kjv.safetensors")["input_ids"][:32]
    save_file({"input_ids": ids.contiguous()}, tmp_path / "data.safetensors")
    models = [MODELS / "llama" / str(i) for i in range(3)]
    arguments = ["merge", *models, "-o", tmp_path / "out", "--data", tmp_path / "data.safetensors", "--json"]
    assert run(*arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert any("aligned, the mean of 3 models has loss" in note for note in report["notes"])
    home = inverse(pair.spec, matched[0])
    expected = merged(three, [{}, *(compose(pair.spec, home, e) for e in matched[1:])])
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(written[name], weight.float(), atol=1e-5, rtol=1e-4)
    assert len(list((tmp_path / "out" / "hf-align").glob("alignment-*.safetensors"))) == 2
    card = (tmp_path / "out" / "README.md").read_text()
    assert "llama" in card and "| weight | 0.5 |" not in card


def test_a_killed_run_on_other_examples_is_another_run() -> None:
    opened = Opened.open({str(i): str(MODELS / "llama" / str(i)) for i in range(3)}, Options())
    records = [record({}, opened, {"input_ids": torch.full((2, 8), i)}) for i in (1, 1, 2)]
    assert records[0] == records[1] != records[2]
    assert record({}, opened, None).keys() < records[0].keys()


@pytest.mark.parametrize(
    ("option", "said"), [(("--weight", "0.3"), "equal shares"), (("--method", "slerp"), "merges two models")]
)
def test_options_for_two_models_are_refused_for_three(
    option: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [MODELS / "llama" / str(i) for i in range(3)]
    assert run("merge", *models, "-o", tmp_path / "out", *option) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
