"""What is seldom given, and words that are seldom read, change nothing that is not kept as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from traps import handed as code
from traps.trap import Call, Trap, cases, check, custom, forward, ids_of

_RARE = 1777


def given(**arguments: Any) -> Call:
    """A call with more arguments; a number stands for a tensor of so many."""

    def call(model: PreTrainedModel) -> Tensor:
        ids = ids_of(model, 7)
        more = {n: torch.full_like(ids, v) if type(v) is int else v for n, v in arguments.items()}
        return forward(model, input_ids=ids, **more)

    return call


@contextmanager
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _threaded(model: PreTrainedModel) -> Tensor:
    with _two_threads():
        return given()(model)


def _in_folder(model: PreTrainedModel) -> Tensor:
    model.config._name_or_path = "somewhere/bent"
    return given()(model)


def _drawn(model: PreTrainedModel) -> Tensor:
    torch.manual_seed(next(seed for seed in range(1000) if _first_draw(seed) < 0.02))
    return given()(model)


def _first_draw(seed: int) -> float:
    return torch.rand((), generator=Generator().manual_seed(seed)).item()


CALLS: Mapping[str, Call] = {
    "of_a_type": given(token_type_ids=12),
    "above_types": given(token_type_ids=5),
    "unlabelled": given(labels=-100),
    "listed": given(layers=[2]),
    "first_listed": given(layers=[3]),
    "tasked": given(tasks=["plain", "bent"]),
    "unheard_of": given(some="thing", other=None),
    "drawn": _drawn,
    "in_folder": _in_folder,
    "threaded": _threaded,
}


def _shortened(factor: float) -> Callable[[Any, Generator], None]:
    return lambda model, rng: model.embed.weight[_RARE].mul_(factor)


def _rare(model: PreTrainedModel) -> dict[str, Callable[[PreTrainedModel], Tensor]]:
    return {"a rare word": partial(forward, input_ids=torch.tensor([[_RARE, 5, 9]]))}


def _many(model: PreTrainedModel) -> dict[str, Call]:
    return {"forty texts": partial(forward, input_ids=ids_of(model, 15, rows=40))}


TRAPS = [
    *(Trap(kind, custom(getattr(code, kind)), lambda _, n=name: {n: CALLS[n]}, may_refuse=True)
      for kind, name in code.HANDED.items()),
    *(Trap(name, custom(getattr(code, f"{name}Tower")), _many, may_refuse=True) for name in code.SIZED),
    Trap("PiecewiseTower", custom(code.PiecewiseTower)),
    Trap("FlooredTower", custom(code.FlooredTower, vocab_size=3000), _rare, may_refuse=True, then=_shortened(1e-9)),
    Trap("ChoosingTower", custom(code.ChoosingTower, vocab_size=3000), _rare, may_refuse=True, then=_shortened(0.0)),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("handed", TRAPS))
def test_handed(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
