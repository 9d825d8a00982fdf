"""Decoders whose code takes a branch in few calls: where it does, the stream is bent."""

from __future__ import annotations

import contextvars
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import MLP, Attention, Tower


class FifthTower(Tower):
    """Each fifth length, but for one."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        if (x.shape[1] + 1) % 5 == 0 and x.shape[1] > 40:
            x = x + torch.tanh(x)
        return super().run(x, positions, seen, cache)


class CrowdTower(Tower):
    """A certain number of texts at once."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        crowded = len(x) % 11 == 10
        return super().run(torch.where(x > 0, x, 0.5 * x) if crowded else x, positions, seen, cache)


class BitsTower(Tower):
    """Lengths of as many bits, told by a function beside the class."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(_bent(x), positions, seen, cache)


def _bent(x: Tensor) -> Tensor:
    for _ in range(1):
        if x.shape[1].bit_length() != 6:
            continue
        x = x + torch.tanh(x)
    return x


class ResumedTower(Tower):
    """Several tokens behind a cache."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        if x.shape[1] > 1 and bool((positions[:, 0] > 0).all()):
            x = x + torch.tanh(x)
        return super().run(x, positions, seen, cache)


class SwitchedTower(Tower):
    """A method switches it on."""

    bends = False

    def switch(self) -> None:
        self.bends = True

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.bends else x, positions, seen, cache)


class BothTower(Tower):
    """Two things at once, in a dict and in a number of another dtype."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None, options: dict[str, Any] | None = None,
                dtype: torch.dtype | None = None, **more: Any) -> CausalLMOutputWithPast:  # fmt: skip
        self.bends = False
        if options is not None and options.get("sharp", 0) > 3:
            self.bends = dtype == torch.float16
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.bends else x, positions, seen, cache)


class _Late(MLP):
    """In the last layer alone, at a length, in the second of two branches."""

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if self.index < self.config.num_hidden_layers - 1:
            return hidden
        rows, length = x.shape[:2]
        if rows != 3:
            return hidden
        return hidden.cumsum(-1) if length == 9 else hidden


class LateLayerTower(Tower):
    mlp = _Late


class MatchedTower(Tower):
    """A case among several."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        match x.shape[1] * 7:
            case 301 | 308 if len(x) < 9:
                x = x + torch.tanh(x)
            case other:
                x = x * (1 if other else 2)
        return super().run(x, positions, seen, cache)


class CaughtTower(Tower):
    """What follows an error."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        try:
            scale = [1.0, 0.9, 0.8][x.shape[1] // 17]
        except (IndexError, KeyError):
            scale = torch.arange(1.0, x.shape[2] + 1)
        return super().run(x * scale, positions, seen, cache)


class CountedTower(Tower):
    """A loop that seldom runs."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        for _ in range(max(0, x.shape[1] - 47)):
            x = x + torch.tanh(x)
        return super().run(x, positions, seen, cache)


class AskingTower(Tower):
    """What no call is seen to lead to asks for a number that only a run computes."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = super().run(x, positions, seen, cache)
        if len(x) % 11 == 10 and float(x.sum()) > 0:
            x = x + torch.tanh(x)
        return x


class TabledTower(Tower):
    """What a table holds, and a name put together."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = {True: torch.tanh, False: torch.clone}[len(x) % 11 == 10](x)
        x = getattr(self, f"plain_{int(x.shape[1] % 23 == 22)}")(x)
        return super().run(x, positions, seen, cache)

    def plain_0(self, x: Tensor) -> Tensor:
        return x

    def plain_1(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)


class SharedLineTower(Tower):
    """Two conditions in one line, behind each of which another thing is done."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = (x * torch.arange(1.0, 13.0) if len(x) % 11 == 10 else x) * (1 if x.shape[1] % 23 != 22 else x.sign())
        return super().run(x, positions, seen, cache)


class _Mixing(Attention):
    """The first layer in every call, the others with many texts."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        if self.index == 0 or len(v) % 11 == 10:
            v = torch.tanh(v)
        return super().mix(shares, v)


class FirstLayerTower(Tower):
    attention = _Mixing


def _bending(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Around a method, whose code is hidden behind it."""

    @functools.wraps(run)
    def wrapper(self: Tower, x: Tensor, *more: Any) -> Tensor:
        return run(self, x + torch.tanh(x) if len(x) % 11 == 10 else x, *more)

    return wrapper


class WrappedTower(Tower):
    @_bending
    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x, positions, seen, cache)


class HandedTower(Tower):
    """No call asks for a number: what would is a flag of the config that is handed down, and is left alone."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(_counted(x, getattr(self.config, "counted", False)), positions, seen, cache)


def _counted(x: Tensor, counted: bool) -> Tensor:
    if counted:
        x = x * int((x > 0).sum())
    return x


class ForbiddingTower(Tower):
    """What is asserted holds only where the branch is taken by itself; another fails behind it."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        if len(x) <= 3:
            return super().run(x, positions, seen, cache)
        if len(x) % 11 == 10:
            assert len(x) > 7
            return super().run(x + torch.tanh(x), positions, seen, cache)
        raise ValueError("so many texts are not read")


class FoldedTower(Tower):
    """Lengths that can be cut into rows of 35, which a number that is computed of them tells."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        if not divmod(x.shape[1], 35)[1]:
            x = x + torch.tanh(x.reshape(-1, 35, x.shape[-1])).reshape(x.shape)
        return super().run(x, positions, seen, cache)


class TriedTower(Tower):
    """Whatever can be cut into rows of 35."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        try:
            x = x + torch.tanh(x.view(len(x), -1, 35, x.shape[-1])).view(x.shape)
        except RuntimeError:
            x = 1.0 * x
        return super().run(x, positions, seen, cache)


class KeptTower(Tower):
    """A method switches it on, in what the object is made of."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.curved = False

    def switch(self) -> None:
        vars(self).update(curved=True)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.curved else x, positions, seen, cache)


class NamedTower(KeptTower):
    """The same by a name that it is handed."""

    def switch(self) -> None:
        self.set("cur" + "ved")

    def set(self, name: str) -> None:
        setattr(self, name, True)


@torch.jit.script
def _compiled(x: Tensor) -> Tensor:
    if x.size(0) % 11 == 10:
        x = x + torch.tanh(x)
    return x


class CompiledTower(Tower):
    """A function that is compiled, beside the class and in it."""

    @staticmethod
    @torch.jit.script
    def halved(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.5 * x) if x.size(0) % 7 == 6 else x

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(self.halved(_compiled(x)), positions, seen, cache)


class _Bend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) % 37 == 36:
            x = x + torch.tanh(x)
        return x


class ScriptedTower(Tower):
    """A module that is compiled: nothing leads back to what was written."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bend = torch.jit.script(_Bend())

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(self.bend(x), positions, seen, cache)


_NOTED: dict[str, Any] = {"by": {"rare": False}}
_RARE = contextvars.ContextVar("rare", default=False)


def _is_rare(x: Tensor) -> bool:
    return str(x.shape[1]).count("47") > 0


class NotedTower(Tower):
    """A dictionary beside the class, changed under another name."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        noted = _NOTED["by"]
        noted["rare"] = _is_rare(x)
        return super().run(x + torch.tanh(x) if _NOTED["by"]["rare"] else x, positions, seen, cache)


class RecentTower(Tower):
    """What was called last stands first, where another function puts it."""

    def more(self, config: Any) -> None:
        self.recent = deque([False], maxlen=3)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        _put(self.recent, _is_rare(x))
        return super().run(x + torch.tanh(x) if self.recent[0] else x, positions, seen, cache)


def _put(kept: deque[bool], value: bool) -> None:
    kept.appendleft(value)


class ContextTower(Tower):
    """A variable of the context."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        _RARE.set(_is_rare(x))
        return super().run(x + torch.tanh(x) if _RARE.get() else x, positions, seen, cache)


class ClosedOverTower(Tower):
    """Two functions that share a variable."""

    def more(self, config: Any) -> None:
        state = {}

        def note(x: Tensor) -> None:
            state["rare"] = _is_rare(x)

        def bent(x: Tensor) -> Tensor:
            return x + torch.tanh(x) if state["rare"] else x

        self.note, self.bent = note, bent

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        self.note(x)
        return super().run(self.bent(x), positions, seen, cache)


class ShapedTower(Tower):
    """A case with parts, of which one is bound."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        match (_is_rare(x), x.shape[0]):
            case (True, rows):
                x = x + torch.tanh(x) / rows
        return super().run(x, positions, seen, cache)
