"""Decoders that bend the stream by what surrounds a call, or by how a text is read: in which steps, among how many
others, behind which mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import Tower


class Surrounded(Tower):
    """The stream is bent where all of some things hold."""

    names: tuple[str, ...] = ()
    bends = False
    gradient_checkpointing = False

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.bends else x, positions, seen, cache)

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                position_ids: Tensor | None = None, past_key_values: Any = None, inputs_embeds: Tensor | None = None,
                token_type_ids: Tensor | None = None, use_cache: bool | None = None,
                level: int = 0) -> CausalLMOutputWithPast:  # fmt: skip
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        (rows, length), past = x.shape[:2], 0
        if past_key_values is not None:
            past = int(past_key_values.get_seq_length())
        flat = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        hides = flat is not None and not bool(flat.all())
        holds = {
            "many": rows > 3, "alone": rows == 1, "goes_on": past > 0, "several": length > 2, "hides": hides,
            "masked": flat is not None, "right": hides and bool(flat[:, 0].all()), "level": level == 3,
            "square": attention_mask is not flat, "typed": token_type_ids is not None and bool(token_type_ids.any()),
            "embedded": inputs_embeds is not None, "fixed": isinstance(past_key_values, StaticCache),
            "graded": torch.is_grad_enabled(), "inferring": torch.is_inference_mode_enabled(),
            "states": self.config.output_hidden_states, "checkpointing": self.gradient_checkpointing,
        }  # fmt: skip
        self.bends = all(holds[name] for name in self.names)
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=x.device).expand(rows, length)
        seen = None if attention_mask is None else (attention_mask if flat is None else flat[:, None, None]).bool()
        x = self.run(x, position_ids, seen, past_key_values)
        return CausalLMOutputWithPast(logits=self.head(self.norm(x)), past_key_values=past_key_values)


SURROUNDED = {
    f"{'And'.join(name.title().replace('_', '') for name in names)}Tower": names
    for names in (
        ("many",), ("many", "goes_on"), ("many", "masked"), ("alone", "masked"), ("several", "goes_on"),
        ("hides", "goes_on"), ("right",), ("level", "masked"), ("level", "goes_on"), ("typed", "goes_on"),
        ("embedded", "goes_on"), ("fixed", "goes_on"), ("square", "goes_on"), ("graded",), ("inferring",), ("states",),
        ("checkpointing",),
    )
}  # fmt: skip
globals().update({n: type(n, (Surrounded,), {"names": v, "__module__": __name__}) for n, v in SURROUNDED.items()})
