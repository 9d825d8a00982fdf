"""What code looks at in a call is looked at, too: sizes, and names that it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from traps import looking as code
from traps.trap import Call, Trap, cases, check, custom, ids_of

_LENGTH = 9


def read(rows: int = 2, length: int = _LENGTH, first: int = 0, **more: Any) -> Call:
    """So many texts and tokens, of which the first are read before."""

    def call(model: PreTrainedModel) -> Tensor:
        ids = ids_of(model, length, rows)
        kept = model(input_ids=ids[:, :first], use_cache=True).past_key_values if first else None
        return model(input_ids=ids[:, first:], past_key_values=kept, **more).logits

    return call


CALLS: dict[str, Call] = {
    "EightTexts": read(rows=8),
    "AsManyTexts": read(rows=11),
    "AmongTexts": read(rows=9),
    "SevenBehind": read(first=2),
    "ThreeBefore": read(length=18, first=13),
    "Long": read(rows=1, length=3001),
    "Exactly": read(length=23),
    "OfTable": read(length=21),
    "Computed": read(beta_scale=1),
    "Taken": read(beta_scale=1),
    "Elsewhere": read(foo_bar=1),
}
_SIZES = {"many": 11, "max_position_embeddings": 4096}
TRAPS = [Trap(name, custom(getattr(code, f"{name}Tower"), **_SIZES), lambda _, n=name: {n: CALLS[n]}, may_refuse=True,
              dtype=torch.float32) for name in (*code.SEEN, *code.NAMED)]  # fmt: skip


@pytest.mark.parametrize("trap", cases("looking", TRAPS))
def test_looking(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
