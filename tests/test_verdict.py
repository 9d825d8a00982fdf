"""What is said of a merge is what its files come to, and no more than was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import built, run, tiny_llama
from safetensors.torch import load_file, save_file

from hf_align.jobs.comparing import verdict
from hf_align.running.evaluate import Comparison, Path1D

MATCH_NONE = ("--match", "none", "--method", "linear")


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Three of one architecture, with weights so large that rounding them shows."""
    for seed in range(3):
        model = built(tiny_llama(), seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(3)
        model.save_pretrained(tmp_path / str(seed))
    return [tmp_path / str(seed) for seed in range(3)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    tokens = torch.randint(3, 11, (32, 8), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": tokens}, tmp_path / "data.safetensors")
    return tmp_path / "data.safetensors"


def reported(*arguments: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run("merge", *arguments, "--json", "--quiet", "--no-witness", "--points", "3") == 0
    return dict(json.loads(capsys.readouterr().out))


def said(*arguments: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    return list(reported(*arguments, capsys=capsys)["notes"])


@pytest.mark.parametrize("count", [2, 3])
def test_models_that_are_not_aligned_say_nothing_of_alignment(
    count: int, models: list[Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = reported(*models[:count], "-o", tmp_path / "out", "--data", data, *MATCH_NONE, capsys=capsys)
    notes = found["notes"]
    assert count > 2 or found["comparison"]["helps"] is None
    assert notes[0].startswith("not aligned, the models have")
    assert not any("does NOT help" in note for note in notes)
    assert "does NOT help" not in (tmp_path / "out" / "README.md").read_text()


def test_neither_does_an_evaluation(models: list[Path], data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("evaluate", *models[:2], "--data", data, "--match", "none", "--points", "3", "--quiet") == 0
    assert "not aligned, the models have a barrier of" in (out := capsys.readouterr().out) and "help" not in out
    assert out.count("aligned") == 1, "what is not aligned has no losses of its own"


def test_rounding_is_no_help() -> None:
    naive = Path1D((0.0, 0.5, 1.0), (2.8, 2.8000002, 2.8))
    still, better = (Comparison(naive, Path1D(naive.lambdas, (2.8, middle, 2.8))) for middle in (2.8000001, 2.79))
    assert not still.helps and "does NOT help" in verdict(still)
    assert better.helps and verdict(better).startswith("there is no barrier; alignment lowers the mean loss")
    worse = Comparison(Path1D(naive.lambdas, (2.8, 2.5, 2.8)), Path1D(naive.lambdas, (2.8, 2.7, 2.8)))
    assert "does NOT help here: mean loss between the models 2.767 aligned, 2.700 without" in verdict(worse)
    high = Path1D(naive.lambdas, (2.8, 2.81, 2.8))
    assert Comparison(high, naive).helps and "lowers the barrier" in verdict(Comparison(high, naive))


@pytest.mark.parametrize("method", ["linear", "regmean"])
def test_the_loss_is_that_of_the_files(
    method: str, models: list[Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    notes = said(*models[:2], "-o", out, "--data", data, "--method", method, "--dtype", "bfloat16", capsys=capsys)
    tokens = load_file(data)["input_ids"][16 if method == "regmean" else 0 :]  # which runs on the other half
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert f"loss {float(model(input_ids=tokens, labels=tokens).loss):.3f}; its models" in notes[-1]
