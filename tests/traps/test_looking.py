"""What code looks at in a call is looked at, too: dtypes and sizes, what is switched on, names that it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_align.witness import around
from hf_align.witness.training import in_training
from traps import looking as code
from traps.trap import Call, Trap, cases, check, custom, ids_of

_LENGTH = 9


def read(
    rows: int = 2, length: int = _LENGTH, first: int = 0, before: int = 0, tokens: torch.dtype = torch.long,
    mask: torch.dtype | None = None, within: AbstractContextManager[Any] | Any = lambda _: nullcontext(), **more: Any,
) -> Call:  # fmt: skip
    """So many texts and tokens, of which the first are read before; in a mask of ones where it has a dtype.

    Args:
        before: calls before it.
        within: from the model, what surrounds the call.
    """

    def call(model: PreTrainedModel) -> Tensor:
        ids = ids_of(model, length, rows).to(tokens)
        kept = model(input_ids=ids[:, :first], use_cache=True).past_key_values if first else None
        given = {} if mask is None else {"attention_mask": torch.ones(rows, length, dtype=mask)}
        for _ in range(before):
            model(input_ids=ids)
        with within(model):
            return model(input_ids=ids[:, first:], past_key_values=kept, **given, **more).logits.detach()

    return call


@contextmanager
def said(owner: Any, name: str) -> Iterator[None]:
    with patch.object(owner, name, lambda *_: True):
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    model.train()
    yield
    model.eval()


@contextmanager
def trained_in_training(model: nn.Module) -> Iterator[None]:
    with training(model), torch.enable_grad():
        yield


CALLS: dict[str, Call] = {
    "SmallMask": read(mask=torch.uint8),
    "HalfMask": read(mask=torch.float16),
    "ShortTokens": read(tokens=torch.int32),
    "Double": read(),
    "ByPlace": read(),
    "SaidDouble": read(within=lambda model: patch.object(model.config, "dtype", torch.float64)),
    "Training": read(within=training),
    "TrainedInTraining": read(within=trained_in_training),
    "HasGradients": read(within=around.trained),
    "LayerInTraining": read(within=training),
    "Autocast": read(within=lambda _: around.autocast()),
    "AutocastByName": read(within=lambda _: around.autocast()),
    "EightTexts": read(rows=8),
    "AsManyTexts": read(rows=11),
    "AmongTexts": read(rows=9),
    "Hundreds": read(rows=101),
    "BySize": read(rows=3, length=40),
    "AloneAndLong": read(rows=1, length=40),
    "FarBehind": read(length=120, first=110),
    "SevenBehindMasked": read(first=2, mask=torch.long),
    "SevenBehind": read(first=2),
    "ThreeBefore": read(length=18, first=13),
    "Long": read(rows=1, length=3001),
    "Exactly": read(length=23),
    "OfTable": read(length=21),
    "Compiling": read(within=lambda _: said(torch.compiler, "is_compiling")),
    "Tracing": read(within=lambda _: said(torch.jit, "is_tracing")),
    "Deterministic": read(within=lambda _: said(torch, "are_deterministic_algorithms_enabled")),
    "DefaultDtype": read(within=lambda _: around.by_default(torch.float64)),
    "Environ": read(within=lambda model: around.with_variable(model, "TOWER_BETA=yes")),
    "Counting": read(before=11**3, length=2),
    "OnCuda": read(within=lambda _: around.OnCuda()),
    "IsCuda": read(within=lambda _: around.OnCuda()),
    "Hooked": read(within=around.hooked),
    "Trained": read(within=around.trained),
    "Computed": read(beta_scale=1),
    "Taken": read(beta_scale=1),
    "Elsewhere": read(foo_bar=1),
}
_SIZES = {"many": 11, "max_position_embeddings": 4096}
_DTYPES = {"Double": torch.float64}
TRAPS = [Trap(name, custom(getattr(code, f"{name}Tower"), **_SIZES), lambda _, n=name: {n: CALLS[n]}, may_refuse=True,
              dtype=_DTYPES.get(name, torch.float32)) for name in (*code.SEEN, *code.NAMED)]  # fmt: skip


@pytest.mark.parametrize("trap", cases("looking", TRAPS))
def test_looking(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)


@pytest.mark.parametrize("kind", ["DroppingTower", "NoisyTower"])
def test_what_training_is_for_is_no_other_function(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(Trap(kind, custom(getattr(code, kind)), lambda _: {kind: read()}), tmp_path, capsys)


def test_statistics_stay_those_that_are_stored() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.LayerNorm(4)).eval()
    with in_training(model):
        assert [part.training for part in model] == [True, False, False, True]
    assert not any(part.training for part in model)
