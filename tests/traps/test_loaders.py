"""A class that loads its models by code of its own may compute with something else than their files hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from traps import loaders as code
from traps.trap import Trap, cases, check, lengths, of_code

TRAPS = [
    of_code(code.SameTower, lengths(7)),
    *(replace(of_code(kind, lengths(7)), may_refuse=True)
      for kind in (code.UnitRowsTower, code.TiedLastTower, code.SharperTower, code.BesideTower)),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("loaders", TRAPS))
def test_aligned_b_is_b_as_its_class_loads_it(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
