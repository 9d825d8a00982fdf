"""What the methods of a model's own code may set between two calls: how many units it takes, which it leaves out.

Nothing is known of what these methods do. So what they set is set to other values, as arguments are given others
(`asked.py`), on all objects of the model that hold it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.tracing.amounts import amounts, widths
from hf_align.tracing.branches.set_by_methods import set_by_methods
from hf_align.tracing.branches.taken import brought, sources_of
from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.watched import scalars

_PLAIN = (bool, int, float, str)
_LISTS: Mapping[str, Callable[[Any], Any]] = {
    "with fewer entries": lambda held: held[: len(held) // 2],
    "turned round": lambda held: held[::-1],
}
_ABSENT = object()


@dataclass(frozen=True)
class Setting:
    """A value for an attribute.

    Attributes:
        said: which, in words.
        value: from what an object holds, what it is to hold.
        word: the value, where it is a word or a number; else something that tells it from others.
    """

    name: str
    said: str
    value: Callable[[Any], Any]
    word: Any


def settings(model: PreTrainedModel, base: Example) -> Iterator[Setting]:
    """Other values for what the model's own methods may set.

    Args:
        base: a call of it.
    """
    modules = brought(model)
    for name in sorted(_set(tuple(sources_of(modules).values()))) if modules else ():
        for held in _first_of_each_kind(model, name):
            yield from _others(model, base, name, held)


@contextmanager
def while_set(model: nn.Module, setting: Setting) -> Iterator[None]:
    """While an attribute has another value on all objects that hold it."""
    with ExitStack() as stack:
        for holder, held in [*_holders(model, setting.name)]:
            stack.callback(_put_back, holder, setting.name, _own(holder).get(setting.name, _ABSENT))
            setattr(holder, setting.name, setting.value(held))
        yield


@lru_cache(maxsize=8)
def _set(sources: tuple[str, ...]) -> frozenset[str]:
    try:
        return set_by_methods(sources)
    except (SyntaxError, ValueError):  # what was loaded stands there no more
        return frozenset()


def _own(holder: Any) -> dict[str, Any]:
    """What an object holds itself, by attribute."""
    buffers = holder._buffers if isinstance(holder, nn.Module) else {}
    return {**vars(holder), **buffers}


def _put_back(holder: Any, name: str, held: Any) -> None:
    if held is _ABSENT:
        delattr(holder, name)
    else:
        setattr(holder, name, held)


def _holders(model: nn.Module, name: str) -> Iterator[tuple[Any, Any]]:
    """The modules, and parts of the config, that have an attribute whose value is plain; and that value."""
    config = getattr(model, "config", None)
    for holder in (*model.modules(), *(parts(config) if isinstance(config, PretrainedConfig) else ())):
        held = _own(holder).get(name, inspect.getattr_static(holder, name, _ABSENT))
        if not _is_stored(holder, name) and (held is None or isinstance(held, (*_PLAIN, list, tuple, Tensor))):
            yield holder, held


def _is_stored(holder: Any, name: str) -> bool:
    """Whether files give a tensor its values."""
    is_buffer = isinstance(holder, nn.Module) and name in holder._buffers
    return is_buffer and name not in holder._non_persistent_buffers_set


def _first_of_each_kind(model: nn.Module, name: str) -> list[Any]:
    kinds = dict[type, Any]()
    for _, held in _holders(model, name):
        kinds.setdefault(type(held), held)
    return [*kinds.values()]


def _others(model: PreTrainedModel, base: Example, name: str, held: Any) -> Iterator[Setting]:
    if held is None or type(held) in _PLAIN:
        yield from (_set_to(name, value) for value in _plain(model, base, name, held))
    if held is None:
        yield from (Setting(name, said, partial(_given, vector), said) for said, vector in _vectors(model, name))
    elif isinstance(held, Tensor):
        said = f"{name} with other entries"
        yield Setting(name, said, _with_others, said)
    elif isinstance(held, (list, tuple)) and len(held) > 1:
        for said, value in _LISTS.items():
            yield Setting(name, f"{name} {said}", value, said)


def _given(value: Any, held: Any) -> Any:
    return value


def _set_to(name: str, value: Any) -> Setting:
    return Setting(name, f"{name} set to {value!r}", partial(_given, value), value)


def _plain(model: PreTrainedModel, base: Example, name: str, held: Any) -> list[Any]:
    """Other words, numbers and flags."""
    if isinstance(held, bool):
        return [not held]
    asked = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=held)

    def call(**given: Any) -> Any:
        value = given.pop(name)
        with while_set(model, _set_to(name, value)):
            return model(**given)

    return [*dict.fromkeys((*amounts(asked, call, base), *scalars(asked, call, base)))]


def _vectors(model: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """Shares of the units, and which of them count, for what may be as wide as any weight."""
    for size in widths(model):
        yield f"{name} set to {size} shares", torch.linspace(0.5, 1.5, size)
        yield f"{name} set to {size} truths", torch.arange(size) % 3 == 1


def _with_others(held: Tensor) -> Tensor:
    """A tensor of the same shape and dtype of which each entry is another, as far as its dtype can tell."""
    if held.dtype == torch.bool:
        return (torch.arange(held.numel()) % 3 == 1).view(held.shape)
    if not held.is_floating_point():
        return held.flip(-1) if held.dim() else held + 1
    return held * torch.linspace(0.5, 1.5, held.numel()).to(held.dtype).view(held.shape) + (held == 0)
