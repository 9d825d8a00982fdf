"""What a model's own code does where no tried call leads, and which cannot be forced, is refused; questions that only
arguments decide are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from traps import unreached as code
from traps.test_asked import once
from traps.trap import Call, Trap, cases, check, custom, forward, ids_of, lengths, of_code, run, save


def masked(model: PreTrainedModel) -> Mapping[str, Call]:
    ids = ids_of(model, 9)
    return {"a mask": partial(forward, input_ids=ids, attention_mask=torch.ones_like(ids))}


def crowded(model: PreTrainedModel) -> Mapping[str, Call]:
    ids = ids_of(model, 5)
    return {f"{rows} texts": partial(forward, input_ids=ids[:1].expand(rows, -1)) for rows in (2, 24)}


TRAPS = [
    of_code(code.OrdinaryTower, lengths(47, 20)),
    of_code(code.ChosenTower, lengths(47, 20)),
    of_code(code.SideBySideTower, once(parts={"fine": 3.0})),
    *(
        replace(of_code(tower, lengths(47, 20)), may_refuse=True)
        for tower in (code.FoundTower, code.MissedTower, code.LoopedTower, code.SuppressedTower)
    ),
    Trap("a number for masked texts", custom(code.ClippedTower, {"clip": 1.5}, clip=0.0), masked, may_refuse=True),
    Trap(
        "a flag for many texts",
        custom(code.CrowdedTower, {"bends": True}, bends=False, shouts=False),
        crowded,
        may_refuse=True,
    ),
    Trap("a flag for words", custom(code.CrowdedTower, {"shouts": True}, bends=True, shouts=False), crowded),
    replace(of_code(code.PatternTower, once(style="soft1")), may_refuse=True),
]


@pytest.mark.parametrize("trap", cases("unreached", TRAPS))
def test_what_no_call_reaches_is_no_secret(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)


@pytest.mark.slow
def test_what_only_another_argument_decides_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate("ab"):
        save(of_code(code.SlicedTower, lengths()), seed, tmp_path / name)
    assert run("align", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--json", "--trust-remote-code") == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    (said,) = [note for note in notes if note.startswith("no argument that was tried sends ")]
    assert run("spec", tmp_path / "a", "--json", "--trust-remote-code") == 0
    lines = json.loads(capsys.readouterr().out)["untried"]
    assert lines[0] in said
    assert any(
        line.startswith("modeling.py:") and line.endswith(": `if isinstance(self.units, slice):`") for line in lines
    )
