"""Scores of the LM Evaluation Harness on a small task of our own."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_align

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
    assert found["A"]["genesis"]["acc,none"] == 1
    assert math.isclose(found["negated"]["genesis"]["acc,none"], expected) and expected < 1
    with pytest.raises(ValueError, match="no task exodus"):
        hf_align.score({"A": LLAMA}, ["exodus"], include_path=task)


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"hf-align\[tasks\]"):
        hf_align.score({"A": LLAMA}, ["genesis"])
