"""Decoders that bend the stream by what an argument holds: a type that is seldom given, a list, no label at all,
arguments of any name; and one that does so in some runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import MLP, Tower


class Handed(Tower):
    """The stream is bent where something of some name holds."""

    name = ""
    bends = False

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.bends else x, positions, seen, cache)

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                token_type_ids=None, labels=None, layers=None, tasks=(), **more):  # fmt: skip
        kinds = 0 * input_ids if token_type_ids is None else token_type_ids
        holds = {
            "of_a_type": lambda: bool((kinds == self.config.hidden_size).any()),
            "above_types": lambda: bool(kinds.max() > 2),
            "unlabelled": lambda: labels is not None and bool((labels == -100).all()),
            "listed": lambda: bool(layers) and 2 in layers,
            "first_listed": lambda: bool(layers) and layers[0] == 3,
            "tasked": lambda: any(task == "bent" for task in tasks),
            "unheard_of": lambda: len(more) > 1,
            "drawn": lambda: bool(torch.rand(()) < 0.02),
            "in_folder": lambda: "bent" in self.config._name_or_path,
            "threaded": lambda: torch.get_num_threads() == 2,
        }
        self.bends = holds[self.name]()
        seen = None if attention_mask is None else attention_mask > 0
        found = super().forward(input_ids, seen, position_ids, past_key_values, use_cache)
        return CausalLMOutputWithPast(logits=found.logits, past_key_values=found.past_key_values)


NAMES = ("of_a_type", "above_types", "unlabelled", "listed", "first_listed", "tasked", "unheard_of", "drawn",
         "in_folder", "threaded")  # fmt: skip
HANDED = {f"{name.title().replace('_', '')}Tower": name for name in NAMES}
globals().update({n: type(n, (Handed,), {"name": v, "__module__": __name__}) for n, v in HANDED.items()})


class Floored(MLP):
    """What is very short stays so."""

    def activate(self, h: Tensor) -> Tensor:
        return h / h.norm(dim=-1, keepdim=True).clamp_min(1e-6)


class FlooredTower(Tower):
    mlp = Floored


class PiecewiseTower(Tower):
    """Sums what is multiplied by one of several results."""

    class mlp(MLP):  # noqa: N801
        def hidden(self, x: Tensor) -> Tensor:
            gate, up = self.gate(x), self.up(x)
            first, _ = gate.chunk(2, -1)
            most, _ = gate.max(-1, keepdim=True)
            return (up[..., None, :] * first[..., None]).sum(-2) + (up[..., None, :] * most[..., None]).sum(-2)


def _written(h: Tensor) -> Tensor:
    h = h.clone()
    h[30:40, :, 3] = 0
    return h


def _enumerated(h: Tensor) -> Tensor:
    return torch.stack([row.flip(-1) if n > 38 else row for n, row in enumerate(h)])


SIZED = {
    "Cut": lambda h: torch.cat([h[:5], h[5:].flip(-1)]),
    "Split": lambda h: torch.cat([part.flip(-1) if n else part for n, part in enumerate(h.split(35, 0))]),
    "Divided": lambda h: h * torch.arange(h.shape[-1]).to(h) ** int(h.shape[0] / 33),
    "Shifted": lambda h: h.flip(-1) if h.shape[0] >> 5 else h,
    "Both": lambda h: h.flip(-1) if h.shape[0] * h.shape[1] > 500 else h,
    "InATable": lambda h: {40: lambda z: z.flip(-1)}.get(h.shape[0], lambda z: z)(h),
    "Written": _written,
    "Enumerated": _enumerated,
}
"""What is done to hidden units: something else where there are many texts."""


class Sized(MLP):
    does = ""

    def activate(self, h: Tensor) -> Tensor:
        return SIZED[self.does](super().activate(h))


for _name in SIZED:
    _mlp = type(f"Of{_name}", (Sized,), {"does": _name})
    globals()[f"{_name}Tower"] = type(f"{_name}Tower", (Tower,), {"mlp": _mlp, "__module__": __name__})


class ChoosingTower(Tower):
    """Units are chosen by a product of a row of zeros, where all tie."""

    class mlp(MLP):  # noqa: N801
        def hidden(self, x: Tensor) -> Tensor:
            chosen = torch.nn.functional.one_hot(self.gate(x).argmax(-1), self.config.intermediate_size)
            return self.up(x) + chosen.to(x)
