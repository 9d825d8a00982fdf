"""The arguments of an op: values in lists, tuples and dictionaries. `torch.utils._pytree` knows more and takes longer,
which of the thousands of ops of a trace was a quarter."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor


def leaves(value: Any) -> list[Any]:
    """The values, in order."""
    found: list[Any] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Any]) -> None:
    if isinstance(value, (list, tuple)):
        for part in value:
            _gather(part, found)
    elif isinstance(value, dict):
        for part in value.values():
            _gather(part, found)
    else:
        found.append(value)


def mapped(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """The same with each value of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(kind, change, part) for part in value])
    if isinstance(value, dict):
        return {name: mapped(kind, change, part) for name, part in value.items()}
    return value


def nesting(value: Any) -> Any:
    """How the values are nested: equal for those that are nested alike, and hashable."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(nesting(part) for part in value)
    if isinstance(value, dict):
        return dict, tuple((name, nesting(part)) for name, part in value.items())
    return None


def told_apart(target: Any, operands: Any) -> Hashable:
    """Equal for calls of one op with equal numbers and the same tensors."""
    told = (id(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves(operands))
    return target, nesting(operands), tuple(told)
