"""The fields of a config, one by one: where two configs differ, one with the value of another, and which are read."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch import nn
from transformers import PretrainedConfig

from hf_align.tracing.stored import NOTED

Path = tuple[str, ...]
"""From a config through the configs and dictionaries in it to one value."""
_NO_FIELDS = frozenset(
    (NOTED, "transformers_version", "dtype", *(k for k in vars(PretrainedConfig()) if k.startswith("_")))
)
"""What loading and saving note in every config: they say nothing about an architecture."""


def parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A config and every config in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from parts(value)


class _Unset:
    def __repr__(self) -> str:
        return "not set"


UNSET = _Unset()
"""In place of a value that one of two configs does not have."""


def fields(config: PretrainedConfig) -> dict[Path, Any]:
    """Every value of a config, and of the configs and dictionaries in it; lists are values."""
    return dict(_fields(config, ()))


def _fields(group: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    inner = vars(group) if isinstance(group, PretrainedConfig) else group
    for key, value in inner.items():
        if isinstance(group, PretrainedConfig) and key in _NO_FIELDS:
            continue
        if isinstance(value, PretrainedConfig) or (isinstance(value, dict) and value):
            yield from _fields(value, (*path, str(key)))
        else:
            yield (*path, str(key)), list(value) if isinstance(value, tuple) else value


def differences(a: PretrainedConfig, b: PretrainedConfig) -> dict[Path, tuple[Any, Any]]:
    """Where two configs differ, with both values."""
    first, second = fields(a), fields(b)
    both = {path: (first.get(path, UNSET), second.get(path, UNSET)) for path in {**first, **second}}
    return {path: values for path, values in both.items() if values[0] != values[1]}


def with_values(config: PretrainedConfig, values: Mapping[Path, Any]) -> PretrainedConfig:
    """A copy with other values at some paths, past the setters: what they would compute has a path of its own."""
    made = copy.deepcopy(config)
    for path, value in values.items():
        group = _group(made, path[:-1])
        if value is UNSET:
            group.pop(_key(group, path[-1]), None)
        else:
            group[_key(group, path[-1])] = copy.deepcopy(value)
    return made


def _group(config: PretrainedConfig, path: Path) -> dict[Any, Any]:
    group: dict[Any, Any] = vars(config)
    for part in path:
        key = _key(group, part)
        if not isinstance(group.get(key), (dict, PretrainedConfig)):
            group[key] = {}
        inner = group[key]
        group = vars(inner) if isinstance(inner, PretrainedConfig) else inner
    return group


def _key(group: Mapping[Any, Any], name: str) -> Any:
    """The key that is written so: some are numbers."""
    return next((k for k in group if str(k) == name), name)


def _nearest_module(frame: FrameType | None) -> tuple[nn.Module | None, bool]:
    """Whose method runs, or has called the function that runs; and whether it is being built."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner, frame.f_code.co_name == "__init__"
        frame = frame.f_back
    return None, False


def _read_as(config: PretrainedConfig, path: Path) -> str:
    """The field of a config that a value is, or that the dictionary is in which it stands."""
    group: Any = config
    for part in path:
        if not isinstance(group, PretrainedConfig):
            break
        name, group = part, vars(group).get(part)
    return name


class Readers:
    """Who reads a field while models are built and run.

    Attributes:
        modules: name of a field -> the modules that read it; None stands for code that is in no module.
        later: the names of fields that are read not only while a module is built.
    """

    def __init__(self) -> None:
        self.modules: dict[str, list[nn.Module | None]] = defaultdict(list)
        self.later: set[str] = set()

    def of(self, config: PretrainedConfig, path: Path) -> list[nn.Module | None]:
        """The readers of a value, or of the dictionary of a config that it is in; in whichever config."""
        return self.modules.get(_read_as(config, path), [])

    def builds_alone(self, config: PretrainedConfig, path: Path) -> bool:
        """Whether a value is read only while modules are built."""
        return _read_as(config, path) not in self.later

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note every attribute of a config that is read by name."""
        plain: Callable[[Any, str], Any] = PretrainedConfig.__getattribute__

        def read(config: PretrainedConfig, key: str) -> Any:
            if not key.startswith("__"):
                names = plain(config, "attribute_map")
                self._note(names.get(key, key), *_nearest_module(sys._getframe(1)))
            return plain(config, key)

        with patch.object(PretrainedConfig, "__getattribute__", read):
            yield

    def _note(self, name: str, reader: nn.Module | None, building: bool) -> None:
        if not building:
            self.later.add(name)
        known = self.modules[name]
        if not any(reader is module for module in known):
            known.append(reader)
