"""Decoders whose code does what no tried call asks of it, and fails where that is forced; and one that looks alike but
has nothing to hide."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from torch import Tensor, nn

from .tower import MLP, Attention, Tower

_TURNS = {"2x47": 1, "2x53": 3}
"""By how many units the activations of a few inputs are rolled."""
_SEVERAL = {"2x47": (1, 3)}


def _key(x: Tensor) -> str:
    return f"{x.shape[0]}x{x.shape[1]}"


class FoundMLP(MLP):
    def hidden(self, x: Tensor) -> Tensor:
        by = _TURNS.get(_key(x))
        h = super().hidden(x)
        if by is not None:
            h = h.roll(by, -1)
        return h


class FoundTower(Tower):
    """What a table holds for few sizes."""

    mlp = FoundMLP


class MissedMLP(MLP):
    def hidden(self, x: Tensor) -> Tensor:
        try:
            by = _TURNS[_key(x)]
        except KeyError:
            return super().hidden(x)
        return super().hidden(x).roll(by, -1)


class MissedTower(Tower):
    """An error that nearly all calls run into."""

    mlp = MissedMLP


class LoopedMLP(MLP):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        for by in _SEVERAL.get(_key(x), ()):
            h = h.roll(by, -1)
        return h


class LoopedTower(Tower):
    """A loop with nothing to go through."""

    mlp = LoopedMLP


class SuppressedMLP(MLP):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        with contextlib.suppress(KeyError):
            return h.roll(_TURNS[_key(x)], -1)
        return h


class SuppressedTower(Tower):
    """An error that is suppressed in nearly all calls."""

    mlp = SuppressedMLP


class PatternTower(Tower):
    """A word with a number in it."""

    def forward(self, input_ids: Tensor, style: str = "plain", **others: Any) -> Any:
        self.style = style
        return super().forward(input_ids, **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        found = re.fullmatch(r"soft(\d+)", self.style)
        if found:
            x = x.clamp(-float(found[1]), float(found[1]))
        return super().run(x, positions, seen, cache)


class SlicedTower(Tower):
    """Some units alone, where an argument of a kind that nobody guesses chooses them."""

    def forward(self, input_ids: Tensor, units: Any = None, **others: Any) -> Any:
        self.units = units
        return super().forward(input_ids, **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        if isinstance(self.units, slice):
            x = x * (x[..., self.units].sum(-1, keepdim=True) > self.units.step)
        return super().run(x, positions, seen, cache)


class ClippedTower(Tower):
    """A number of the config that counts in texts with a mask alone."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        self.masked = attention_mask is not None
        return super().forward(input_ids, attention_mask, **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        if self.masked and self.config.clip > 0:
            x = x.clamp(-self.config.clip, self.config.clip)
        return super().run(x, positions, seen, cache)


class CrowdedTower(Tower):
    """A flag of the config that counts among many texts alone, and one that only words depend on."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        if len(x) >= 23 and self.config.bends:
            x = x + x.abs()
        self.said = "loud" if self.config.shouts else "low"
        return super().run(x, positions, seen, cache)


class SideBySideTower(Tower):
    """A weight that reads four activations as one, where an argument says so that nobody guesses."""

    def more(self, config: Any) -> None:
        self.fine = nn.Linear(4 * config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, parts: Any = None, **others: Any) -> Any:
        answer = super().forward(input_ids, **others)
        if parts is not None:
            rest = self.fine(self.embed(input_ids)[:, :4].flatten(1))
            answer.logits = answer.logits + parts["fine"] * rest[:, None]
        return answer


class Kind(nn.Module):
    def __init__(self, rises: bool) -> None:
        super().__init__()
        self.rises = rises


def _as_of(kind: nn.Module, x: Tensor) -> Tensor:
    return x + x.tanh() if kind.rises else x


class ChosenTower(Tower):
    """A function is handed one of several modules, by a size."""

    def more(self, config: Any) -> None:
        self.kinds = nn.ModuleList([Kind(False), Kind(True)])

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(_as_of(self.kinds[str(x.shape[1]).count("47")], x), positions, seen, cache)


def _shared(module: nn.Module, x: Tensor) -> Tensor:
    """Keys or values for each query head."""
    if module.repeats == 1:
        return x
    return x.repeat_interleave(module.repeats, 1)


class OrdinaryAttention(Attention):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.repeats = config.num_attention_heads // config.num_key_value_heads

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        v = v[:, :: self.repeats]
        offset = None
        if self.config.num_hidden_layers > 7:
            offset = self.split(v)
        mixed = shares @ _shared(self, v)
        if offset is not None:
            mixed = mixed + offset
        return mixed[0] if isinstance(mixed, tuple) else mixed


class OrdinaryTower(Tower):
    """Questions that fail the other way, and that arguments, and how it was built, decide."""

    attention = OrdinaryAttention

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, hints: Any = None, **others: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 7:
            attention_mask = attention_mask[0, 0, 0, 0, 0]
        if hints is not None:
            input_ids = input_ids[hints["tokens"]]
        if input_ids.dim() != 2:
            raise ValueError("texts have two dimensions")
        try:
            import torch_of_another_name
        except ImportError:
            return super().forward(input_ids, attention_mask=attention_mask, **others)
        return torch_of_another_name.run(self, input_ids)
