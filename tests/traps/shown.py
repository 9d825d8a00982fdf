"""Decoders that return something of the hidden units of their MLPs beside their scores, where a call asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from .tower import MLP, Tower


@dataclass
class Shown(ModelOutput):
    logits: Tensor | None = None
    gates: tuple[Tensor, ...] | None = None


class _Noting(MLP):
    seen: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if self.seen is not None:
            self.seen.append(hidden)
        return self.down(hidden)


class _Showing(Tower):
    mlp = _Noting

    def noted(self, input_ids: Tensor) -> tuple[CausalLMOutputWithPast, list[Tensor]]:
        seen = list[Tensor]()
        for layer in self.layers:
            layer.mlp.seen = seen
        return super().forward(input_ids, use_cache=False), seen


class Gates(_Showing):
    """As transformers collects something of each layer."""

    def forward(self, input_ids: Tensor, output_gates: bool | None = None) -> Shown:
        result, seen = self.noted(input_ids)
        gates: tuple[Tensor, ...] | None = () if output_gates else None
        if output_gates:
            for hidden in seen:
                gates = (*gates, (hidden > 0).to(hidden.dtype).mean(1))  # type: ignore[misc]
        return Shown(logits=result.logits, gates=gates)


class Largest(_Showing):
    def forward(self, input_ids: Tensor, return_units: int = 0) -> CausalLMOutputWithPast:
        result, seen = self.noted(input_ids)
        units = [hidden.topk(return_units).indices for hidden in seen] if return_units else []
        if return_units:
            result["units"] = torch.stack(units)
        return result


class LargestUnsaid(_Showing):
    def forward(self, input_ids: Tensor, return_units=None) -> CausalLMOutputWithPast:  # type: ignore[no-untyped-def]
        result, seen = self.noted(input_ids)
        values = [hidden.topk(return_units).values for hidden in seen] if return_units else []
        if return_units:
            result["units"] = tuple(values)
        return result
