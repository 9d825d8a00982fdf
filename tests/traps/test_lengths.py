"""What the length of the text, or a position, decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from traps import lengths as code
from traps.trap import Calls, Trap, both, cases, check, custom, lengths, text


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


@pytest.mark.parametrize("trap", cases("lengths", TRAPS))
def test_lengths(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
