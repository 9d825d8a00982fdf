"""Decoders that go another way: with a cache, under export, after an exception, by what they are given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import MLP, Attention, Block, Tower, towers


def fold(h: Tensor) -> Tensor:
    """Neighbouring channels are multiplied: they are no set any more."""
    return h * h.roll(1, -1)


class Cached(Block):
    """With a cache the stream goes through an activation."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = x if cache is None else x + torch.tanh(x)
        return super().forward(x, positions, seen, cache)


class Far(Block):
    """Behind many tokens the stream goes through an activation."""

    many = 50

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        is_far = cache is not None and cache.get_seq_length() > self.many + x.shape[1]
        return super().forward(x + torch.tanh(x) if is_far else x, positions, seen, cache)


class Narrow(Tower):
    """The same, of a class whose calls `generate` cannot make: it takes no `return_dict`."""

    block = Far

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool | None = None) -> Any:
        return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)


class Step(Attention):
    """One step with a cache squashes values; a whole text does not."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return shares @ (torch.tanh(v) if shares.shape[-2] < shares.shape[-1] else v)


class ConfiguredCache(MLP):
    """By what the config says of caches, not by whether there is one."""

    def activate(self, h: Tensor) -> Tensor:
        return fold(h) if self.config.use_cache else functional.silu(h)


class Exporting(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return functional.silu(h) if torch.compiler.is_exporting() or torch.compiler.is_compiling() else fold(h)


class Tracing(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return functional.silu(h) if type(h) is not Tensor else fold(h)


class TryExcept(MLP):
    """What cannot be asked of a tensor without values goes a plain way."""

    def activate(self, h: Tensor) -> Tensor:
        try:
            large = float(h.abs().max()) > 0
        except Exception:
            large = False
        return fold(h) if large else functional.silu(h)


class WholePath(Tower):
    """The whole model behind an exception."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        try:
            bound = x.detach().numpy().max()
        except Exception:
            return super().run(x, positions, seen, cache)
        return super().run(x + torch.tanh(x) if bound > 0 else x, positions, seen, cache)


class Implementation(MLP):
    """By the kind of attention that the model is built with."""

    def activate(self, h: Tensor) -> Tensor:
        return functional.silu(h) if self.config._attn_implementation == "eager" else fold(h)


class Alone(MLP):
    """A text on its own."""

    def activate(self, h: Tensor) -> Tensor:
        return fold(h) if h.shape[0] == 1 else functional.silu(h)


class ManyRows(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return fold(h) if h.shape[0] > 2 else functional.silu(h)


class Signed(MLP):
    """A branch on a weight."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.strength = nn.Parameter(torch.ones(1))

    def activate(self, h: Tensor) -> Tensor:
        return fold(h) if self.strength.item() != 1 else functional.silu(h)


class Words(Tower):
    """A branch on the text: one word changes how all are read."""

    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        self.special = bool((input_ids == 3).any())
        return super().forward(input_ids, **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.special else x, positions, seen, cache)


class Masked(Tower):
    """With a mask that hides something, hidden words are replaced by a vector of their own."""

    def more(self, config: Any) -> None:
        self.hidden = nn.Parameter(torch.zeros(config.hidden_size))

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        if seen is not None and cache is None:
            x = torch.where(seen[:, 0, 0, :, None], x, self.hidden * x)
        return super().run(x, positions, seen, cache)


class Segments(Tower):
    """Segments, if there are any, have a table of their own that multiplies."""

    def more(self, config: Any) -> None:
        self.segments = nn.Embedding(2, config.hidden_size)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None, **others: Any) -> Any:
        self.types = token_type_ids
        return super().forward(input_ids, **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = x if self.types is None else x + torch.tanh(x * self.segments(self.types))
        return super().run(x, positions, seen, cache)


class Flag(Tower):
    """An argument that is neither a tensor nor in any config."""

    def forward(self, input_ids: Tensor, deep: bool = False, **others: Any) -> Any:
        self.deep = deep
        return super().forward(input_ids, **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.deep else x, positions, seen, cache)


class Prefix(Tower):
    """Vectors that come as an argument, and a projection that nothing else reads."""

    def more(self, config: Any) -> None:
        self.project = nn.Linear(5, config.hidden_size)

    def forward(self, input_ids: Tensor, features: Tensor | None = None, **others: Any) -> Any:
        self.features = features
        return super().forward(input_ids, **others)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = x if self.features is None else x + torch.tanh(self.project(self.features))[:, None]
        return super().run(x, positions, seen, cache)


class Remembers(Tower):
    """The first text that it reads changes how it reads the next."""

    seen_before = False

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        before, self.seen_before = self.seen_before, True
        return super().run(x + torch.tanh(x) if before else x, positions, seen, cache)


class Asserting(MLP):
    """Gives up where something is no number."""

    def activate(self, h: Tensor) -> Tensor:
        assert not torch.isnan(h).any(), "no number"
        if h.isnan().any():
            raise ValueError("no number")
        return functional.silu(h)


class LastBit(MLP):
    """Reads the last bit of a number, which no two ways to round agree about."""

    def activate(self, h: Tensor) -> Tensor:
        return torch.where((h.float().view(torch.int32) & 1).bool(), h, h * 0.5)


@dataclass
class EarlyOutput(CausalLMOutputWithPast):
    early_logits: Tensor | None = None


class Early(Tower):
    """Scores after the first layer are returned, and read by the layers behind it."""

    def more(self, config: Any) -> None:
        self.early = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.late = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        self.scores = self.early(x)
        return super().run(x + self.late(self.scores), positions, seen, cache)

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool | None = None, **kwargs: Any
    ) -> EarlyOutput:
        found = super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache, **kwargs)
        return EarlyOutput(logits=found.logits, past_key_values=found.past_key_values, early_logits=self.scores)


class Tagged(Early):
    """Likewise, under a name of its own that says nothing of scores."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        self.scores = self.early(x).softmax(-1)
        return Tower.run(self, x + self.late(self.scores), positions, seen, cache)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        found = CausalLMOutputWithPast(logits=super().forward(input_ids).logits)
        found["tags"] = self.scores
        return found


class TaggedEach(Early):
    """Likewise, for each layer."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"logits": super().forward(input_ids).logits, "tags": (self.scores,)}


class TaggedSecond(Early):
    """Likewise, without a name."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().forward(input_ids).logits, self.scores


class Handed(Tower):
    """Words are put side by side where there are any; else others stand in for them, which a method hands in."""

    kept: Tensor = torch.empty(0)

    def hand_in(self, words: Tensor) -> None:
        self.kept = words

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        words: Any = [] if self.kept.numel() == x.numel() else list(x.unbind(1))
        x = torch.stack(words, 1) if len(words) else torch.tanh(x + self.kept.to(x).view(x.shape))
        return super().run(x, positions, seen, cache)


class Normed(MLP):
    """Rows of weights of length one, by a gain."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        parametrizations.weight_norm(self.up)
        parametrizations.weight_norm(self.down)


class NormedAtOnce(MLP):
    """A weight of length one as a whole, by one gain."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        parametrizations.weight_norm(self.up, dim=None)


class NormedShown(Normed):
    """What is stored as a direction is longer or shorter, and that is seen."""

    def hidden(self, x: Tensor) -> Tensor:
        direction = self.up.parametrizations.weight.original1
        return super().hidden(x) * (1 + direction.square().mean())


class Fused(MLP):
    """Two weights are joined once, and kept where no module knows of it."""

    def hidden(self, x: Tensor) -> Tensor:
        gate, up = nn.functional.linear(x, self.joined()).chunk(2, -1)
        return self.activate(gate) * up

    @lru_cache  # noqa: B019
    def joined(self) -> Tensor:
        return torch.cat([self.gate.weight, self.up.weight])


class JoinedInFiles(MLP):
    """Two weights are saved as one."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self._register_state_dict_hook(self.join)
        self.register_load_state_dict_pre_hook(self.part)

    @staticmethod
    def join(module: Any, saved: dict[str, Tensor], prefix: str, *_: Any) -> None:
        saved[f"{prefix}both.weight"] = torch.cat([saved.pop(f"{prefix}{name}.weight") for name in ("gate", "up")])

    @staticmethod
    def part(module: Any, saved: dict[str, Tensor], prefix: str, *_: Any) -> None:
        if (both := saved.pop(f"{prefix}both.weight", None)) is not None:
            saved[f"{prefix}gate.weight"], saved[f"{prefix}up.weight"] = both.chunk(2)


class Spectral(MLP):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        parametrizations.spectral_norm(self.up)


class Exponential(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.exp() - 1


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Positive(MLP):
    """What is saved is the logarithm of a weight."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        parametrize.register_parametrization(self.down, "weight", Exponential())


class SymmetricMap(Block):
    """A square map of the stream of which half is saved."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        width = self.config.hidden_size
        self.map = nn.Linear(width, width, bias=False)
        parametrize.register_parametrization(self.map, "weight", Symmetric())

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(x + self.map(x), positions, seen, cache)


class Quantised(MLP):
    """Weights are rounded when they are read."""

    def hidden(self, x: Tensor) -> Tensor:
        step = 0.05
        up = (self.up.weight / step).round() * step
        return self.activate(self.gate(x)) * functional.linear(x, up)


class Standardised(MLP):
    """Rows of a weight are standardised when they are read."""

    def hidden(self, x: Tensor) -> Tensor:
        up = functional.layer_norm(self.up.weight, self.up.weight.shape[-1:])
        return self.activate(self.gate(x)) * functional.linear(x, up)


class Largest(MLP):
    """The weights that are not among the larger half of their row are zero."""

    def hidden(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        kept = weight.abs() >= weight.abs().median(-1, keepdim=True).values
        return self.activate(self.gate(x)) * functional.linear(x, weight * kept)


class Chosen(MLP):
    """Only words that choose so are answered."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        (words,) = torch.where(self.gate(flat)[:, 0] > 0)
        return torch.zeros_like(flat).index_add_(0, words, self.answer(flat[words])).view_as(x)

    def answer(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


class Crowd(Chosen):
    """By how many they are."""

    def answer(self, x: Tensor) -> Tensor:
        return self.down(fold(self.up(x)) if len(x) < 4 else self.hidden(x))


globals().update(towers(
    __name__, CachedTower=Cached, FarTower=Far, StepTower=Step, ConfiguredCacheTower=ConfiguredCache,
    ExportingTower=Exporting, AssertingTower=Asserting, LastBitTower=LastBit, TracingTower=Tracing,
    TryExceptTower=TryExcept, ImplementationTower=Implementation,
    AloneTower=Alone, ManyRowsTower=ManyRows, SignedTower=Signed, NormedTower=Normed, SpectralTower=Spectral,
    NormedShownTower=NormedShown,
    NormedAtOnceTower=NormedAtOnce, FusedTower=Fused, JoinedInFilesTower=JoinedInFiles,
    PositiveTower=Positive, SymmetricMapTower=SymmetricMap, QuantisedTower=Quantised,
    StandardisedTower=Standardised, LargestTower=Largest, ChosenTower=Chosen, CrowdTower=Crowd,
))  # fmt: skip
