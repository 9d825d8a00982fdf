"""Efforts: what they come to for seeds and for fine-tunes, and what a merge is said to be beside its models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import built, run, tiny_llama, tiny_vit
from safetensors.torch import load_file, save_file
from test_transport import save
from torch.nn.functional import cross_entropy

from hf_align.jobs.effort import at_effort, share_basis
from hf_align.merging.regression import regress
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Network
from hf_align.settings.options import Options

LOUD = tiny_llama(initializer_range=0.5)
"""Models with opinions, whose regression is nearer to their ensemble than their mean."""


@pytest.fixture
def seeds(tmp_path: Path) -> list[str]:
    return [str(save(tmp_path / f"seed {seed}", built(LOUD, seed))) for seed in (0, 1)]


@pytest.fixture
def tuned(tmp_path: Path) -> str:
    """What began as the first seed."""
    model = built(LOUD, 0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std().nan_to_num() * torch.randn(weight.shape)
    return str(save(tmp_path / "tuned", model))


def data(folder: Path) -> Path:
    ids = torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, folder / "data.safetensors")
    return folder / "data.safetensors"


def test_fine_tunes_are_told_from_seeds(seeds: list[str], tuned: str) -> None:
    assert share_basis([seeds[0], tuned]) and not share_basis(seeds)
    assert not share_basis([seeds[0], tuned, seeds[1]])
    assert not share_basis([seeds[0], "no such folder"])


@pytest.mark.parametrize("layout", ["a buffer of old versions", "no prefix", "another vocabulary"])
def test_fine_tunes_are_told_by_their_weights_in_any_layout(layout: str, tmp_path: Path) -> None:
    base, same, other = (save(tmp_path / name, built(LOUD, seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    for folder in (same, other):
        stored = load_file(folder / "model.safetensors")
        if layout == "a buffer of old versions":
            stored |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
        elif layout == "no prefix":
            stored = {name.removeprefix("model."): weight for name, weight in stored.items()}
        else:
            stored |= {n: torch.cat([w, w[:1]]) for n, w in stored.items() if "embed" in n or "lm_head" in n}
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    found = [at_effort([str(base), str(folder)], Options(), "good")[0].match for folder in (same, other)]
    assert found == ["weight" if layout == "another vocabulary" else "none", "weight"]


@pytest.mark.parametrize(
    ("effort", "apart", "together"),
    [("quick", "linear", "linear"), ("good", "regression", "linear"), ("best", "distil", "curve")],
)
def test_an_effort_is_a_match_and_a_method(
    effort: str, apart: str, together: str, seeds: list[str], tuned: str
) -> None:
    of_seeds, _ = at_effort(seeds, Options(), effort)
    of_fine_tunes, _ = at_effort([seeds[0], tuned], Options(), effort)
    assert (of_seeds.match, of_seeds.method) == ("weight", apart)
    assert (of_fine_tunes.match, of_fine_tunes.method) == ("none", together)
    assert (of_seeds.schedule.steps == 1000) == (effort == "best")


def test_left_open_it_is_good_by_regression_and_the_report_says_what_it_came_to(
    seeds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_align.jobs.merge.MORE", 32)
    monkeypatch.setattr("conftest.by_weights", list)
    examples = data(tmp_path)
    assert run("merge", *seeds, "-o", tmp_path / "good", "--data", examples, "--json") == 0
    said = capsys.readouterr()
    assert "--effort good: matched by weights, merged by regression" in said.err
    (note,) = [n for n in json.loads(said.out)["notes"] if "its models" in n]
    assert "their ensemble" in note and ("no worse" in note) != ("for a lower loss use --effort best" in note)
    assert run("merge", *seeds, "--method", "regression", "-o", tmp_path / "by name", "--data", examples, "-q") == 0
    good, by_name = (load_file(tmp_path / folder / "model.safetensors") for folder in ("good", "by name"))
    assert all(torch.equal(good[n], by_name[n]) for n in by_name)


def test_good_takes_the_mean_where_that_is_nearer_to_the_ensemble(
    seeds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three Gemmas the regression was taken, at 3.398, where the mean had 3.387."""
    monkeypatch.setattr("hf_align.jobs.merge.MORE", 32)
    monkeypatch.setattr("conftest.by_weights", list)

    def spoiled(*given: Any, **more: Any) -> None:
        regress(*given, **more)
        found = given[4]
        for name in list(found):
            found[name] = -found[name]

    assert run("merge", *seeds, "--effort", "quick", "-o", tmp_path / "quick", "-q") == 0
    monkeypatch.setattr("hf_align.jobs.merge.regress", spoiled)
    assert run("merge", *seeds, "--method", "regression", "-o", tmp_path / "by name", "-q") == 0
    capsys.readouterr()
    assert run("merge", *seeds, "-o", tmp_path / "good", "--data", data(tmp_path), "--json") == 0
    notes = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert "merged by the mean, which is nearer" in notes and "regression solves" not in notes
    assert "regression does NOT help" not in notes
    good, mean, by_name = (load_file(tmp_path / f / "model.safetensors") for f in ("good", "quick", "by name"))
    assert all(torch.equal(good[n], mean[n]) for n in mean)
    assert not all(torch.equal(good[n], by_name[n]) for n in mean)


def test_what_cannot_be_run_is_merged_by_the_mean(
    seeds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("merge", *seeds, "--effort", "best", "--offload", "-o", tmp_path / "best") == 0
    assert "merged by the mean: --method distil holds both models" in capsys.readouterr().err
    assert run("merge", *seeds, "-o", tmp_path / "mean", "-q") == 0
    best, mean = (load_file(tmp_path / folder / "model.safetensors") for folder in ("best", "mean"))
    assert all(torch.equal(best[n], mean[n]) for n in mean)


def test_an_effort_beside_a_choice_of_its_own_is_refused(seeds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("merge", *seeds, "--effort", "good", "--match", "weight") == 2
    assert "leave out --match" in capsys.readouterr().err
    assert run("merge", *seeds, "--effort", "best", "--steps", "9") == 2
    assert "leave out --steps" in capsys.readouterr().err


@torch.no_grad()
def test_the_loss_of_an_ensemble() -> None:
    for config, inputs, ahead in (
        (tiny_llama(), {"input_ids": torch.randint(11, (70, 8))}, 1),
        (tiny_vit(), {"pixel_values": torch.randn(70, 1, 4, 4), "labels": torch.randint(2, (70,))}, 0),
    ):
        network = Network(config)
        models = [{n: p.detach() for n, p in built(config, seed).named_parameters()} for seed in (0, 1)]
        evaluator = Evaluator(network, inputs)
        for shares in ((1.0, 0.0), (0.3, 0.7)):
            labels = evaluator.data["labels"][:, ahead:] if ahead else evaluator.data["labels"]
            log_p = sum(s * network(m, inputs).logits.log_softmax(-1) for s, m in zip(shares, models, strict=True))
            log_p = log_p[:, :-ahead] if ahead else log_p
            expected = float(cross_entropy(log_p.flatten(0, -2), labels.flatten()))
            assert evaluator.ensemble(models, shares) == pytest.approx(expected, rel=1e-4)
        assert evaluator.ensemble(models, (1.0, 0.0)) == pytest.approx(evaluator.loss(models[0]), rel=1e-4)


def test_a_loss_that_is_no_cross_entropy_has_no_ensemble() -> None:
    config = tiny_vit(problem_type="regression", num_labels=1)
    inputs = {"pixel_values": torch.randn(4, 1, 4, 4), "labels": torch.randn(4)}
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    assert Evaluator(Network(config), inputs).ensemble([weights, weights], (0.5, 0.5)) is None
