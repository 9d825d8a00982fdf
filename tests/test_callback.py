"""The barrier to a reference, logged by a real Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import built, tiny_gpt2, tiny_llama
from plain_modules import WithLoss, seeded
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import hf_align


class Rows(Dataset[dict[str, Tensor]]):
    """Sequences in which each token follows from the one before."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        tokens = (torch.arange(8) * 3 + at) % 11
        return {"input_ids": tokens, "labels": tokens}


def trainer_of(model: torch.nn.Module, folder: Path, data: Dataset[Any] | None = None) -> Trainer:
    arguments = TrainingArguments(str(folder), max_steps=30, eval_steps=15, eval_strategy="steps", learning_rate=0.02,
                                  report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")  # fmt: skip
    rows = data or Rows()
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)


def test_the_barrier_is_logged_while_training(tmp_path: Path) -> None:
    reference, model = built(tiny_llama(), 0), built(tiny_llama(), 1)
    trainer_of(reference, tmp_path).train()
    held_out = {"input_ids": torch.stack([row["input_ids"] for row in (Rows()[i] for i in range(8))])}
    trainer = trainer_of(model, tmp_path)
    trainer.add_callback(hf_align.BarrierCallback(trainer, reference, held_out, points=3))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "barrier" in entry]
    assert [entry["step"] for entry in logged] == [15, 30]
    last = hf_align.evaluate(reference, model, held_out, points=3)
    assert logged[-1]["barrier"] == pytest.approx(last.naive.barrier, abs=1e-5)
    assert logged[-1]["barrier_aligned"] == pytest.approx(last.aligned.barrier, abs=1e-5)
    assert logged[0]["barrier"] != logged[1]["barrier"] != logged[1]["barrier_aligned"]


class Pairs(Dataset[dict[str, Any]]):
    """Points, and which of their first coordinates is the largest."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> dict[str, Any]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(at))
        return {"x": x, "labels": int(x[:3].argmax())}


def test_the_barrier_of_a_plain_module(tmp_path: Path) -> None:
    reference, model = seeded(WithLoss, 0).float(), seeded(WithLoss, 1).float()
    trainer = trainer_of(model, tmp_path, Pairs())
    trainer.add_callback(hf_align.BarrierCallback(trainer, reference, Pairs(), points=3))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "barrier" in entry]
    last = hf_align.evaluate(reference, model, Pairs(), points=3)
    assert [entry["step"] for entry in logged] == [15, 30]
    assert logged[-1]["barrier"] == pytest.approx(last.naive.barrier, abs=1e-5)
    assert logged[-1]["barrier_aligned"] == pytest.approx(last.aligned.barrier, abs=1e-5)
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert last.naive.losses[-1] == pytest.approx(evaluated[-1], rel=1e-3)


def test_a_model_that_does_not_merge_ends_training_in_one_line(tmp_path: Path) -> None:
    trainer = trainer_of(built(tiny_llama(), 1), tmp_path)
    trainer.add_callback(
        hf_align.BarrierCallback(trainer, built(tiny_gpt2(), 0), {"input_ids": torch.ones(2, 8).long()})
    )
    with pytest.raises(hf_align.IncompatibleModels, match="they do not merge"):
        trainer.train()
    with pytest.raises(ValueError, match="match is 'weights'"):
        hf_align.BarrierCallback(trainer, built(tiny_llama(), 0), {}, match="weights")
    with pytest.raises(ValueError, match="points is 2; a whole number is needed, at least 3"):
        hf_align.BarrierCallback(trainer, built(tiny_llama(), 0), {}, points=2)
