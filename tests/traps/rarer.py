"""Decoders that tell masks, places and numbers apart which are given seldom: where they see one, the stream is bent."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import MLP, Attention, Tower


class _Telling(Tower):
    """The stream is bent where `tells` says so; `generate` may call it with more than it names."""

    bends = False

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.bends else x, positions, seen, cache)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                **more: Any) -> CausalLMOutputWithPast:  # fmt: skip
        self.bends = self.tells(attention_mask, position_ids)
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)

    def tells(self, mask: Tensor | None, positions: Tensor | None) -> bool:
        raise NotImplementedError


class LateTower(_Telling):
    """All texts begin behind padding."""

    def tells(self, mask: Tensor | None, positions: Tensor | None) -> bool:
        return mask is not None and not bool(mask[:, 0].any())


class GapTower(_Telling):
    """A mask hides something between two tokens that it shows."""

    def tells(self, mask: Tensor | None, positions: Tensor | None) -> bool:
        return mask is not None and bool((mask.diff() > 0).any() & (mask[:, 0] == 1).all())


class PackedTower(_Telling):
    """Several documents lie behind each other."""

    def tells(self, mask: Tensor | None, positions: Tensor | None) -> bool:
        return positions is not None and len(positions[0].diff().lt(0).nonzero()) == 1


class _OnAxes(Attention):
    """Each plane turns by the number that its axis has; all axes have the same frequencies."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        self.places = positions if positions.dim() == 3 else positions.expand(3, *positions.shape)
        return super().forward(x, self.places[0], seen, cache)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = self.places.permute(1, 2, 0)[:, None] * 0.5
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class OnAxesTower(Tower):
    attention = _OnAxes


class _Part(MLP):
    share = 1.0

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h.masked_fill(torch.arange(h.shape[-1]) >= int(self.share * h.shape[-1]), 0)


class ShareTower(Tower):
    """As many hidden units as a call asks for."""

    mlp = _Part

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, share: float = 1.0,
                **more: Any) -> CausalLMOutputWithPast:  # fmt: skip
        for layer in self.layers:
            layer.mlp.share = share
        return super().forward(input_ids, attention_mask)


class LimitTower(_Telling):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, limit: float = inf,
                **more: Any) -> CausalLMOutputWithPast:  # fmt: skip
        self.bends = limit < inf
        return Tower.forward(self, input_ids, attention_mask)


class Precision(Enum):
    FULL = 0
    HALF = 1


class MemberTower(_Telling):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, precision: Precision = Precision.FULL,
                **more: Any) -> CausalLMOutputWithPast:  # fmt: skip
        self.bends = precision is Precision.HALF
        return Tower.forward(self, input_ids, attention_mask)


class OftenTower(Tower):
    """The layers are run several times; what comes out of every fourth is bent."""

    times = 2

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        for number in range(self.times):
            x = super().run(x, positions, seen, None)
            x = x + torch.tanh(x) if number % 4 == 3 else x
        return x

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, times: int = 2,
                **more: Any) -> CausalLMOutputWithPast:  # fmt: skip
        self.times = times
        return super().forward(input_ids, attention_mask)
