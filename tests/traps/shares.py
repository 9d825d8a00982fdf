"""Decoders that take some of the hidden units of their MLPs, as many as a number in the call says: in one piece, by a
mask, by their numbers, or as groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import MLP, Tower


class _Some(MLP):
    of: Callable[[MLP, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return self.down(hidden) if self.of is None else self.of(self, hidden)


def _first(count: int) -> Callable[[MLP, Tensor], Tensor]:
    return lambda mlp, hidden: functional.linear(hidden[..., :count], mlp.down.weight[:, :count])


def _shown(count: float) -> Callable[[MLP, Tensor], Tensor]:
    return lambda mlp, hidden: mlp.down(hidden * (torch.arange(hidden.shape[-1]) < count))


class _Sharing(Tower):
    mlp = _Some

    def by(self, of: Callable[[MLP, Tensor], Tensor] | None, input_ids: Tensor) -> CausalLMOutputWithPast:
        for layer in self.layers:
            layer.mlp.of = of
        return super().forward(input_ids, use_cache=False)

    @property
    def units(self) -> int:
        return int(self.config.intermediate_size)


class Share(_Sharing):
    def forward(self, input_ids: Tensor, share: float = 1.0) -> CausalLMOutputWithPast:
        return self.by(_first(int(self.units * share)), input_ids)


class Dropped(_Sharing):
    def forward(self, input_ids: Tensor, dropped: float = 0.0) -> CausalLMOutputWithPast:
        return self.by(_first(int(self.units * (1 - dropped))), input_ids)


class ShareUnsaid(_Sharing):
    def forward(self, input_ids: Tensor, share=None) -> CausalLMOutputWithPast:  # type: ignore[no-untyped-def]
        return self.by(None if share is None else _first(int(self.units * share)), input_ids)


class ShareOrNone(_Sharing):
    def forward(self, input_ids: Tensor, share: float | None = None) -> CausalLMOutputWithPast:
        return self.by(None if share is None else _shown(self.units * share), input_ids)


class ShareNamed(_Sharing):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        share = cast(float | None, kwargs.pop("share", None))
        return self.by(None if share is None else _shown(self.units * share), input_ids)


class UnitsNamed(_Sharing):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        return self.by(_first(kwargs.get("count", self.units)), input_ids)


class UnitsByDefault(_Sharing):
    def forward(self, input_ids: Tensor, count: int = 5) -> CausalLMOutputWithPast:
        return self.by(_first(count), input_ids)


class UnitsByNumber(_Sharing):
    def forward(self, input_ids: Tensor, share: float = 1.0) -> CausalLMOutputWithPast:
        at = torch.arange(int(self.units * share))

        def chosen(mlp: MLP, hidden: Tensor) -> Tensor:
            return functional.linear(hidden.index_select(-1, at), mlp.down.weight.index_select(1, at))

        return self.by(chosen, input_ids)


class Groups(_Sharing):
    def forward(self, input_ids: Tensor, groups: int = 1) -> CausalLMOutputWithPast:
        def gated(mlp: MLP, hidden: Tensor) -> Tensor:
            parts = hidden.unflatten(-1, (groups, -1))
            return mlp.down((parts * parts.mean(-1, keepdim=True).sigmoid()).flatten(-2))

        return self.by(gated, input_ids)


class Nested(Tower):
    """Tokens compared by as many entries as the call says."""

    def forward(self, input_ids: Tensor, dim: int | None = None) -> CausalLMOutputWithPast:
        scores = super().forward(input_ids, use_cache=False).logits
        seen = functional.normalize(scores[..., :dim], dim=-1)
        return CausalLMOutputWithPast(logits=seen @ seen.mT)


class _Cut(MLP):
    cut: slice | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, cut = self.hidden(x), self.cut
        if cut is not None:
            hidden = hidden.clone()
            hidden[..., cut] = 0
        return self.down(hidden)


class Cut(Tower):
    """Without a cut, the condition's body runs, and cuts everything."""

    mlp = _Cut

    def forward(self, input_ids: Tensor, cut: slice | None = None) -> CausalLMOutputWithPast:
        for layer in self.layers:
            layer.mlp.cut = cut
        return super().forward(input_ids, use_cache=False)
