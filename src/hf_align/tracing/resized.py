"""A call with more or less of what it is given along some axes: a larger picture, a shorter sound."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_align.tracing.example import Example
from hf_align.tracing.own_code import kinds_of
from hf_align.tracing.watched import constants_of

LONGEST = 600
"""Positions up to which a call is traced: beyond, the masks alone take seconds."""
_LEAST = 3
"""Smaller numbers in the modelling code are no lengths."""


def axes_by_size(example: Example) -> Mapping[int, list[tuple[str, int]]]:
    """The axes of all arguments, those together that are as long."""
    together: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, value in example.arguments.items():
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            together[size].append((name, axis))
    return together


def resized(example: Example, axes: Sequence[tuple[str, int]], size: int) -> Example | None:
    """The call with another size of some axes; None where what is not free, as a mask, would have to grow."""
    if size < 1:
        return None
    arguments = dict(example.arguments)
    for name, axis in axes:
        value = arguments[name]
        if size > value.shape[axis] and not example.is_free(name):
            return None
        arguments[name] = value.index_select(axis, torch.arange(size) % value.shape[axis])
    return replace(example, arguments=arguments)


def numbers_in_code(model: nn.Module) -> set[int]:
    """Numbers that the `forward` of any module mentions: a length may be compared with them."""
    found: set[int] = set()
    for kind in kinds_of(model):
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        found |= {c for c in constants_of(code) if type(c) is int} if code is not None else set()
    return {v for v in found if _LEAST <= v <= LONGEST}
