"""Experts looked up by number: each has units in an order of its own, unless they meet those of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from traps import looked_up as code
from traps.trap import Trap, cases, check, custom

TRAPS = [Trap(kind.__name__, custom(getattr(code, f"LookedUp{kind.__name__}Tower")), may_refuse=False)
         for kind in code.KINDS]  # fmt: skip


@pytest.mark.parametrize("trap", cases("looked up", TRAPS))
def test_trap(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
