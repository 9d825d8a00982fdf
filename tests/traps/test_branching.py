"""A branch of a model's own code that few calls take is kept as well, whatever leads there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from traps import assigned, built, made
from traps import branching as code
from traps.test_asked import once
from traps.trap import Calls, Trap, both, cases, check, forward, ids_of, lengths, of_code


def texts(rows: int, length: int, **arguments: Any) -> Calls:
    """So many texts at once."""
    return lambda model: {f"{rows} texts": partial(forward, input_ids=ids_of(model, length, rows), **arguments)}


def resumed(model: PreTrainedModel) -> dict[str, Any]:
    """Several tokens behind a cache."""

    def read(model: PreTrainedModel) -> Tensor:
        ids = ids_of(model, 9)
        first = model(input_ids=ids[:, :5], use_cache=True)
        return forward(model, input_ids=ids[:, 5:], past_key_values=first.past_key_values)

    return {"resumed": read}


def switched(model: PreTrainedModel) -> dict[str, Any]:
    def read(model: PreTrainedModel) -> Tensor:
        model.switch()  # type: ignore[operator]
        return forward(model, input_ids=ids_of(model, 7))

    return {"switched": read}


def labelled(model: PreTrainedModel) -> dict[str, Any]:
    ids = ids_of(model, 7)
    return {"with labels": partial(forward, input_ids=ids, labels=ids)}


TRAPS = [
    of_code(code.FifthTower, lengths(44, 49)),
    of_code(code.CrowdTower, both(texts(10, 7), texts(21, 5))),
    of_code(code.BitsTower, lengths(33, 50)),
    of_code(code.ResumedTower, resumed),
    of_code(code.SwitchedTower, switched),
    of_code(code.BothTower, once(options={"sharp": 7}, dtype=torch.float16)),
    of_code(code.LateLayerTower, texts(3, 9), num_hidden_layers=3),
    of_code(code.LateLayerTower, texts(3, 9), num_hidden_layers=3, vocab_size=10_000),
    of_code(code.MatchedTower, lengths(43, 44)),
    of_code(code.CaughtTower, lengths(51, 60)),
    of_code(code.CountedTower, lengths(48, 50)),
    of_code(code.TabledTower, both(texts(10, 7), lengths(22, 45))),
    of_code(code.SharedLineTower, both(texts(10, 7), lengths(22, 45))),
    of_code(code.FirstLayerTower, texts(10, 7), num_hidden_layers=3),
    of_code(code.WrappedTower, texts(10, 7)),
    of_code(code.HandedTower, lengths(7)),
    of_code(code.ForbiddingTower, texts(10, 7)),
    of_code(code.FoldedTower, lengths(35, 70)),
    of_code(code.TriedTower, lengths(35, 70)),
    of_code(code.KeptTower, switched),
    of_code(code.NamedTower, switched),
    of_code(code.NotedTower, lengths(47, 20)),
    of_code(code.RecentTower, lengths(47, 20)),
    of_code(code.ContextTower, lengths(47, 20)),
    of_code(code.ClosedOverTower, lengths(47, 20)),
    of_code(code.ShapedTower, lengths(47, 20)),
    of_code(built.SinusoidTower, lengths(5, 40)),
    of_code(built.SpreadTower, lengths(7)),
    replace(of_code(built.AppendedTower, lengths(44, 20)), may_refuse=True),
    replace(of_code(built.ExtendedTower, lengths(44, 20)), may_refuse=True),
    of_code(assigned.FirstCallTower, lengths(7, 40)),
    of_code(assigned.UnitsTower, lengths(7, 40)),
    replace(of_code(assigned.WrittenTower, lengths(7, 40)), may_refuse=True),
    replace(of_code(assigned.LabelledTower, labelled), may_refuse=True),
    of_code(code.CompiledTower, both(texts(10, 7), texts(20, 5))),
    replace(of_code(code.ScriptedTower, texts(36, 7)), may_refuse=True),
    replace(of_code(made.MadeTower, lengths(47, 20)), may_refuse=True),
    Trap("asking", of_code(code.AskingTower, lengths(7)).build, both(lengths(7), texts(10, 7)), may_refuse=True),
]


@pytest.mark.parametrize("trap", cases("branching", TRAPS))
def test_aligned_b_is_b_where_its_code_takes_a_branch_that_few_calls_take(
    trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(trap, tmp_path, capsys)
