"""Scales of queries and keys, which turn along but have no signs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Generator
from transformers import PreTrainedModel

from traps import turns as code
from traps.trap import Trap, cases, check, custom


def around_zero(model: PreTrainedModel, rng: Generator) -> None:
    """Scales that keep no sign from being chosen by what is turned."""
    for name, weight in model.named_parameters():
        if ".scales." in name:
            weight.normal_(std=0.3, generator=rng)


def of(name: str, label: str = "", **config: int) -> Trap:
    build = custom(getattr(code, name), num_hidden_layers=1, head_dim=8, **config)
    return Trap(label or name, build, then=around_zero)


TRAPS = [of(name) for name in code.PARTS]
TRAPS += [of(name, f"{name} of three heads", num_attention_heads=6, num_key_value_heads=3)
          for name in ("Wide_softplus_query_first", "Wide_itself_both_first")]  # fmt: skip


@pytest.mark.parametrize("trap", cases("turns", TRAPS))
def test_turns(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
