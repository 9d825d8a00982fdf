"""One way to call a model, and the same way with more or fewer tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hf_align.tracing.branches.taken import Turn
from hf_align.tracing.example import Example

Turned = Callable[[Any, dict[str, Any]], dict[str, Any]]
"""From a model and the arguments of a call, the arguments that `forward` gets."""
Within = Callable[[Any], AbstractContextManager[Any]]
"""From a model, what surrounds a call of it."""
_ITS_LENGTH = re.compile(r", \d+ × \d+$")


@dataclass(frozen=True, eq=False)
class Mode:
    """One way to call a model.

    Attributes:
        goes_on: a first call is given all but the last token; a second one the last token, and what the first returned
            to go on with.
        sure: what is given is known to be no stage of what the model computes by itself.
        announced: the kind of what is given besides a text, and the token that stands for it there.
        part: the module of the model that is given `extra`, besides what the model gives it.
        adds: the arguments that it has besides those of a plainer call, each with the number of its value among those
            that were tried.
        asks: what it asks for that should leave the answer as it is (`asked.py`).
        turned: what becomes of the arguments just before the call.
        within: what then surrounds it.
        turned_at: the conditions of the model's own code that say the opposite of what they find.
        sized: whether `turned` gives it so many tokens, however many the example has.
    """

    name: str
    example: Example
    goes_on: bool = False
    sure: bool = False
    announced: tuple[str, int] | None = None
    part: str = ""
    extra: tuple[tuple[str, Tensor], ...] = ()
    adds: tuple[tuple[str, int], ...] = ()
    asks: str = ""
    turned: Turned | None = None
    within: Within | None = None
    turned_at: tuple[Turn, ...] = ()
    sized: bool = False

    @property
    def extent(self) -> tuple[int, int]:
        """Rows, and tokens of each."""
        return extent(self.example)

    @contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        """While the model is called in this way."""
        with self._part_given(model), self._turned(model):
            yield

    @contextmanager
    def _turned(self, model: nn.Module) -> Iterator[None]:
        """While the model is given other arguments, and says nothing of the loss: it may come before the answer."""
        if not self.asks:
            yield
            return
        forward = model.forward

        def turned(**arguments: Any) -> Any:
            around = nullcontext() if self.within is None else self.within(model)
            with patch.object(model, "forward", forward), around:  # what turns the arguments may call it, too
                results = forward(**(arguments if self.turned is None else self.turned(model, arguments)))
            if not isinstance(results, Mapping):
                return results
            return {name: _detached(result) for name, result in results.items() if name != "loss"}

        with patch.object(model, "forward", turned):
            yield

    @contextmanager
    def _part_given(self, model: nn.Module) -> Iterator[None]:
        if not self.part:
            yield
            return

        def given(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            device = next(t.device for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
            return args, {**kwargs, **{n: t.to(device) for n, t in self.extra}}

        hook = model.get_submodule(self.part).register_forward_pre_hook(given, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


Attempt = Callable[[Mode], Exception | None]
"""Tries a call: None if it is one of the model's modes, else what is wrong with it."""


def _detached(result: Any) -> Any:
    """What surrounds a call may have asked for derivatives, which nobody takes."""
    return result.detach() if isinstance(result, Tensor) and result.requires_grad else result


class NothingNew(Exception):
    """A call does no more than one that is known."""


def at_length(example: Example, length: int, rows: int) -> Example | None:
    """An example like another with so many tokens; None where it has none, or other values than tokens depend on where
    they stand."""
    if not example.tokens:
        return None
    before = next(iter(example.tokens))
    axis = example.axis_of_tokens
    texts, extent = (example.arguments[before].shape[i] for i in (0, axis))
    rows *= example.rows_of_one
    extents = {example.arguments[n].shape[axis] for n in example.tokens if n in example.arguments}
    sizes_of = {old: length if old == extent else max(2, length - extent + old) for old in extents}
    arguments = {}
    for name, value in example.arguments.items():
        if name in example.tokens:
            size, streams = sizes_of[value.shape[axis]], value.shape[axis + 1 :]
            ids = example.tokens[name][torch.arange(size) % len(example.tokens[name])]
            shape = rows, *value.shape[1:axis], size, *streams
            arguments[name] = ids.view(size, *(1 for _ in streams)).expand(shape)
        elif not isinstance(value, Tensor) or not value.dim():
            arguments[name] = value
        else:
            sizes = [sizes_of.get(size, size) for size in value.shape]
            sizes[0] = rows if value.shape[0] == texts else value.shape[0]
            changed = (new != old for new, old in zip(sizes, value.shape, strict=True))
            kept = value[tuple(slice(1) if new else slice(None) for new in changed)]
            if value.numel() and not kept.expand_as(value).equal(value):
                return None
            arguments[name] = kept.expand(sizes) if value.numel() else value
    made = {n: t.contiguous() if isinstance(t, Tensor) else t for n, t in arguments.items()}
    return replace(example, arguments=made).ended()


def cut(example: Example, length: int) -> Example | None:
    """An example like another with fewer tokens, and what stands beside them; None where it has no more."""
    whole = extent(example)[1]
    if length >= whole:
        return None
    masks = [v for v in example.arguments.values() if isinstance(v, Tensor) and not v.is_floating_point()]
    kept = _kept(masks, whole, length)
    return replace(example, arguments={n: _cut(v, whole, kept) for n, v in example.arguments.items()}).ended()


def _kept(masks: Sequence[Tensor], whole: int, length: int) -> Tensor:
    """The places that stay: the first that follow each other of which no mask hides more than half in any text, for
    several may become one further on; else the first, or some, of which it does not hide all, for what attends to
    nothing gives no number; else the first."""
    windows = [torch.arange(start, start + length) for start in range(whole - length + 1)]
    for least in (-(-length // 2), 1):
        for window in windows:
            if not _hidden(masks, whole, window, least):
                return window
    needed = dict[int, None]()
    while len(needed) < length:
        more = [place for place in range(whole) if place not in needed][: length - len(needed)]
        kept = torch.tensor(sorted([*needed, *more]))
        hidden = _hidden(masks, whole, kept)
        if not hidden:
            return kept
        needed |= dict.fromkeys(hidden)
    return windows[0]


def _hidden(masks: Iterable[Tensor], whole: int, kept: Tensor, least: int = 1) -> list[int]:
    """The first place that a mask shows of each row of which it shows fewer than so many places that are kept."""
    found = list[int]()
    for mask in masks:
        axes = _axes(mask, whole)
        for axis in axes:
            rows = _taken(mask != 0, [other for other in axes if other != axis], kept).movedim(axis, -1)
            lost = rows.any(-1) & (rows[..., kept.to(rows.device)].sum(-1) < least)
            found += rows[lost].int().argmax(-1).tolist()
    return found


def _axes(value: Tensor, whole: int) -> list[int]:
    return [axis for axis, size in enumerate(value.shape) if size == whole]


def _cut(value: Any, whole: int, kept: Tensor) -> Any:
    return _taken(value, _axes(value, whole), kept).contiguous() if isinstance(value, Tensor) else value


def _taken(value: Tensor, axes: Iterable[int], kept: Tensor) -> Tensor:
    for axis in axes:
        value = value.index_select(axis, kept.to(value.device))
    return value


def with_fewer_tokens(mode: Mode, length: int) -> Mode | None:
    """The same call with so many tokens, of one text where it is nothing but tokens; None where it has no more."""
    whole, plain = mode.extent[1], not (mode.adds or mode.goes_on or mode.part)
    if length >= whole or not (mode.example.tokens or mode.announced):
        return None
    given = replace(mode.example, arguments={**mode.example.arguments, **dict(mode.extra)})
    shorter = (at_length(given, length, 1) if plain else None) or cut(given, length)
    if shorter is None:
        return None
    extra = tuple((n, shorter.arguments[n]) for n, _ in mode.extra)
    example = replace(mode.example, arguments={n: shorter.arguments[n] for n in mode.example.arguments})
    return at_its_length(replace(mode, example=example, extra=extra))


def at_its_length(mode: Mode) -> Mode:
    """A mode whose name says how long it is."""
    return replace(mode, name=f"{without_length(mode.name)}, {' × '.join(map(str, mode.extent))}")


def without_length(name: str) -> str:
    """A mode's name, but for how long it is."""
    return _ITS_LENGTH.sub("", name)


def extent(example: Example) -> tuple[int, int]:
    """Texts, and tokens of each."""
    tensors = [t for t in example.arguments.values() if isinstance(t, Tensor)]
    tokens = next((example.arguments[n] for n in ("input_ids", *example.tokens) if n in example.arguments), tensors[0])
    length = tokens.shape[example.axis_of_tokens] if tokens.dim() > 1 else 1
    return tokens.shape[0] // example.rows_of_one, length


def of_each_choice(value: Tensor, example: Example) -> Tensor:
    """Numbers for each token, [rows, tokens]; where there is a choice of texts, the same for each, [rows, choices,
    tokens]."""
    if example.choices == 1 or value.shape != extent(example):
        return value
    return value[:, None].expand(-1, example.choices, -1).contiguous()


def extent_of(name: str, example: Example) -> tuple[int, int]:
    """Rows and tokens that an argument is about: the decoder's, if its name says so."""
    tokens = example.arguments.get("decoder_input_ids") if name.startswith("decoder_") else None
    return extent(example) if tokens is None else (tokens.shape[0], tokens.shape[1])
