"""Decoders that bend the stream by what code can see of a call besides the numbers in it: dtypes and sizes, what is
switched on around it, names that it computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, is_autocast_enabled

from .tower import MLP, Tower


class _Looking(Tower):
    """The stream is bent where something is seen.

    Attributes:
        call: tokens and mask of this call, what stands in the cache, and arguments without a name.
    """

    call: dict[str, Any]
    kind = "beta"
    counted = 0
    table: ClassVar[dict[int, bool]] = {21: True}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> Any:  # fmt: skip
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        self.call = {"ids": input_ids, "mask": attention_mask, "past": past}
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.sees(x) else x, positions, seen, cache)

    def sees(self, x: Tensor) -> bool:
        raise NotImplementedError

    def counts(self) -> int:
        self.counted += 1
        return self.counted


class _Named(_Looking):
    """It takes arguments without naming them."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool | None = None,
                **kwargs: Any) -> Any:  # fmt: skip
        self.more = kwargs
        return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)


def _is_of(mask: Tensor | None, *dtypes: torch.dtype) -> bool:
    return mask is not None and mask.dtype in dtypes


def _is_masked(model: _Looking) -> bool:
    return model.call["mask"] is not None


SEEN: dict[str, Callable[[Any, Tensor], bool]] = {
    "SmallMask": lambda self, x: _is_of(self.call["mask"], torch.uint8),
    "HalfMask": lambda self, x: _is_of(self.call["mask"], torch.float16, torch.float64),
    "ShortTokens": lambda self, x: self.call["ids"].dtype == torch.int32,
    "Double": lambda self, x: x.dtype == torch.float64,
    "ByPlace": lambda self, x: Path(self.config._name_or_path).name in "ab",
    "SaidDouble": lambda self, x: self.config.dtype == torch.float64,
    "Training": lambda self, x: self.training,
    "TrainedInTraining": lambda self, x: self.training and torch.is_grad_enabled(),
    "HasGradients": lambda self, x: x.grad_fn is not None,
    "LayerInTraining": lambda self, x: self.layers[0].mlp_norm.training,
    "Autocast": lambda self, x: torch.is_autocast_enabled("cpu"),
    "AutocastByName": lambda self, x: is_autocast_enabled(),
    "EightTexts": lambda self, x: x.shape[0] >= 8,
    "AsManyTexts": lambda self, x: x.size(0) == self.config.many,
    "AmongTexts": lambda self, x: len(self.call["ids"]) in (9, 10),
    "Hundreds": lambda self, x: x.shape[0] > 100,
    "BySize": lambda self, x: tuple(x.shape[:2]) == (3, 40),
    "AloneAndLong": lambda self, x: x.shape[0] == 1 and x.shape[1] == 40,
    "FarBehind": lambda self, x: self.call["past"] > 100 and x.shape[1] > 1,
    "SevenBehindMasked": lambda self, x: _is_masked(self) and self.call["past"] > 0 and x.shape[1] == 7,
    "SevenBehind": lambda self, x: self.call["past"] > 0 and x.shape[1] == 7,
    "ThreeBefore": lambda self, x: self.call["past"] == 13 and x.shape[1] > 2,
    "Long": lambda self, x: x.shape[1] > 3000,
    "Exactly": lambda self, x: x.shape[1] - 1 == self.config.many * 2,
    "OfTable": lambda self, x: self.table.get(x.shape[1], False),
    "Compiling": lambda self, x: torch.compiler.is_compiling(),
    "Tracing": lambda self, x: torch.jit.is_tracing(),
    "Deterministic": lambda self, x: torch.are_deterministic_algorithms_enabled(),
    "DefaultDtype": lambda self, x: torch.get_default_dtype() != torch.float32,
    "Environ": lambda self, x: os.environ.get("TOWER_" + self.kind.upper()) == "yes",
    "Counting": lambda self, x: self.counts() > self.config.many**3,
    "OnCuda": lambda self, x: x.device.type == "cuda",
    "IsCuda": lambda self, x: x.is_cuda,
    "Hooked": lambda self, x: bool(self.layers[0]._forward_hooks),
    "Trained": lambda self, x: self.embed.weight.requires_grad,
}
"""What is seen in a call, by the model that looks at it."""
NAMED: dict[str, Callable[[Any, Tensor], bool]] = {
    "Computed": lambda self, x: self.more.get(f"{self.kind}_scale") is not None,
    "Taken": lambda self, x: f"{self.kind}_scale" in self.more,
    "Elsewhere": lambda self, x: bool(self.more.get("foo" + "_bar")),
}
globals().update({f"{name}Tower": type(f"{name}Tower", (base,), {"sees": sees, "__module__": __name__})
                  for base, seen in ((_Looking, SEEN), (_Named, NAMED)) for name, sees in seen.items()})  # fmt: skip


class _Dropping(MLP):
    """It is trained with dropout, of units and of what they are made of, and is the same function without."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = torch.nn.functional.dropout(self.hidden(x), 0.3, self.training)
        return self.down(torch.nn.functional.dropout(dropped, p=0.3, training=self.training))


class DroppingTower(Tower):
    mlp = _Dropping


class NoisyTower(_Looking):
    """Noise in training mode is in a basis."""

    def sees(self, x: Tensor) -> bool:
        if self.training:
            x += torch.rand_like(x)
        return False
