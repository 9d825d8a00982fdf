"""A step with a cache: what a model returned for the first tokens is given with the last ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import PreTrainedModel

from hf_align.tracing.mode import Mode, Turned

_KEEPS = ("use_cache", "use_mems")


def in_steps(count: int) -> Turned:
    """The last call of two: all tokens but so many are read before it, with whatever else is asked for."""
    return partial(_second_call, count)


def _second_call(count: int, model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    main, flags = last_tokens(arguments), asking_for_a_cache(model.forward)
    first = model(**{**_part(arguments, main, slice(-count)), **flags})
    return {**_part(arguments, main, slice(-count, None)), **handed_on(model.forward, first, arguments), **flags}


def asking_for_a_cache(forward: Callable[..., Any]) -> dict[str, bool]:
    """The flags that make a model return what a later call goes on with."""
    asked = inspect.signature(forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in asked.values())
    return {name: True for name in _KEEPS if name in asked or (takes_all and name == _KEEPS[0])}


def handed_on(forward: Callable[..., Any], first: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a first call returned that the next one takes besides its arguments.

    Raises:
        ValueError: there is nothing.
    """
    asked = inspect.signature(forward).parameters
    found = {k: v for k, v in first.items() if k in asked and not isinstance(v, Tensor)}
    if not found:
        raise ValueError("nothing to go on with")
    return {k: v for k, v in found.items() if k not in arguments}


def last_tokens(arguments: Mapping[str, Any]) -> str:
    """The tokens that a model goes on from, or their embeddings: the decoder's, where it has one."""
    names = [n for n in arguments if n.endswith(("input_ids", "inputs_embeds"))]
    return next((n for n in names if n.startswith("decoder")), "input_ids" if "input_ids" in names else names[0])


def _part(arguments: Mapping[str, Any], main: str, which: slice) -> dict[str, Any]:
    """Some of the tokens, and what stands beside them; masks from the first token on."""
    length, of_decoder = arguments[main].shape[1], main.startswith("decoder")

    def part(name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[-2:] == (length, length):
            return value[:, :, which, : which.stop]
        beside = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
        if not beside or name.startswith("decoder") != of_decoder or name.startswith("encoder"):
            return value
        return value[:, : which.stop] if name.endswith("mask") else value[:, which]

    return {name: part(name, value) for name, value in arguments.items()}


@contextmanager
def stepped(model: PreTrainedModel, mode: Mode) -> Iterator[None]:
    """While `forward` is two calls if a mode goes on: all tokens but the last, then the last with what the first call
    returned."""
    if not mode.goes_on:
        yield
        return
    forward = model.forward
    flags = asking_for_a_cache(forward)

    def twice(**arguments: Any) -> Any:
        main = last_tokens(arguments)
        first = forward(**{**arguments, main: arguments[main][:, :-1]}, **flags)
        kept = handed_on(forward, first, arguments)
        second = forward(**{**arguments, main: arguments[main][:, -1:]}, **kept, **flags)
        return tuple(next(v for v in output.values() if isinstance(v, Tensor)) for output in (first, second))

    with patch.object(model, "forward", twice):
        yield
