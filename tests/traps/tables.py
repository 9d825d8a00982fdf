"""Decoders whose arguments are looked up in a table, or counted with, and compared with nothing."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .tower import MLP, Attention, Tower


def _bent(x: Tensor) -> Tensor:
    return x + torch.tanh(x)


class _Asked(Tower):
    """What an argument asks for is done to the stream before the first layer."""

    asked: Any = None

    def forward(self, input_ids: Tensor, task: str = "plain", **others: Any) -> Any:
        self.asked = task
        return super().forward(input_ids, **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(self.done(x), positions, seen, cache)

    def done(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class InATable(_Asked):
    table: ClassVar[dict[str, Any]] = {"plain": lambda x: x, "bent": _bent}

    def done(self, x: Tensor) -> Tensor:
        return self.table[self.asked](x)


class InAConfig(_Asked):
    def done(self, x: Tensor) -> Tensor:
        return _bent(x) if self.config.bends[self.asked] else x


class InASet(_Asked):
    def done(self, x: Tensor) -> Tensor:
        return _bent(x) if self.asked in {"bent", "folded"} else x


class AmongModules(_Asked):
    def more(self, config: Any) -> None:
        self.ways = nn.ModuleDict({"plain": nn.Identity(), "bent": nn.Tanh()})

    def done(self, x: Tensor) -> Tensor:
        return x + self.ways[self.asked](x)


class _OfTorch(MLP):
    function = "tanh"

    def activate(self, h: Tensor) -> Tensor:
        return cast(Tensor, getattr(torch, self.function)(h))


class InAPackage(Tower):
    mlp = _OfTorch

    def forward(self, input_ids: Tensor, function: str = "tanh", **others: Any) -> Any:
        for layer in self.layers:
            layer.mlp.function = function
        return super().forward(input_ids, **others)


class ByNumber(_Asked):
    table: ClassVar[dict[int, Any]] = {0: lambda x: x, 5: _bent}

    def forward(self, input_ids: Tensor, level: int = 0, **others: Any) -> Any:
        return super().forward(input_ids, task=level, **others)

    def done(self, x: Tensor) -> Tensor:
        return self.table.get(self.asked, self.table[0])(x)


class Counted(_Asked):
    """Nothing is compared with the number."""

    def forward(self, input_ids: Tensor, times: int = 0, **others: Any) -> Any:
        return super().forward(input_ids, task=times, **others)

    def done(self, x: Tensor) -> Tensor:
        for _ in range(self.asked):
            x = _bent(x)
        return x


class _Lessened(Attention):
    """Each head counts as much as a call says."""

    factors: Tensor | None = None

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        mixed = super().mix(shares, v)
        return mixed if self.factors is None else mixed * self.factors[self.index, :, None, None]


class Heads(Tower):
    attention = _Lessened

    def forward(self, input_ids: Tensor, head_mask: Tensor | None = None, **others: Any) -> Any:
        for layer in self.layers:
            layer.attn.factors = head_mask
        return super().forward(input_ids, **others)
