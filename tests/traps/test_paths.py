"""Another way through the same model: with a cache, under export, by an argument, by what the weights are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from traps import paths as code
from traps.trap import Call, Calls, Trap, both, cached, cases, check, custom, forward, ids_of, lengths, text


def of(name: str, calls: Calls = text, **config: Any) -> Trap:
    kind: Any = getattr(code, f"{name}Tower", None) or getattr(code, name)
    return Trap(name, custom(kind, **config), calls, may_refuse=True)


def rows(count: int) -> Calls:
    def calls(model: PreTrainedModel) -> dict[str, Call]:
        return {f"{count} rows": partial(forward, input_ids=ids_of(model, 9, rows=count))}

    return calls


def word(model: PreTrainedModel) -> dict[str, Call]:
    ids = ids_of(model, 9)
    return {"without the word": partial(forward, input_ids=ids.clamp(min=4)),
            "with the word": partial(forward, input_ids=torch.cat([ids, ids[:, :1] * 0 + 3], 1))}  # fmt: skip


def padding(ids: Tensor) -> Tensor:
    return (torch.arange(ids.shape[1]) >= torch.arange(len(ids))[:, None]).long()


def halves(ids: Tensor) -> Tensor:
    return (torch.arange(ids.shape[1]) * 2 // ids.shape[1]).expand_as(ids)


def twice(model: PreTrainedModel) -> dict[str, Call]:
    def again(model: PreTrainedModel) -> Tensor:
        forward(model, input_ids=ids_of(model, 5))
        return forward(model, input_ids=ids_of(model, 9))

    return {"the second text": again}


def early(model: PreTrainedModel) -> dict[str, Call]:
    def scores(model: PreTrainedModel) -> Tensor:
        return model(input_ids=ids_of(model, 9)).early_logits

    return text(model) | {"early": scores}


def tagged(model: PreTrainedModel) -> dict[str, Call]:
    def tags(model: PreTrainedModel) -> Tensor:
        found = model(input_ids=ids_of(model, 9))
        last = list(found.values())[-1] if isinstance(found, dict) else found[-1]
        return last[0] if isinstance(last, tuple) else last

    return {"tags": tags}


def handed(model: PreTrainedModel) -> dict[str, Call]:
    def answer(model: Any) -> Tensor:
        ids = ids_of(model, 9)
        model.hand_in(torch.ones(*ids.shape, model.config.hidden_size))
        try:
            return forward(model, input_ids=ids)
        finally:
            model.hand_in(torch.empty(0))

    return {"words handed in": answer}


def noise(width: int) -> Tensor:
    return torch.randn(2, width, dtype=torch.float64, generator=Generator().manual_seed(1))


TRAPS = [
    of("Cached"),
    of("Far", cached(written=60, prefill=55)),
    of("Narrow", cached(written=60, prefill=55)),
    of("Step"),
    of("ConfiguredCache"),
    of("Exporting"),
    of("Tracing"),
    of("TryExcept"),
    of("WholePath"),
    of("Implementation"),
    of("Alone", both(text, rows(1))),
    of("ManyRows", both(text, rows(3))),
    of("Signed"),
    of("Words", word),
    of("Masked", both(text, lengths(attention_mask=padding))),
    of("Segments", both(text, lengths(token_type_ids=halves))),
    of("Flag", both(text, lengths(deep=True))),
    of("Prefix", both(text, lengths(features=noise(5)))),
    of("Remembers", twice),
    replace(of("Asserting"), may_refuse=False),
    replace(of("Early", early), may_refuse=False),
    *(replace(of(name, tagged), may_refuse=False) for name in ("Tagged", "TaggedEach", "TaggedSecond")),
    of("Handed", handed),
    of("Normed"),
    of("Fused"),
    of("JoinedInFiles"),
    replace(of("NormedAtOnce"), may_refuse=False),
    of("NormedShown"),
    of("Spectral"),
    of("Positive"),
    of("SymmetricMap"),
    of("Quantised"),
    of("Standardised"),
    of("Largest"),
    of("Chosen"),
    of("Crowd"),
    of("LastBit"),
]


@pytest.mark.parametrize("trap", cases("paths", TRAPS))
def test_paths(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
