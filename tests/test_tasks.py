"""Scores of the LM Evaluation Harness on a small task of our own."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import MODELS, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_align
from hf_align.cli.scoring import score_lines

LLAMA = MODELS / "llama" / "0"
QUESTIONS = [("And God said, Let there be", [" light", " xqz"]), ("In the beginning", [" zzkw", " God created"])]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with a task of two questions with two answers each."""
    rows = [{"q": q, "choices": choices, "gold": i} for i, (q, choices) in enumerate(QUESTIONS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    described = dict(task="genesis", dataset_path="json", output_type="multiple_choice", test_split="test",
                     dataset_kwargs={"data_files": {"test": str(tmp_path / "rows.jsonl")}}, doc_to_text="{{q}}",
                     doc_to_choice="{{choices}}", doc_to_target="{{gold}}", target_delimiter="",
                     metric_list=[{"metric": "acc"}])  # fmt: skip
    (tmp_path / "genesis.yaml").write_text(yaml.safe_dump(described))
    return tmp_path


def right(model: torch.nn.Module) -> float:
    """The share of questions whose answer is the likelier one, counted by hand."""
    tokenizer, correct = AutoTokenizer.from_pretrained(LLAMA), 0
    for gold, (question, choices) in enumerate(QUESTIONS):
        likely = []
        for choice in choices:
            before, whole = (tokenizer(text, return_tensors="pt").input_ids for text in (question, question + choice))
            at = before.shape[1]
            logs = model(whole).logits.log_softmax(-1)[0, at - 1 : -1]
            likely.append(float(logs.gather(1, whole[0, at:, None]).sum()))
        correct += likely[gold] == max(likely)
    return correct / len(QUESTIONS)


@pytest.mark.slow  # the harness reads thousands of tasks before it runs one
def test_models_are_scored_by_the_harness(task: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    live = AutoModelForCausalLM.from_pretrained(LLAMA)
    with torch.no_grad():
        live.lm_head.weight.neg_()
        expected = right(live.eval())
    found = hf_align.score({"A": LLAMA, "negated": live}, ["genesis"], include_path=task, device="cpu")
    assert found["A"]["genesis"]["acc,none"] == 1 and all("," in name for name in found["A"]["genesis"])
    assert math.isclose(found["negated"]["genesis"]["acc,none"], expected) and expected < 1
    with pytest.raises(ValueError, match="no task called exodus"):
        hf_align.score({"A": LLAMA}, ["exodus"], include_path=task)
    with pytest.raises(ValueError, match="nowhere is no folder of tasks"):
        hf_align.score({"A": LLAMA}, ["genesis"], include_path="nowhere")


@pytest.mark.slow
def test_the_command_scores_both_models_and_their_means(
    task: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    common = ("evaluate", LLAMA, LLAMA.parent / "1", "--tasks", "genesis", "--include-path", task, "--device", "cpu")
    assert run(*common, "--json") == 0
    scores = json.loads(capsys.readouterr().out)["tasks"]
    assert list(scores) == ["A", "B", "mean", "aligned mean"]
    assert scores["A"] == hf_align.score({"A": LLAMA}, ["genesis"], include_path=task, device="cpu")["A"]
    assert run(*common, "--match", "none") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["A", "B", "mean"] and shown[1].split()[:2] == ["genesis", "acc"]
    assert max(map(len, shown)) <= 80
    assert run(*common, "--tasks", "exodus") == 2
    assert "no task called exodus" in capsys.readouterr().err


def test_a_table_of_scores_has_a_row_for_each_metric() -> None:
    each = {"acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.25}
    lines = score_lines({"A": {"task": each}, "B": {"task": {**each, "acc,none": 1.0}}})
    assert [line.split() for line in lines] == [["A", "B"], ["task", "acc", "0.5000", "1.0000"],
                                                ["task", "acc_norm", "0.2500", "0.2500"]]  # fmt: skip


def test_without_the_harness_the_command_says_so_before_it_merges(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run("evaluate", "no/a", "no/b", "--tasks", "genesis") == 2
    assert "hf-align[tasks]" in capsys.readouterr().err


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"hf-align\[tasks\]"):
        hf_align.score({"A": LLAMA}, ["genesis"])
