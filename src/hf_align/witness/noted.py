"""What modelling code is seen to look at while a small copy runs: the numbers that it compares sizes with, the
arguments that it looks up without naming them, and variables of the environment. Whatever it computes them from, each
is tried.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_align.tracing.own_code import files_of, numbers_compared
from hf_align.witness.contexts import LONGEST
from hf_align.witness.effort import windows
from hf_align.witness.sizes import Measuring, Size, frame_of_code

_RANK = 4
"""What stands in code beside numbers up to this one is a number of axes more often than a size."""
_OF_THE_ENVIRONMENT = ("os", "collections.abc", "_collections_abc")
"""The Python modules through which it is asked."""
_OF_TORCH = frozenset(vars(nn.Module()))
_LEAST = 3
"""What sizes below are compared with is tried anyway."""
_MOST = 8
"""Numbers, words and names of a kind that are tried; those of no model of transformers are as many."""
_LARGEST = 4
"""More sizes, the largest that may be tried: of many, what lies farthest shows itself last."""


@dataclass(frozen=True)
class Noted:
    """What code was seen to look at.

    Attributes:
        sizes: numbers that it compares sizes with.
        values: whole numbers that it compares tensors of whole numbers with.
        keywords: the names of arguments.
        states: whole numbers that modules keep from one call to the next, as `path.name=value`.
        variables: of the environment, as `NAME=value`, with what they may be compared with.
    """

    sizes: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    keywords: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Mapping[str, Sequence[Any]]) -> Noted:
        """From what `asdict` makes of one, read from JSON."""
        return cls(**{name: tuple(values) for name, values in data.items()})


class Notes:
    """Collects what code looks at in one run after the other.

    Args:
        model: whose code it is.
        units: how many texts a call has, and tokens in each.
        words: its token ids.
    """

    def __init__(self, model: PreTrainedModel, units: tuple[int, ...], words: Sequence[Tensor]) -> None:
        self._units, self._words = units, words
        self._files = files_of(model)
        self._sizes = {n for n in numbers_compared(model) if n > _RANK}
        self._known = {near for window in windows(model.config) for near in (window - 1, window, window + 1)}
        self._keywords, self._variables, self._states = (dict[str, None]() for _ in range(3))
        self._counted = dict[str, None]()
        self._values = set[int]()

    @property
    def noted(self) -> Noted:
        sizes = sorted(n for n in self._sizes if _LEAST <= n <= LONGEST and n not in self._known)
        sizes = [*sizes[:_MOST], *sizes[_MOST:][-_LARGEST:]]
        words = (tuple(found)[:_MOST] for found in (self._keywords, self._variables, self._states))
        return Noted(tuple(sizes), tuple(sorted(self._values)[:_MOST]), *words)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While something runs."""
        with Measuring(self._compared, self._compared_with), self._profiled(), self._environment():
            yield

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        """While a call may change whole numbers that modules keep: which do change, and what they are compared with."""
        before = dict(_numbers(model))
        for path in self._counted:
            self._watch(model, path)
        yield
        for name, number in _numbers(model):
            if before.get(name) != number:
                self._counted[name] = None

    def _watch(self, model: nn.Module, path: str) -> None:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        start = getattr(module, name, 0)

        def note(_: int, number: int) -> None:
            self._states |= {f"{path}={n}": None for n in (number - 1, number, number + 1) if n >= start}

        setattr(module, name, Size.of(start, note))

    def _is_own(self, frame: FrameType | None) -> bool:
        return frame is not None and frame.f_globals.get("__name__") in self._files

    def _compared(self, size: int, number: int) -> None:
        """Note how many tokens, or texts, it takes for a size to be some number."""
        self._sizes.add(number)
        self._sizes |= {-(-number * unit // size) for unit in self._units if size > unit and size % unit == 0}

    def _compared_with(self, value: Tensor, number: int) -> None:
        """Note what is compared with something that each text has but its words, or that is counted over all texts."""
        is_word = any(value.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in self._words)
        if not is_word and tuple(value.shape[:1]) in ((), self._units[:1]) and self._is_own(frame_of_code()):
            self._values.add(number)

    @contextmanager
    def _environment(self) -> Iterator[None]:
        kind = type(os.environ)
        plain = kind.__getitem__

        def asked(environ: Any, name: str) -> str:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in _OF_THE_ENVIRONMENT:
                frame = frame.f_back
            if self._is_own(frame) and isinstance(name, str):
                words = (word for word in frame.f_code.co_consts if isinstance(word, str) and word.isidentifier())
                self._variables |= {f"{name}={word}": None for word in ("1", *words) if word != name}
            return plain(environ, name)

        with patch.object(kind, "__getitem__", asked):
            yield

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """While functions of the modelling code get nameless arguments that note what is looked up in them."""
        before = sys.getprofile()

        def watch(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_flags & CO_VARKEYWORDS and self._is_own(frame):
                _set_local(frame, _keywords_of(frame.f_code), lambda given: _Looked(given, self._keywords))

        sys.setprofile(watch)
        try:
            yield
        finally:
            sys.setprofile(before)


def _numbers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """The whole numbers that are attributes of a model's modules, by path and name."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool) and name not in _OF_TORCH:
                yield (f"{path}.{name}" if path else name), int(value)


class _Looked(dict[str, Any]):
    """Nameless arguments, which note what is looked up among them."""

    def __init__(self, given: Any, seen: dict[str, None]) -> None:
        super().__init__(given)
        self._seen = seen

    def _note(self, name: Any) -> None:
        if isinstance(name, str):
            self._seen[name] = None

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._note(name)
        return super().pop(name, *default)


def _keywords_of(code: CodeType) -> str:
    """What a function calls its nameless arguments."""
    return code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)]


def _set_local(frame: FrameType, name: str, made: Callable[[Any], Any]) -> None:
    """Give a variable of a function that runs another value."""
    found = frame.f_locals
    if type(found.get(name)) is dict:
        found[name] = made(found[name])
        if isinstance(found, dict):  # up to Python 3.12 it is a copy
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
