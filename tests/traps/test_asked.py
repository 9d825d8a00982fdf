"""What an argument that is no tensor asks of a model is kept as well."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StaticCache

from traps import asked as code
from traps.trap import Calls, Trap, both, cases, check, custom, forward, ids_of, lengths


def once(**arguments: Any) -> Calls:
    def calls(model: PreTrainedModel) -> dict[str, Any]:
        ids = ids_of(model, 7)
        more = {k: v(model, ids) if callable(v) else v for k, v in arguments.items()}
        return {f"with {', '.join(more)}": partial(forward, **{"input_ids": ids, **more})}

    return both(lengths(7), calls)


def _of_four_axes(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1]
    return torch.ones(len(ids), 1, length, length, dtype=torch.bool).tril()


def _left_padded(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return (torch.arange(ids.shape[1]) >= torch.arange(len(ids))[:, None]).long()


def _in_static_cache(model: PreTrainedModel) -> torch.Tensor:
    cache = StaticCache(config=model.config, max_cache_len=9)
    return forward(model, input_ids=ids_of(model, 7), past_key_values=cache, use_cache=True)


def _embedded(model: PreTrainedModel) -> torch.Tensor:
    return forward(model, inputs_embeds=model.get_input_embeddings()(ids_of(model, 7)))


ASKED = {
    "ADict": once(extras={"scale": torch.ones(1)}),
    "AList": once(extras=[torch.ones(1), torch.ones(1)]),
    "AFlagOrNone": once(bend=True),
    "AWord": once(task="bent"),
    "AWordOrNone": once(task="bent"),
    "ANumber": once(level=3),
    "Above": once(level=9),
    "DetachedTower": lengths(7),
    "NoCache": once(use_cache=False),
    "Attentions": once(output_attentions=True),
    "Labelled": once(labels=lambda model, ids: ids),
    "FourAxes": once(attention_mask=_of_four_axes),
    "KeptByNumber": once(logits_to_keep=lambda model, ids: torch.tensor([1, 6])),
    "KeptFrom": once(logits_to_keep=3),
    "NamedSoThat": once(bent_so=True),
    "Nameless": once(kind="bent"),
    "HandedOn": once(bend=True),
    "AllSeen": once(attention_mask=lambda model, ids: torch.ones_like(ids)),
    "MaskOfTruths": once(attention_mask=lambda model, ids: _left_padded(model, ids).bool()),
    "LeftPadded": once(attention_mask=_left_padded),
    "MaskOfFloats": once(attention_mask=lambda model, ids: _left_padded(model, ids).float()),
    "AShare": once(share=1.0),
    "ANumberOrNone": once(level=4),
}
TRAPS = [
    *(Trap(name, custom(getattr(code, name)), calls) for name, calls in ASKED.items()),
    *(Trap(name, custom(getattr(code, name)), lengths(3, 9)) for name in code.BY_HAND),
    Trap("FixedCache", custom(code.FixedCache), lambda model: {"with a static cache": _in_static_cache}),
    Trap("Embedded", custom(code.Embedded), lambda model: {"with tokens looked up": _embedded}),
]


@pytest.mark.parametrize("trap", cases("asked", TRAPS))
def test_asked(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
