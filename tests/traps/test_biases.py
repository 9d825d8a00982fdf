"""Constants that may or may not move from one bias to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from traps import biases as code
from traps.trap import Trap, cases, check, custom, lengths, text

TRAPS = [
    Trap("plain", custom(code.BiasedTower)),
    Trap("plain tied", custom(code.BiasedTower, tie_word_embeddings=True)),
    *(
        Trap(name.removesuffix("Tower"), custom(getattr(code, name)), text if name != "SlopesTower" else lengths(),
             may_refuse=True)
        for name in code.PARTS
    ),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("biases", TRAPS))
def test_biases(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
