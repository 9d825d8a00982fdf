"""Loops over experts: what such a list of words is asked for besides its entries is measured, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from traps import experts as code
from traps.trap import Trap, cases, check, custom


def of(name: str, *, may_refuse: bool = True) -> Trap:
    kind: Any = getattr(code, f"{name}Experts")
    return Trap(name, custom(kind), may_refuse=may_refuse)


TRAPS = [
    of("Plain", may_refuse=False),
    of("Above"), of("Five"), of("Capacity"), of("Centred"), of("Asked"), of("Loaded"), of("Dropped"), of("Most"),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("experts", TRAPS))
def test_trap(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
