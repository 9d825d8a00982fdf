"""Decoders that assign the data of their weights when they are called: each row of the head comes to length one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from .tower import Tower


class UnitHead(nn.Linear):
    """In the first call."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__(width, words, bias=False)
        self.is_first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.is_first = False
            self.weight.data = normalize(self.weight)
        return linear(x, self.weight)


class WithUnits(UnitHead):
    """With numbers that no weight takes part in."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.eye(*self.weight.shape, dtype=x.dtype).cumsum(0)
        return linear(x, self.weight)


class Written(UnitHead):
    """In the memory of the data, in every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.copy_(normalize(self.weight))
        return linear(x, self.weight)


class FirstCallTower(Tower):
    head_of: Any = UnitHead

    def more(self, config: Any) -> None:
        self.head = self.head_of(config.hidden_size, config.vocab_size)


class UnitsTower(FirstCallTower):
    head_of = WithUnits


class WrittenTower(FirstCallTower):
    head_of = Written


class LabelledTower(Tower):
    """Where there are labels."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                labels=None, **more):  # fmt: skip
        if labels is not None:
            self.head.weight.data = normalize(self.head.weight)
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)
