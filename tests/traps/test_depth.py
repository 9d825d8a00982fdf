"""One layer of many is another kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from traps import depth
from traps.trap import Calls, Trap, cases, check, custom, lengths, text


def of(name: str, special: int = 3, layers: int = 5, calls: Calls = text, **config: Any) -> Trap:
    """A tower of some layers, of which one is special."""
    kind = getattr(depth, f"{name}Tower", None) or getattr(depth, name)
    return Trap(name, custom(kind, num_hidden_layers=layers, special=special, **config), calls, may_refuse=True)


TRAPS = [
    of("InSet"),
    of("ByLambda"),
    of("ByEnum"),
    of("ByPartial"),
    of("ByFloat"),
    of("ByThreshold"),
    of("ByConfig", pattern=["plain", "folded", "plain", "plain"]),
    of("ByPrivate"),
    of("ByMethod"),
    of("ByArithmetic"),
    of("BySize"),
    of("ByDict", folds={"3": True}),
    of("ByObject"),
    of("ByHook"),
    of("Counted"),
    of("NoRotation"),
    of("OneRotation"),
    of("OtherFrequencies"),
    of("Softcap"),
    of("OwnLoop", special=4, layers=6),
    of("Detour", special=4, layers=6),
    of("Borrowed", special=4, layers=6),
    of("Twice", calls=lengths()),
    of("Mixture"),
]


@pytest.mark.parametrize("trap", cases("depth", TRAPS))
def test_depth(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
