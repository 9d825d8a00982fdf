"""Odd ops, and ordinary ones with odd arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from traps import arguments as code
from traps.trap import Trap, both, cached, cases, check, custom, lengths

ALONE = {"Stream_positions", "Hidden_softmax_positions", "Stream_einsum_transposed", "Stream_bmm_self",
         "Stream_baddbmm", "Hidden_dist", "Hidden_sum_twice", "Hidden_group_norm"}  # fmt: skip
"""What mixes positions and so has no cache."""


def of(name: str) -> Trap:
    calls = lengths() if name in ALONE else both(lengths(2, 7, 12, 33), cached())
    return Trap(name, custom(getattr(code, f"{name}_tower"), num_hidden_layers=1), calls, may_refuse=True)


TRAPS = [of(f"Hidden_{name}") for name in code.HIDDEN] + [of(f"Stream_{name}") for name in code.STREAM]


@pytest.mark.parametrize("trap", cases("arguments", TRAPS))
def test_arguments(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
