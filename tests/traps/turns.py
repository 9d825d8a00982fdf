"""Decoders whose queries or keys are scaled channel by channel, by what is read of a weight through a function.

Behind rotary embedding and a norm with a gain, planes of queries and keys may be turned by quarters, with signs. What
scales them is turned along, but may have a sign only where the function is odd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import Attention, RMSNorm, TowerConfig, towers

READ: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": functional.softplus,
    "exp": torch.exp,
    "abs": torch.abs,
    "square": lambda w: w * w,
    "sigmoid": torch.sigmoid,
    "relu": functional.relu,
    "tanh": torch.tanh,
    "one_more": lambda w: 1 + w,
    "itself": lambda w: w,
}
PLACES = ("query", "key", "both")
ROTARY = ("first", "last", "none")


class Scaled(Attention):
    """Each channel of a head has a scale; the gain of its norm is shared by all heads."""

    read: Callable[[Tensor], Tensor]
    place: str
    rotary: str

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.norms = nn.ModuleList(RMSNorm(config.head_dim) for _ in range(2))
        places = PLACES[:2] if self.place == "both" else (self.place,)
        self.scales = nn.ParameterDict({place: nn.Parameter(torch.ones(config.head_dim)) for place in places})

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        which = int(x.shape[1] != self.config.num_attention_heads)
        if self.rotary == "first":
            x = super().rotate(x, positions)
        x = self.normed(x, which)
        if PLACES[which] in self.scales:
            x = x * type(self).read(self.scales[PLACES[which]])
        return super().rotate(x, positions) if self.rotary == "last" else x

    def normed(self, x: Tensor, which: int) -> Tensor:
        return self.norms[which](x)


class Wide(Scaled):
    """The norm is of all heads together, so that each has a gain of its own, but not a scale."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        heads = config.num_attention_heads, config.num_key_value_heads
        self.norms = nn.ModuleList(RMSNorm(n * config.head_dim) for n in heads)

    def normed(self, x: Tensor, which: int) -> Tensor:
        together = super().normed(x.transpose(1, 2).flatten(2), which)
        return together.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


def _parts() -> dict[str, type[Attention]]:
    found: dict[str, type[Attention]] = {}
    kinds = [(Scaled, rotary) for rotary in ROTARY] + [(Wide, "first")]
    for (kind, rotary), (name, read), place in itertools.product(kinds, READ.items(), PLACES):
        label = f"{kind.__name__}_{name}_{place}_{rotary}"
        found[label] = type(label, (kind,), {"read": staticmethod(read), "place": place, "rotary": rotary,
                                             "__module__": __name__})  # fmt: skip
    return found


PARTS = _parts()
globals().update(towers(__name__, **PARTS))
