"""What a call may ask for that should leave the answer as it is: more results or fewer, a loss, another kind of cache
or mask, embeddings in place of tokens, whatever `forward` takes without naming it.

As a rule it does, and another program to interpret would tell nothing new. So it is measured: a small copy with random
weights runs with and without, and only what changes its answer makes a mode.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from hf_align.tracing.amounts import amounts, taken
from hf_align.tracing.between_calls import settings, while_set
from hf_align.tracing.documented import FLAG, NOT_ASKED
from hf_align.tracing.example import Example
from hf_align.tracing.inputs import reader
from hf_align.tracing.mode import Mode, Turned, Within, extent, extent_of
from hf_align.tracing.own_code import kinds_of, methods
from hf_align.tracing.tokens import NO_LABEL
from hf_align.tracing.watched import SHARES, Scalar, constants_of, is_said, is_unsaid, may_be, scalars

_MOST = 8
"""Words and numbers of the code that looks an argument up, which are tried."""
_UNHEARD = {1: "an argument", 2: "two arguments", 4: "four arguments"}
"""How many arguments are given that no code names."""
OF_ANY = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")
"""Flags that models of transformers hand on without naming them."""
_NUMBER = re.compile(r"(?<= )-?\d+$")
_MASK, _CACHE, _EMBEDDED = "attention_mask", "past_key_values", "inputs_embeds"


@dataclass(frozen=True, eq=False)
class Ask:
    """Something that a call asks for.

    Attributes:
        said: its name.
        ways: arguments that ask for it; some models take one of them, some another.
        turned, within: as of a mode.
        settings: as of an example.
        surrounds: whether it is nothing that a call is given, but what code may find around it.
    """

    said: str
    ways: tuple[Mapping[str, Any], ...]
    turned: Turned | None = None
    within: Within | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    surrounds: bool = False

    def modes(self, base: Example) -> Iterator[Mode]:
        """The calls that ask for it."""
        main = base.said
        for way in self.ways:
            example = replace(base, arguments={**base.arguments, **way}, held=base.held | way.keys(),
                              settings=self.settings)  # fmt: skip
            yield Mode(f"{main} with {self.said}", example, asks=self.said, turned=self.turned, within=self.within)


def asks(model: PreTrainedModel, base: Example) -> Iterator[Ask]:
    """What a call of a model may ask for besides the arguments that it has."""
    named = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in named.values())
    for name in (*named, *(n for n in OF_ANY if open_ended and n not in named)):
        if name not in base.arguments and NOT_ASKED.search(name):
            for value in _values(model, name, base):
                yield Ask(_said(name, value), ({name: value},))
    for name in named:
        if name not in base.arguments:
            yield from (*_defaults(name, base), *_rarer(name, base))
    if _EMBEDDED in named and "input_ids" in base.tokens:
        yield Ask("its own embeddings as inputs_embeds", ({},), _looked_up)
    if _CACHE in named and base.tokens and model.can_generate():
        yield Ask("a static cache", ({},), _with_static_cache)
    if open_ended:
        yield from nameless(model, base, _handed_on(model))
    for setting in settings(model, base):
        within = partial(while_set, setting=setting)
        yield Ask(setting.said, ({},), within=within, settings={setting.name: setting.word})


def whatever_number(said: str) -> str:
    """What is asked for but for its number: of a smaller model an axis may be divided by others."""
    return _NUMBER.sub("a number", said)


def with_losses(model: PreTrainedModel, base: Example) -> Iterator[Mode]:
    """Calls whose loss is an answer: it may read what no other answer does."""
    for name in inspect.signature(model.forward).parameters:
        given = _values(model, name, base) if name not in base.arguments and NOT_ASKED.search(name) else ()
        for value in (value for value in given if isinstance(value, Tensor)):
            example = replace(base, arguments={**base.arguments, name: value})
            yield Mode(f"{base.said} with {_said(name, value)}", example)


def nameless(model: PreTrainedModel, base: Example, names: Mapping[str, Iterable[Scalar]]) -> Iterator[Ask]:
    """Arguments that `forward` takes without naming them, as a truth, a number, a mask, and what stands in the code
    that looks them up."""
    rows, length = extent(base)
    first = (torch.arange(length) < 1).long().expand(rows, length).contiguous()
    named = {*inspect.signature(model.forward).parameters, *OF_ANY}
    for count, said in _UNHEARD.items():
        yield Ask(f"{said} that no code names", ({f"unheard_of_{n}": None for n in range(count)},))
    for name, values in names.items():
        for value in (True, False, *taken(name, model, base), *SHARES, first, *values) if name not in named else ():
            yield Ask(_said(name, value), ({name: value},))


def _said(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{name} = {value!r}"
    below = value < 0
    left_out = ", all left out" if bool(below.all()) else ", some left out" if bool(below.any()) else ""
    return f"{name} ({value.dim()}-d {str(value.dtype).removeprefix('torch.')}{left_out})"


def _values(model: PreTrainedModel, name: str, base: Example) -> Iterator[Any]:
    """Values of an argument that asks for more results or for fewer."""
    rows, length = extent_of(name, base)
    named = inspect.signature(model.forward).parameters.get(name)
    if name.endswith("_to_keep"):
        compared = scalars(named, model, base) if named is not None else ()
        yield from (*dict.fromkeys((1, *compared)), torch.tensor([0, length - 1]))
    elif named is None or isinstance(named.default, bool) or is_said(named, bool) or name in OF_ANY:
        yield from (value for value in (True, False) if named is None or value is not named.default)
    elif may_be(named, int) or may_be(named, float):
        yield from (*amounts(named, model, base), *(SHARES if may_be(named, float) else ()))
    elif named.default is None:
        if is_unsaid(named) and FLAG.search(name):
            yield from (True, *amounts(named, model, base))
        read = reader(model, rows, length)
        yield from (read.ids(length), torch.arange(rows) % 2, torch.ones(rows))
        if name.endswith("labels"):
            yield from (read.ids(length).index_fill(1, torch.arange(n), NO_LABEL) for n in (length // 2, length))
            yield from (torch.arange(t[:, 0].numel()).view_as(t[:, 0]) % 2 for t in _pictures(base)[:1])


def _pictures(base: Example) -> list[Tensor]:
    """What a call is given of four axes: pictures [rows, colours, height, width]."""
    return [t for t in base.arguments.values() if isinstance(t, Tensor) and t.dim() == 4]


def _defaults(name: str, base: Example) -> Iterator[Ask]:
    """What a model goes by where an argument is not given, said in full: nothing is hidden, the first position is 0,
    all tokens are of one type. Some models number positions in another way, and answer otherwise."""
    rows, length = extent_of(name, base)
    every = torch.ones(rows, length, dtype=torch.long)
    if name.endswith(_MASK) and "global" not in name:
        yield Ask(f"{name} of ones", ({name: every},))
        for kind in (torch.bool, torch.int32, torch.float32):
            yield Ask(f"{name} of ones ({str(kind).removeprefix('torch.')})", ({name: every.to(kind)},))
        if any(tokens.startswith("decoder") is name.startswith("decoder") for tokens in base.tokens):
            yield Ask(f"{name} (4-d)", tuple({name: mask} for mask in _of_four_axes(rows, length)))
    elif name.endswith("position_ids"):
        yield Ask(f"{name} in order", ({name: every.cumsum(1) - 1},))
    elif name.endswith("type_ids"):
        yield Ask(f"{name} of zeros", ({name: 0 * every},))


def _rarer(name: str, base: Example) -> Iterator[Ask]:
    """Masks and positions of other texts and pictures than those that are tried first, which code may tell apart by
    what they hold: all texts begin late, each has a gap, documents lie behind each other, a place has three numbers,
    pictures end early."""
    rows, length = extent_of(name, base)
    places = torch.arange(length).repeat(rows, 1)
    if name.endswith(_MASK) and "global" not in name:
        yield Ask(f"{name} of texts that begin late", ({name: (places >= length // 3).long()},))
        yield Ask(f"{name} with gaps", ({name: ((places < length // 3) | (places > length // 2)).long()},))
    elif name.endswith("position_ids"):
        yield Ask(f"{name} that begin anew", ({name: places % max(1, length // 2)},))
        for texts in ((), (places,)):  # some models number a text besides what stands in it
            several = torch.stack([*texts, places, places // 2, places % 3])
            yield Ask(f"{name} (3-d, {len(several)})", ({name: several},))
    elif name.endswith("pixel_mask"):
        for count, _, height, width in (t.shape for t in _pictures(base)[:1]):
            mask = torch.ones(count, height, width, dtype=torch.long)
            mask[0, height // 2 :], mask[-1, :, width // 2 :] = 0, 0
            yield Ask(f"{name} of pictures that end early", ({name: mask},))


def _of_four_axes(rows: int, length: int) -> Iterator[Tensor]:
    """Masks [rows, 1, length, length] that hide nothing, or what comes later; as truths or what is added to scores."""
    every = torch.ones(rows, 1, length, length, dtype=torch.bool)
    for seen in (every.tril(), every):
        yield torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        yield seen


def _looked_up(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Tokens as rows of the model's own table."""
    left = {name: value for name, value in arguments.items() if name != "input_ids"}
    return {**left, _EMBEDDED: model.get_input_embeddings()(arguments["input_ids"])}


def _with_static_cache(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """With a cache that has room for this text and no more."""
    length = next(t.shape[1] for n, t in arguments.items() if n.endswith("input_ids"))
    return {**arguments, _CACHE: StaticCache(config=model.config, max_cache_len=length), "use_cache": True}


def _handed_on(model: nn.Module) -> dict[str, list[Scalar]]:
    """All that the code of some module names: what modules look up among the arguments that they take without naming
    them, or name themselves, but for tensors; each with the words and numbers of the code that looks it up, one of
    which it may be compared with."""
    kinds = kinds_of(model)
    own = [p for kind in kinds for p in inspect.signature(kind.forward).parameters.values()]
    found: dict[str, list[Scalar]] = {p.name: [] for p in own if p.default is not p.empty}
    for code in (code for kind in kinds for code in methods(kind)):
        constants = [*constants_of(code)]
        words = [c for c in constants if isinstance(c, str) and c.isidentifier()]
        beside: list[Scalar] = [*words, *(n for c in constants if type(c) is int for n in (c, c + 1))]
        beside += _and_between([c for c in constants if type(c) is float])
        for word in words if code.co_flags & inspect.CO_VARKEYWORDS else ():
            found[word] = [value for value in beside if value != word][:_MOST]
    tensors = {p.name for p in own if "Tensor" in str(p.annotation)}
    return {name: values for name, values in found.items() if name not in tensors}


def _and_between(numbers: Iterable[float]) -> list[float]:
    """Some numbers, and those in the midst of two that are next to each other."""
    ordered = sorted({*numbers})
    return [*ordered, *((low + high) / 2 for low, high in pairwise(ordered))]
