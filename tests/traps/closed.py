"""Decoders that answer by the state at the token that ends a text, and refuse texts without it, as classifiers do; and
some that bend it by where and how often that token stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import Tower


class ClosedTower(Tower):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        ends = input_ids.eq(self.config.eos_token_id)
        self.check(ends)
        found = super().forward(input_ids, attention_mask, use_cache=False)
        at_ends = self.bend(found.logits, ends)[ends, :]
        return CausalLMOutputWithPast(logits=at_ends.view(len(input_ids), -1, at_ends.shape[-1])[:, -1])

    def check(self, ends: Tensor) -> None:
        if len(torch.unique_consecutive(ends.sum(1))) > 1 or not ends.any():
            raise ValueError("all texts must end as often, and once at least")

    def bend(self, x: Tensor, ends: Tensor) -> Tensor:
        return x


class _BentStream(ClosedTower):
    """The stream is bent where the ends of texts are seen to be somewhere."""

    def check(self, ends: Tensor) -> None:
        super().check(ends)
        self.is_bent = self.sees(ends)

    def run(self, x: Tensor, *args: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.is_bent else x, *args)

    def sees(self, ends: Tensor) -> bool:
        raise NotImplementedError


class OftenTower(_BentStream):
    def sees(self, ends: Tensor) -> bool:
        return bool((ends.sum(1) > 1).all())


class EarlyTower(_BentStream):
    def sees(self, ends: Tensor) -> bool:
        return not ends[:, -1].any()


class NowhereTower(_BentStream):
    def check(self, ends: Tensor) -> None:
        self.is_bent = self.sees(ends)

    def sees(self, ends: Tensor) -> bool:
        return not ends.any()

    def bend(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.is_bent:
            ends[:, 0] = True
        return x
