"""The tensors that a call returns, wherever they stand in its result."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Set, ValuesView
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_align.errors import IncompatibleModels
from hf_align.tracing.modules import ModuleModel

_CLOSED = (FunctionType, MethodType, partial, Iterator, Set)
"""What may hold tensors that cannot be read, or in no order."""


def returned(model: nn.Module, results: Any) -> list[Tensor]:
    """The tensors in what a model returns. Of a plain module objects are read, too: all that it returns is its answer.
    Those of models of transformers, such as caches, are in bases of their own.

    Raises:
        IncompatibleModels: a plain module returns what cannot be read.
    """
    found = held(results) if isinstance(model, ModuleModel) else tree_leaves(results)
    return [t for t in found if isinstance(t, Tensor)]


def held(results: Any) -> list[Any]:
    """All values in lists, dicts, dataclasses and other objects, in order; of an object that is met again, once.

    Raises:
        IncompatibleModels: what one of them holds cannot be read.
    """
    return list(_held(results, {}))


def _held(value: Any, met: dict[int, Any]) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        parts = None if isinstance(leaf, (Tensor, nn.Module, type)) else _parts(leaf)
        if parts is None:
            yield leaf
        elif id(leaf) not in met:
            met[id(leaf)] = leaf  # kept, so that no other object gets its id
            for part in parts:
                yield from _held(part, met)


def _parts(leaf: Any) -> list[Any] | None:
    """What an object is made of; None for what holds nothing."""
    if isinstance(leaf, (Mapping, UserDict)):
        return list(leaf.values())
    if isinstance(leaf, (tuple, list, ValuesView)):
        return list(leaf)
    if isinstance(leaf, _CLOSED):
        raise IncompatibleModels(
            f"a {type(leaf).__name__} is returned, which may hold tensors; return a tuple or a dict"
        )
    slots = [n for base in type(leaf).__mro__ for n in _names(vars(base).get("__slots__", ()))]
    named = [getattr(leaf, n) for n in slots if hasattr(leaf, n)]
    return named + list(getattr(leaf, "__dict__", {}).values()) or None


def _names(slots: Any) -> list[str]:
    return [n for n in ([slots] if isinstance(slots, str) else slots) if n not in ("__dict__", "__weakref__")]
