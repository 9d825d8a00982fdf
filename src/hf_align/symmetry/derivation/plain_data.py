"""Frozen dataclasses of this package as JSON and back, nothing lost and nothing run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

_PACKAGE = __name__.partition(".")[0]


def to_plain(value: Any) -> Any:
    """What `json` can write.

    Args:
        value: numbers, strings, tuples, frozen sets, mappings, dataclasses and enums of this package, in each other.

    Raises:
        TypeError: it holds something else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return {"enum": f"{type(value).__module__}:{type(value).__qualname__}", "member": value.name}
    if isinstance(value, frozenset):
        return {"set": [to_plain(item) for item in sorted(value)]}
    if isinstance(value, Mapping):
        return {"items": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if is_dataclass(value) and not isinstance(value, type):
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        return {"class": name, "fields": {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}}
    raise TypeError(f"{type(value).__name__} is no plain data")


def from_plain(data: Any) -> Any:
    """What `to_plain` was given.

    Raises:
        ValueError: it is not what `to_plain` gives.
    """
    if isinstance(data, list):
        return tuple(from_plain(item) for item in data)
    if not isinstance(data, dict):
        return data
    match data:
        case {"set": list(items)}:
            return frozenset(from_plain(item) for item in items)
        case {"items": list(items)}:
            return {from_plain(key): from_plain(item) for key, item in items}
        case {"enum": str(name), "member": str(member)}:
            return _own(name, Enum)[member]
        case {"class": str(name), "fields": dict(values)}:
            return _dataclass(name)(**{n: from_plain(v) for n, v in values.items()})
    raise ValueError(f"not written by this package: {list(data)[:3]}")


def _own(name: str, kind: type) -> Any:
    """A class of this package, of a kind."""
    found = _class(name)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{name} is no {kind.__name__}")
    return found


def _dataclass(name: str) -> Any:
    found = _class(name)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ValueError(f"{name} is no dataclass")
    return found


def _class(name: str) -> Any:
    module, _, kind = name.partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{name} is no class of {_PACKAGE}")
    return getattr(import_module(module), kind, None)
