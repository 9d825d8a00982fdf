"""Decoders that do something else where an argument asks for it that is no tensor; and some whose norms, or reads of
weights, are written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import MLP, Attention, Block, Tower, TowerConfig


class Truncated(Tower):
    """Only so many entries of what the layers compute are read, by an argument of which nothing is said."""

    def forward(self, input_ids: Tensor, size=None, **kwargs: Any) -> CausalLMOutputWithPast:  # type: ignore[no-untyped-def]
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.norm(self.run(self.embed(input_ids), places, None, None))
        if size is not None:
            return CausalLMOutputWithPast(logits=functional.linear(x[..., :size], self.head.weight[:, :size]))
        return CausalLMOutputWithPast(logits=self.head(x))


class TruncatedByDefault(Tower):
    """Likewise; by default all of them are."""

    def forward(self, input_ids: Tensor, size: int = 12, **kwargs: Any) -> CausalLMOutputWithPast:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.norm(self.run(self.embed(input_ids), places, None, None))
        return CausalLMOutputWithPast(logits=functional.linear(x[..., :size], self.head.weight[:, :size]))


class KeptUnits(Tower):
    """All hidden units behind some are left out, if a call says so."""

    units: int | None = None

    def forward(self, input_ids: Tensor, units: int | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        for layer in self.layers:
            layer.mlp.units = units
        return super().forward(input_ids, use_cache=False)


class _FirstUnits(MLP):
    units: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if self.units:
            hidden = torch.cat((hidden[..., : self.units], torch.zeros_like(hidden[..., self.units :])), -1)
        return self.down(hidden)


KeptUnits.mlp = _FirstUnits


class _Bending(Tower):
    """The stream is bent before the first layer."""

    bends = False

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.bends else x, positions, seen, cache)

    def called(self, bends: bool, *arguments: Any) -> CausalLMOutputWithPast:
        self.bends = bends
        try:
            return Tower.forward(self, *arguments)
        finally:
            self.bends = False


class ADict(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                extras: dict[str, Tensor] | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(extras is not None, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class AList(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                extras: list[Tensor] | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(
            extras is not None and len(extras) > 1, input_ids, attention_mask, position_ids, past_key_values, use_cache
        )


class AFlagOrNone(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                bend: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(bool(bend), input_ids, attention_mask, position_ids, past_key_values, use_cache)


class AWord(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                task: str = "plain") -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(task == "bent", input_ids, attention_mask, position_ids, past_key_values, use_cache)


class AWordOrNone(_Bending):
    """Which words there are is not said, and two of them do different things."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                task: str | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        if task not in (None, "plain", "bent"):
            raise ValueError(f"no such task: {task}")
        return self.called(task == "bent", input_ids, attention_mask, position_ids, past_key_values, use_cache)


class AWordInAnyLetters(_Bending):
    """A table that is written out in the code has one way for each word, however that is written."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                task: str = "plain") -> CausalLMOutputWithPast:  # fmt: skip
        bends = {"plain": lambda: False, "bent": lambda: True}[task.strip().lower()]()
        return self.called(bends, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class AKind(_Bending):
    """What kind of list it is given decides, without a condition."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                layers: list[int] | tuple[int, ...] | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        bends = (False, True)[isinstance(layers, tuple)]
        return self.called(bends, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Above(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                level: int = 0) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(level > 7, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class ANumber(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                level: int = 0) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(level == 3, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Below(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                scale: float = 1.0) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(scale < 0, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Begins(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                task: str = "plain") -> CausalLMOutputWithPast:  # fmt: skip
        bends = task.startswith("be")
        return self.called(bends, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Inside(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                **kwargs: Any) -> CausalLMOutputWithPast:  # fmt: skip
        bends = 0.3 < kwargs.get("share", 0.0) < 0.7
        return self.called(bends, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class NoCache(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(use_cache is False, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Attentions(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                output_attentions: bool = False) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(output_attentions, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Labelled(_Bending):
    """The loss comes before the logits, which are others where there is one."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                labels: Tensor | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        found = self.called(labels is not None, input_ids, attention_mask, position_ids, past_key_values, use_cache)
        if labels is None:
            return found
        loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=found.logits, past_key_values=found.past_key_values)


class LeftOut(_Bending):
    """What no label is known of bends the stream."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                labels: Tensor | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        unknown = labels is not None and bool((labels == -100).any())
        return self.called(unknown, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class FourAxes(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        whole = attention_mask is not None and attention_mask.dim() == 4
        seen = None if whole else attention_mask
        return self.called(whole, input_ids, seen, position_ids, past_key_values, use_cache)


class FixedCache(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        fixed = isinstance(past_key_values, StaticCache)
        return self.called(fixed, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class KeptByNumber(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                logits_to_keep: int | Tensor = 0) -> CausalLMOutputWithPast:  # fmt: skip
        listed = isinstance(logits_to_keep, Tensor)
        found = self.called(listed, input_ids, attention_mask, position_ids, past_key_values, use_cache)
        kept = logits_to_keep if listed else slice(-logits_to_keep or None, None)
        return CausalLMOutputWithPast(logits=found.logits[:, kept], past_key_values=found.past_key_values)


class KeptFrom(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                logits_to_keep: int = 0) -> CausalLMOutputWithPast:  # fmt: skip
        bends = logits_to_keep == 3
        found = self.called(bends, input_ids, attention_mask, position_ids, past_key_values, use_cache)
        found.logits = found.logits[:, -logits_to_keep:]
        return found


class NamedSoThat(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                **kwargs: object) -> CausalLMOutputWithPast:  # fmt: skip
        bends = any(name.startswith("bent") for name in kwargs)
        return self.called(bends, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Nameless(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                **kwargs: Any) -> CausalLMOutputWithPast:  # fmt: skip
        bends = kwargs.get("kind") == "bent"
        return self.called(bends, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Beside(_Bending):
    """The stream is bent where two things are asked for, each of which does nothing alone."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None, bend: bool | None = None,
                labels: Tensor | None = None, **kwargs: object) -> CausalLMOutputWithPast:  # fmt: skip
        read = 0 if past_key_values is None else past_key_values.get_seq_length()
        asked = self.is_asked(
            bend=bool(bend), labels=labels is not None, masked=attention_mask is not None, uncached=use_cache is False,
            fixed=isinstance(past_key_values, StaticCache), placed=position_ids is not None, goes_on=read > 0,
            several=input_ids.shape[1] > 1, named=bool(kwargs.get("named")),
            heads=bool(kwargs.get("output_attentions")), states=bool(kwargs.get("output_hidden_states")),
        )  # fmt: skip
        return self.called(asked, input_ids, attention_mask, position_ids, past_key_values, use_cache)

    def is_asked(self, **asked: bool) -> bool:
        raise NotImplementedError


def _beside(*names: str) -> type[Tower]:
    def is_asked(self: Beside, **asked: bool) -> bool:
        return all(asked[name] for name in names)

    return type(
        f"{'And'.join(n.title().replace('_', '') for n in names)}Tower",
        (Beside,),
        {"is_asked": is_asked, "__module__": __name__},
    )


BESIDE = {
    tower.__name__: tower
    for tower in (
        _beside("bend", "goes_on"),
        _beside("labels", "masked"),
        _beside("uncached", "masked"),
        _beside("fixed", "masked"),
        _beside("masked", "goes_on"),
        _beside("placed", "goes_on"),
        _beside("several", "goes_on"),
        _beside("named", "masked"),
        _beside("heads", "states"),
        _beside("labels", "goes_on"),
    )
}
globals().update(BESIDE)


class BentInHalf(Tower):
    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if x.dtype == torch.bfloat16 else x, positions, seen, cache)


class Listed(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                skipped: list[int] | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        bends = skipped is not None and 1 in skipped
        return self.called(bends, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class MaskOfFloats(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        of_floats = attention_mask is not None and attention_mask.is_floating_point()
        return self.called(of_floats, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class AShare(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                share: float = 0.0) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(share > 0.5, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class ANumberOrNone(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                level: int | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        return self.called(level is not None, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class _Told(Block):
    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any, bend: Any = None) -> Tensor:
        return super().forward(x if bend is None else x + torch.tanh(x), positions, seen, cache)


class HandedOn(Tower):
    """What it takes without a name goes to its layers."""

    block = _Told

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None,
                **kwargs: Any) -> CausalLMOutputWithPast:  # fmt: skip
        self.told = kwargs
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, seen, cache, **self.told)
        return x


class Embedded(_Bending):
    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                position_ids: Tensor | None = None, past_key_values: Any = None, use_cache: bool | None = None,
                inputs_embeds: Tensor | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        if inputs_embeds is None:
            return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        places = torch.arange(inputs_embeds.shape[1]).expand(inputs_embeds.shape[:2])
        x = self.run(inputs_embeds + torch.tanh(inputs_embeds), places, None, None)
        return CausalLMOutputWithPast(logits=self.head(self.norm(x)))


class AllSeen(_Bending):
    """A mask that hides nothing takes a short way."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        seen = attention_mask is not None and bool(attention_mask.all())
        return self.called(seen, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class MaskOfTruths(_Bending):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        truths = attention_mask is not None and attention_mask.dtype == torch.bool
        return self.called(truths, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class LeftPadded(_Bending):
    """Texts that begin with what is hidden are counted from where they begin, and bent."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        left = attention_mask is not None and not bool(attention_mask[:, 0].all())
        return self.called(left, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class FarOut(_Bending):
    """The largest position decides, far behind those that the config knows."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None) -> CausalLMOutputWithPast:  # fmt: skip
        far = position_ids is not None and int(position_ids.max()) > 500
        return self.called(far, input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Detached(MLP):
    """Weights are read through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            functional.linear(torch.tanh(self.hidden(x)), self.down.weight.data)
            + x @ self.gate.weight.data.T @ self.up.weight.detach()
        )


class _ByHand(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def normed(self, x: Tensor) -> Tensor:
        y = x - x.mean(-1, keepdim=True)
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) * self.weight + self.bias


class _Alpha(_ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.normed(x) * self.weight, self.bias, alpha=2)


class _AlphaFirst(_ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.bias, self.normed(x) * self.weight, alpha=2)


class _Signed(_ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) * self.weight.abs() + self.bias


class _Position(_ByHand):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return self.normed(x) * self.weight + self.bias * steps


class _PartMean(_ByHand):
    def normed(self, x: Tensor) -> Tensor:
        y = x - x[..., :-1].mean(-1, keepdim=True)
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)


class _Rounded(_ByHand):
    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x).to(torch.bfloat16).to(x.dtype)


class _Squared(_ByHand):
    def normed(self, x: Tensor) -> Tensor:
        y = x - x.mean(-1, keepdim=True)
        return y * y / y.square().mean(-1, keepdim=True)


class _Clamped(_ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) * self.weight.clamp(max=1.0) + self.bias


class _Mixed(_ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(self.bias.expand_as(x), self.normed(x) * self.weight, 0.5)


class _Cmul(_ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, self.normed(x), self.weight, value=0.5)


class Behind(Block):
    norm: type[nn.Module] = _ByHand

    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, attention, mlp)
        self.first, self.attn_norm, self.mlp_norm = (self.norm(config.hidden_size) for _ in range(3))

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.first(x)
        x = self.attn_norm(x + self.attn(x, positions, seen, cache))
        return self.mlp_norm(x + self.mlp(x))


class Before(Behind):
    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = x + self.attn(self.attn_norm(x), positions, seen, cache)
        return x + self.mlp(self.mlp_norm(x))


def _tower(name: str, **parts: Any) -> type[Tower]:
    return type(name, (Tower,), {**parts, "__module__": __name__})


BY_HAND = []
for _norm in (_ByHand, _Alpha, _AlphaFirst, _Signed, _Position, _PartMean, _Rounded, _Squared, _Clamped, _Mixed, _Cmul):
    for _block in (Behind, Before):
        _name = f"{_block.__name__}{_norm.__name__}"
        globals()[_name] = type(_name, (_block,), {"norm": _norm, "__module__": __name__})
        globals()[f"{_name}Tower"] = _tower(f"{_name}Tower", block=globals()[_name])
        BY_HAND.append(f"{_name}Tower")
DetachedTower = _tower("DetachedTower", mlp=Detached)
PlainTower = _tower("PlainTower")
