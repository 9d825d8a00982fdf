"""Decoders that bend the stream by what code can see of a call besides the numbers in it: sizes, and names that
it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .tower import Tower


class _Looking(Tower):
    """The stream is bent where something is seen.

    Attributes:
        call: tokens and mask of this call, what stands in the cache, and arguments without a name.
    """

    call: dict[str, Any]
    kind = "beta"
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


class _Named(_Looking):
    """It takes arguments without naming them."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool | None = None,
                **kwargs: Any) -> Any:  # fmt: skip
        self.more = kwargs
        return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)


SEEN: dict[str, Callable[[Any, Tensor], bool]] = {
    "EightTexts": lambda self, x: x.shape[0] >= 8,
    "AsManyTexts": lambda self, x: x.size(0) == self.config.many,
    "AmongTexts": lambda self, x: len(self.call["ids"]) in (9, 10),
    "SevenBehind": lambda self, x: self.call["past"] > 0 and x.shape[1] == 7,
    "ThreeBefore": lambda self, x: self.call["past"] == 13 and x.shape[1] > 2,
    "Long": lambda self, x: x.shape[1] > 3000,
    "Exactly": lambda self, x: x.shape[1] - 1 == self.config.many * 2,
    "OfTable": lambda self, x: self.table.get(x.shape[1], False),
}
"""What is seen in a call, by the model that looks at it."""
NAMED: dict[str, Callable[[Any, Tensor], bool]] = {
    "Computed": lambda self, x: self.more.get(f"{self.kind}_scale") is not None,
    "Taken": lambda self, x: f"{self.kind}_scale" in self.more,
    "Elsewhere": lambda self, x: bool(self.more.get("foo" + "_bar")),
}
globals().update({f"{name}Tower": type(f"{name}Tower", (base,), {"sees": sees, "__module__": __name__})
                  for base, seen in ((_Looking, SEEN), (_Named, NAMED)) for name, sees in seen.items()})  # fmt: skip
