"""Whether a model of `build_without_weights` answers calls: it runs, whatever its size, for all of its weights are
views of one zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_align.errors import HfAlignError
from hf_align.tracing.build import quiet
from hf_align.tracing.documented import announced_media
from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.first_calls import first_calls
from hf_align.tracing.in_texts import try_media
from hf_align.tracing.mode import Mode, NothingNew, at_length, extent
from hf_align.tracing.ways import positions

_LENGTH = 10
"""Tokens that a copy is tried on."""
_WORDS = 12
"""Tokens that its modes are found with."""
_PATCHES = 4096
"""Of a picture that is tried, at most: attention among more of them takes gigabytes."""


def run_on_zeros(model: PreTrainedModel, example: int | None = None, rows: int = 2) -> int:
    """Run a model of `build_without_weights`, whatever its size: all weights are views of one zero.

    Returns:
        The number of the first example that works.

    Raises:
        HfAlignError: none does, or not with every text.
    """
    weights, reasons = _zeros(model), []
    for number, candidate in enumerate(first_calls(model, rows, _LENGTH)):
        if example is not None and number != example:
            continue
        try:
            with torch.no_grad(), quiet():
                torch.func.functional_call(model, weights, (), dict(candidate.arguments))
        except Exception as error:  # examples are guesses
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if _reaches_outside(model, weights, candidate):
            raise HfAlignError("a text without padding reaches outside of a table")
        return number
    raise HfAlignError(reasons[0] if reasons else "no example")


def _reaches_outside(model: PreTrainedModel, weights: dict[str, Tensor], example: Example) -> bool:
    """Whether a text of one word alone finds no place in some table: where padding is left out of the count of
    positions, such a text has most."""
    length = min(_WORDS, positions(model.config) or _WORDS)
    words = at_length(example, length, extent(example)[0])
    if words is None:
        return False
    same = {name: torch.full_like(words.arguments[name], int(words.tokens[name][-1])) for name in words.tokens}
    try:
        with torch.no_grad(), quiet():
            torch.func.functional_call(model, weights, (), {**words.arguments, **same})
    except Exception as error:  # some texts must have an end, or a place for a picture
        return isinstance(error, IndexError) or "out of bounds" in str(error)
    return False


@dataclass(frozen=True)
class Media:
    """With which kinds of media a model answers texts.

    Attributes:
        answered: these kinds; none if its texts have no place for any.
        tried: how many calls were tried.
        failures: what the model said of the calls with other kinds, each once.
    """

    answered: frozenset[str] = frozenset()
    tried: int = 0
    failures: tuple[str, ...] = ()


def media_answered(model: PreTrainedModel, most: float = math.inf) -> Media:
    """The kinds of media with which a model of `build_without_weights` answers texts.

    Args:
        most: calls that are tried.
    """
    if next(announced_media(model), None) is None:
        return Media()
    answered, tried, weights, failures = set[str](), 0, _zeros(model), list[tuple[str, str]]()

    def attempt(mode: Mode) -> Exception | None:
        nonlocal tried
        tried += 1
        if tried > most:
            return None
        if _patches(model, mode.example) > _PATCHES:
            return NothingNew()
        try:
            with torch.no_grad(), quiet():
                torch.func.functional_call(model, weights, (), dict(mode.example.arguments))
        except Exception as error:  # as many ways to fail as there are models
            failures.append((mode.name, str(error)))
            return error
        answered.add(mode.name)
        return None

    try_media(model, attempt)
    said = dict.fromkeys(error for kind, error in failures if kind not in answered)
    return Media(frozenset(answered), tried, tuple(said))


def _patches(model: PreTrainedModel, example: Example) -> int:
    """The most patches that a picture of a call can be cut into, by the smallest patches of a part of the model."""
    sizes = [getattr(part, "patch_size", None) for part in parts(model.config)]
    least = min((size for size in sizes if isinstance(size, int) and size), default=math.inf)
    given = [value for value in example.arguments.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return max((int(x.shape[-2] // least * (x.shape[-1] // least)) for x in given if x.dim() > 3), default=0)


def _zeros(model: PreTrainedModel) -> dict[str, Tensor]:
    zero = torch.zeros(())
    return {name: zero.expand(p.shape) for name, p in model.named_parameters()}
