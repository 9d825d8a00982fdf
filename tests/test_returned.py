"""All that a plain module returns is its answer, whatever it stands in."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from plain_modules import seeded
from torch import Tensor, nn

import hf_align


@dataclass
class Told:
    """What many modules return."""

    logits: Tensor
    inner: Tensor


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


class Returning(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        inner = torch.tanh(self.up(x))
        return self.form(self.down(inner), inner)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a dataclass": Told,
    "a dataclass in a tuple": lambda out, inner: (out, Told(out, inner)),
    "an object in a dict": lambda out, inner: {"out": out, "more": SimpleNamespace(inner=[inner])},
    "an object with slots": lambda out, inner: (out, Slotted(inner)),
    "a mapping": lambda out, inner: (out, MappingProxyType({"inner": inner})),
    "what is like a dict": lambda out, inner: UserDict(out=out, inner=inner),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_stands_in_an_object_is_an_answer_too(form: Callable[[Tensor, Tensor], Any]) -> None:
    a, b = (seeded(lambda: Returning(form), seed) for seed in (0, 1))
    moved = hf_align.align(b, to=a, inputs=X).apply(b)
    torch.testing.assert_close(torch.tanh(moved.up(X)), torch.tanh(b.up(X)), rtol=1e-11, atol=1e-11)


def test_a_loss_gets_the_object_itself() -> None:
    a, b = (seeded(lambda: Returning(Told), seed).float() for seed in (0, 1))
    data = [(X.float(), torch.tensor([0, 1, 1]))]

    def loss(told: Told, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(told.logits, batch[1])

    losses = [hf_align.evaluate(a, b, data, points=3, objective=o).naive.losses for o in (loss, None)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("form", [lambda out, inner: (out, {inner}), lambda out, inner: (out, lambda: inner),
                                  lambda out, inner: (out, iter([inner]))])  # fmt: skip
def test_what_cannot_be_read_is_refused(form: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(ValueError, match="is returned, which may hold tensors; return a tuple or a dict"):
        hf_align.symmetries(seeded(lambda: Returning(form), 0), inputs=X)
