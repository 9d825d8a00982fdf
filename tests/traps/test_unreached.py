"""What a model's own code does where no tried call leads, and which cannot be forced, is refused; questions that only
arguments decide are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from traps import unreached as code
from traps.test_asked import once
from traps.trap import Trap, cases, check, lengths, of_code

TRAPS = [
    of_code(code.OrdinaryTower, lengths(47, 20)),
    of_code(code.ChosenTower, lengths(47, 20)),
    of_code(code.SideBySideTower, once(parts={"fine": 3.0})),
    *(
        replace(of_code(tower, lengths(47, 20)), may_refuse=True)
        for tower in (code.FoundTower, code.MissedTower, code.LoopedTower, code.SuppressedTower)
    ),
    replace(of_code(code.PatternTower, once(style="soft1")), may_refuse=True),
]


@pytest.mark.parametrize("trap", cases("unreached", TRAPS))
def test_what_no_call_reaches_is_no_secret(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
