"""A call with more or less of what it is given along some axes: a larger picture, a shorter sound."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_align.tracing.example import Example
from hf_align.tracing.own_code import kinds_of
from hf_align.tracing.watched import constants_of

T = TypeVar("T")
LONGEST = 600
"""Positions up to which a call is traced: beyond, the masks alone take seconds."""
LEAST = 3
"""Smaller numbers in the modelling code are no lengths."""


def axes_by_size(example: Example) -> Mapping[int, list[tuple[str, int]]]:
    """The axes of all arguments, those together that are as long; but for those without entries, as of what a model of
    time series is not given."""
    together: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, value in example.arguments.items():
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if size:
                together[size].append((name, axis))
    return together


def resized(example: Example, axes: Sequence[tuple[str, int]], size: int) -> Example | None:
    """The call with another size of some axes; None where what is not free, as a mask, would have to grow, unless it is
    one number throughout."""
    if size < 1:
        return None
    arguments = dict(example.arguments)
    for name, axis in axes:
        value = arguments[name]
        if size > value.shape[axis] and not example.is_free(name) and len(value.unique()) > 1:
            return None
        arguments[name] = value.index_select(axis, torch.arange(size) % value.shape[axis])
    return replace(example, arguments=arguments)


def numbers_in_code(model: nn.Module, most: int = LONGEST) -> set[int]:
    """Numbers that the `forward` of any module mentions, or its class: a length may be compared with them."""
    found = set[object]()
    for kind in kinds_of(model):
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        found.update(() if code is None else constants_of(code))
        found.update(value for base in kind.__mro__ for value in vars(base).values() if type(value) is int)
    return {v for v in found if type(v) is int and LEAST <= v <= most}


def numbers_noted(model: nn.Module, most: int = LONGEST) -> set[int]:
    """Small numbers that modules note of themselves: windows and lengths; those of the library are sizes."""
    own = [m for m in model.modules() if not type(m).__module__.startswith("torch.")]
    noted = (leaf for module in own for leaf in tree_leaves(list(vars(module).values())))
    plain = (v.item() if isinstance(v, Tensor) and not v.dim() and not v.is_meta else v for v in noted)
    found = {v for v in plain if isinstance(v, int) and not isinstance(v, bool)}
    sizes = {size for p in model.parameters() for size in p.shape}
    return {n for n in found - sizes if LEAST <= n <= most}


def strides_of(model: nn.Module) -> list[int]:
    """By how much convolutions go on, in their order: a picture that grows by the first has one place more."""
    found = (getattr(module, "stride", None) for module in model.modules())
    return [*dict.fromkeys(stride[0] for stride in found if isinstance(stride, tuple) and stride[0] > 1)]


def spread(sizes: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of them, the ends included."""
    if len(sizes) <= most:
        return sizes
    return [sizes[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most)]
