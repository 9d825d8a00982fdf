"""Loops over experts: what such a list of words is asked for besides its entries is measured, or is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator
from transformers import PreTrainedModel

from hf_align.tracing import held, trace
from hf_align.witness import witness
from traps import experts as code
from traps import sorted_experts
from traps.trap import Call, Trap, cases, check, custom, forward, lengths


def of(name: str, *, may_refuse: bool = True) -> Trap:
    kind: Any = getattr(code, f"{name}Experts")
    return Trap(name, custom(kind), may_refuse=may_refuse)


def sorted_by(name: str, *, may_refuse: bool = True) -> Trap:
    return Trap(f"{name} sorted", custom(getattr(sorted_experts, f"{name}Sorted")), may_refuse=may_refuse)


def far(model: Any, rng: Generator) -> None:
    for layer in model.layers:
        layer.mlp.router.weight.mul_(6)


def styled(model: PreTrainedModel) -> dict[str, Call]:
    texts = {first: torch.tensor([[first, 5, 1, 2, 9, 11]]) for first in (7, 4500, 4501)}
    return {f"{first} first": partial(forward, input_ids=ids) for first, ids in texts.items()}


def twice(model: PreTrainedModel) -> dict[str, Call]:
    texts = ([3, 5, 1, 3, 9, 11], [3, 3, 5], [4, 3, 3, 1, 2, 7, 8])
    return {f"{len(text)} words": partial(forward, input_ids=torch.tensor([text])) for text in texts}


TRAPS = [
    of("Plain", may_refuse=False),
    of("Above5", may_refuse=False),
    of("Totalled", may_refuse=False),
    of("Counted", may_refuse=False),
    Trap("CountedFive", custom(code.CountedFiveExperts), lengths(*range(3, 26)), may_refuse=True),
    of("CountedShare"), of("CountedFirst"), of("CountedPair"), of("CountedNested"), of("CountedTable"),
    of("CountedShifted"), of("CountedNone"), of("CountedPattern"),
    Trap("CountedWords", custom(code.WordsTower), twice, may_refuse=True),
    of("FiveSorted"), of("FiveSmallest"), of("FiveLowest"), of("FiveArgmax"), of("FiveNearest"), of("FiveAbove"),
    of("Above"), of("Five"), of("Capacity"), of("Centred"), of("Asked"), of("Loaded"), of("Dropped"), of("Most"),
    *(sorted_by(name, may_refuse=False) for name in ("Joined", "Added", "Split", "Summed")),
    Trap("Together", custom(code.TogetherExperts), lengths(*[11, 12, 13]), may_refuse=True),
    Trap("Seventeen", custom(code.SeventeenExperts), lengths(*range(10, 64)), may_refuse=True),
    Trap("Flagged", custom(code.FlaggedExperts), lengths(*range(3, 16), special=True), may_refuse=True),
    Trap("Far", custom(code.FarExperts), lengths(*range(4, 44)), may_refuse=True, then=far),
    Trap("Styled sorted", custom(sorted_experts.StyledSorted, vocab_size=5000), styled, may_refuse=True),
    *map(sorted_by, ("Five", "Above", "Centred", "Capacity", "Ranked", "Order", "Swapped")),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("experts", TRAPS))
def test_trap(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)


WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 61}


@pytest.mark.parametrize("kind", ["FiveWide", "Plain"])
def test_what_a_narrow_copy_does_not_show(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of a large model are those of a copy as deep, but narrower."""
    for module in (held, trace, witness):
        monkeypatch.setattr(module, "LARGEST", 20_000)
    make = custom(getattr(code, f"{kind}Experts"), **WIDE)
    check(Trap(f"{kind} on a copy", make, lengths(*range(3, 9), 12, 33),
               may_refuse=kind == "FiveWide"), tmp_path, capsys)  # fmt: skip
