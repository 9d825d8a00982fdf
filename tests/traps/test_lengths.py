"""What the length of the text, or a position, decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import run

from traps import lengths as code
from traps.trap import Calls, Trap, both, cases, check, custom, lengths, save, text


def of(name: str, calls: Calls = text, **config: Any) -> Trap:
    kind = getattr(code, f"{name}Tower", None) or getattr(code, name)
    label = "-".join([name, *map(str, config.values())])
    return Trap(label, custom(kind, **config), calls, may_refuse=True)


TRAPS = [
    of("Above", limit=8),
    of("Above", limit=16),
    of("Above", limit=31),
    of("Below"),
    of("Even"),
    of("Single", both(lengths(1, 2, 7, 12), text)),
    of("LateTerm"),
    of("LateFactor"),
    of("LateMask"),
    of("Chunked"),
    of("Window"),
    of("Scaled"),
    of("Stretched"),
    of("StartsLate"),
    of("Flips"),
    of("Buckets"),
    of("Dilated", lengths()),
    of("Delayed", lengths()),
    of("LateStream"),
    of("Padded", lengths()),
]

FAR = [
    of("CutAtLimit", lengths(7, 2498, 2505), limit=2500, max_position_embeddings=8192),
    of("CutAtTwice", lengths(7, 2498, 2505), limit=1250, max_position_embeddings=8192),
    of("CutAtNumber", lengths(7, 698, 705), max_position_embeddings=2048),
    of("CutAtSize", lengths(7, 2498, 2505), limit=2500, max_position_embeddings=8192),
    of("PowerOfLength", lengths(7, 2498, 2505), limit=2500, max_position_embeddings=8192),
    of("PowerOfRoot", lengths(7, 2498, 2505), max_position_embeddings=8192),
    of("ByComplexNumbers", lengths(7, 300, 800), max_position_embeddings=8192),
    of("RolledFrom", lengths(7, 2498, 2505), limit=2500, max_position_embeddings=4096),
]


@pytest.mark.parametrize("trap", cases("lengths", TRAPS))
def test_lengths(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)


@pytest.mark.parametrize("trap", cases("lengths", FAR))
def test_texts_longer_than_those_that_the_witness_runs(
    trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(replace(trap, may_refuse=False), tmp_path, capsys)


def test_a_cut_where_no_text_reaches_that_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trap = of("CutAtLimit", limit=20_000, max_position_embeddings=32_768)
    for seed, name in enumerate("ab"):
        save(trap, seed, tmp_path / name)
    assert run("align", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--trust-remote-code") == 2
    assert "modeling.py:" in (said := capsys.readouterr().err) and "cuts texts at 20000 tokens" in said
