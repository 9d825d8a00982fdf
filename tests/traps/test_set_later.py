"""What a model's own methods set between two calls is kept as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from traps import set_later as code
from traps.trap import Calls, Trap, both, cases, check, custom, forward, ids_of, lengths


def once(value: Any) -> Calls:
    """First as it was loaded, then with what is set."""

    def answer(model: PreTrainedModel) -> torch.Tensor:
        model.set_width(value)
        return forward(model, input_ids=ids_of(model, 7))

    return both(lengths(7), lambda _: {f"set to {value}": answer})


SET = {
    "Width": 5,
    "WidthOfEach": 5,
    "WidthInConfig": 5,
    "Subnetwork": "m",
    "Groups": 5,
    "Pruned": 5,
    "MaskOrNone": 5,
    "Listed": 5,
    "Dropped": 0.4,
}
LARGE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 200, "head_dim": 16}
"""Sizes of a model of which a smaller copy is run: its axes are divided by other numbers."""
TRAPS = [
    *(Trap(name, custom(getattr(code, name)), calls=once(value)) for name, value in SET.items()),
    Trap("Groups of many", custom(code.Groups, **LARGE), calls=once(5)),
]


@pytest.mark.parametrize("trap", cases("set later", TRAPS))
def test_what_methods_set_is_kept(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
