"""How a text is read, and what surrounds a call, changes nothing that is not kept as well."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from traps import surrounded as code
from traps.trap import Call, Trap, cases, check, custom, ids_of

_LENGTH = 9


def read(first: int = 0, rows: int = 2, hidden: slice = slice(0), masked: bool = False, **more: Any) -> Call:
    """So many tokens first, the others behind a cache.

    Args:
        hidden: of the first text.
        more: arguments of the last call, each made from the model and its tokens.
    """

    def call(model: PreTrainedModel) -> Tensor:
        ids, mask = ids_of(model, _LENGTH, rows), torch.ones(rows, _LENGTH, dtype=torch.long)
        mask[0, hidden] = 0
        kept: Any = StaticCache(config=model.config, max_cache_len=_LENGTH) if more.get("fixed") else None
        has_mask = masked or hidden != slice(0)
        if first:
            kept = model(input_ids=ids[:, :first], past_key_values=kept, use_cache=True).past_key_values
        given = {name: make(model, ids[:, first:]) for name, make in more.items() if callable(make)}
        given |= {} if "inputs_embeds" in given else {"input_ids": ids[:, first:]}
        given |= {"attention_mask": mask} if has_mask else {}
        return model(past_key_values=kept, **given).logits

    return call


def surrounded(surrounds: Callable[[], AbstractContextManager[Any]]) -> Call:
    def call(model: PreTrainedModel) -> Tensor:
        with surrounds():
            return read()(model).detach()

    return call


def turned_over(flag: Callable[[PreTrainedModel], Any], name: str) -> Call:
    def call(model: PreTrainedModel) -> Tensor:
        setattr(flag(model), name, True)
        return read()(model)

    return call


def _square(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return torch.ones(len(ids), 1, ids.shape[1], _LENGTH, dtype=torch.bool)


CALLS: dict[str, Call] = {
    "ManyTower": read(rows=5),
    "ManyAndGoesOnTower": read(8, rows=5),
    "ManyAndMaskedTower": read(rows=5, masked=True),
    "AloneAndMaskedTower": read(rows=1, masked=True),
    "SeveralAndGoesOnTower": read(5),
    "HidesAndGoesOnTower": read(8, hidden=slice(3)),
    "RightTower": read(hidden=slice(6, None)),
    "LevelAndMaskedTower": read(masked=True, level=lambda model, ids: 3),
    "LevelAndGoesOnTower": read(8, level=lambda model, ids: 3),
    "TypedAndGoesOnTower": read(8, token_type_ids=lambda model, ids: torch.ones_like(ids)),
    "EmbeddedAndGoesOnTower": read(8, inputs_embeds=lambda model, ids: model.get_input_embeddings()(ids)),
    "FixedAndGoesOnTower": read(8, fixed=True, masked=True),
    "SquareAndGoesOnTower": read(8, attention_mask=_square),
    "GradedTower": surrounded(torch.enable_grad),
    "InferringTower": surrounded(torch.inference_mode),
    "StatesTower": turned_over(lambda model: model.config, "output_hidden_states"),
    "CheckpointingTower": turned_over(lambda model: model, "gradient_checkpointing"),
}
TRAPS = [Trap(name, custom(getattr(code, name)), lambda _, n=name: {n: CALLS[n]}, may_refuse=True)
         for name in code.SURROUNDED]  # fmt: skip


@pytest.mark.parametrize("trap", cases("surrounded", TRAPS))
def test_surrounded(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
