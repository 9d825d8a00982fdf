"""Arguments of `forward` that are words or numbers: which values of one matter is seen by watching what it is compared
with, and where it is looked up, or stands in the code."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from functools import partial
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from hf_align.tracing.build import quiet
from hf_align.tracing.example import Example

Scalar = str | int | float | Enum
_MOST = 8
"""Values of one argument that are tried."""
SHARES = (0.5, 0.3)
"""Shares of something that are tried; from one alone nobody would see that another cuts in another place."""
_KINDS = (str, int, float)
_LIST = re.compile(r"(?:list|tuple|sequence)\[(int|float|bool|str)\b", re.IGNORECASE)
_SEVERAL = re.compile(r"(?:list|tuple|sequence)\[\w*\]", re.IGNORECASE)
_WORD, _NO_KIND = re.compile(r"\w+"), {"None", "NoneType", "Optional", "Union", "typing"}
_LISTS: Mapping[str, tuple[list[Any], ...]] = {
    "int": ([0], [1], [0, 1, 2, 3]),
    "float": ([1.0], [0.5, 0.5]),
    "bool": ([True], [True, True]),
    "str": ([""],),
}
"""Lists that are tried whatever the code looks for, by what they hold."""
_UNKNOWN: Mapping[type, tuple[Scalar, ...]] = {str: ("?",), int: (), float: ()}
"""What is watched besides: a word that says nothing may be taken for one that is not given."""
_OF_WORDS = ("startswith", "endswith", "__contains__")
_OF_PARTS = ("lower", "upper", "casefold", "capitalize", "title", "swapcase", "strip", "lstrip", "rstrip", "replace",
             "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition", "__getitem__")  # fmt: skip
"""What is watched of a word as well: the same in other letters, and parts of it."""
_FUNCTIONS = ("relu", "exp", "sigmoid", "abs")
"""Functions of a package that are tried where a word may be looked up in it: they keep different things."""
_STEPS = 2
"""From what a line of code knows by name to a table in which it looks something up: `self.config.table`."""


def scalars(parameter: inspect.Parameter, call: Callable[..., Any], base: Example) -> Iterator[Scalar]:
    """The values that modelling code compares an optional argument with, or has tables for, less what it is by default;
    of a number, those next to it, too, and one farther away; the other members of an enumeration. An argument of which
    nothing is said may be of any kind.

    Args:
        call: runs the model.
    """
    if isinstance(parameter.default, Enum):
        yield from [member for member in type(parameter.default) if member is not parameter.default][:_MOST]
        return
    said = [k for k in _KINDS if may_be(parameter, k)][:1]
    for kind in said or (_KINDS if is_unsaid(parameter) else ()):
        start = parameter.default if type(parameter.default) is kind else kind()
        starts = dict.fromkeys((start, *_UNKNOWN[kind]))
        seen = [found for first in starts for found in _seen_by(call, base, parameter.name, partial(_watched, first))]
        below = [kind(found - 1) for found in seen if not isinstance(found, str)]
        if said and kind is not str:  # it may only be computed with; and whether there is one may be all that matters
            seen += [0, start] if parameter.default is None else [start]
        more = [kind(v) for found in seen for v in ((found,) if isinstance(found, str) else (found, found + 1))]
        larger = _farther(kind, parameter.default) if said or kind is float else []
        yield from [value for value in dict.fromkeys((*larger, *more, *below)) if value != parameter.default][:_MOST]


def _farther(kind: type, default: Any) -> list[Scalar]:
    """Twice as often; of what may be a share of something half of it, and shares; any number instead of no limit."""
    if kind is int:
        return [] if default is None else [2 * default]
    shares = SHARES if kind is float else ()
    half: list[Scalar] = [default / 2 if math.isfinite(default) else 1.0] if type(default) is float else []
    return [*half, *shares]


def lists(parameter: inspect.Parameter, call: Callable[..., Any], base: Example) -> Iterator[Any]:
    """Lists for an argument that takes some, or of which nothing is said: short ones, and one of each value that
    modelling code looks for in it, or compares its first entry with. Of numbers that it has by default, as many
    others."""
    default = parameter.default
    if isinstance(default, (list, tuple)) and default and all(type(value) in (int, float) for value in default):
        yield type(default)(value + 2 * place + 1 for place, value in enumerate(default))
    said = _LIST.search(str(parameter.annotation))
    if said is None and not is_unsaid(parameter):
        return
    for plain in _LISTS.values() if said is None else [_LISTS[said[1].lower()]]:
        start = type(plain[0][0])()
        seen = [] if type(start) is bool else _seen_by(call, base, parameter.name, partial(_WatchedList, start))
        found = [value for value in dict.fromkeys(seen) if type(value) is type(start)]
        yield from (*(plain if said else ()), *([value] for value in found[:_MOST]))


def is_unsaid(parameter: inspect.Parameter) -> bool:
    """Whether nothing tells of what kind an argument is."""
    is_open = parameter.default is None or isinstance(parameter.default, (list, tuple))
    return parameter.annotation is parameter.empty and is_open


def _seen_by(call: Callable[..., Any], base: Example, name: str, watched: Callable[[list[Any]], Any]) -> list[Any]:
    """What a value is compared with in a call: the model may refuse it, but has compared it before."""
    seen = list[Any]()
    runs(call, **base.arguments, **{name: watched(seen)})
    return seen


def runs(call: Callable[..., Any], **arguments: Any) -> bool:
    """Whether a model takes some arguments."""
    try:
        with torch.no_grad(), quiet():
            call(**arguments)
    except Exception:  # models refuse arguments in as many ways as there are models
        return False
    return True


class _WatchedList(list[Any]):
    """A list of one value, which notes what is looked for in it."""

    def __init__(self, value: Scalar, seen: list[Any]) -> None:
        super().__init__([_watched(value, seen)])
        self._seen = seen

    def __contains__(self, value: object) -> bool:
        self._seen.append(value)
        return super().__contains__(value)


def constants_of(code: CodeType) -> Iterator[object]:
    """What a function's code names, and the code of what is defined in it, such as a comprehension."""
    for constant in code.co_consts:
        yield from constants_of(constant) if isinstance(constant, CodeType) else (constant,)


def may_be(parameter: inspect.Parameter, kind: type) -> bool:
    """Whether an argument is of a kind by default, or said to be."""
    return type(parameter.default) is kind or is_said(parameter, kind)


def is_said(parameter: inspect.Parameter, kind: type) -> bool:
    """Whether an argument that is not given by default is said to be of a kind, or one or several of it, and of no
    other."""
    said = _SEVERAL.sub("", str(parameter.annotation))
    return parameter.default is None and {*_WORD.findall(said)} - _NO_KIND == {kind.__name__}


def _watched(value: Scalar, seen: list[Scalar]) -> Scalar:
    """The value, which notes what it is compared with."""
    kind = type(value)

    def noting(name: str) -> Callable[[Any, Any], Any]:
        plain = getattr(kind, name)

        def compare(self: Any, other: Any, *beside: Any) -> Any:
            if isinstance(other, str) is (kind is str):
                seen.append(other)
            return plain(self, other, *beside)

        return compare

    def handing(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def hand(self: Any, *asked: Any) -> Any:
            found = plain(self, *asked)
            return _watched(found, seen) if type(found) is str else type(found)(_watched(part, seen) for part in found)

        return hand

    def truth(self: Any) -> bool:
        if kind is not str:
            seen.append(0)
        return bool(kind(self))

    asked = [*(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge")), *(_OF_WORDS if kind is str else ())]
    methods = {name: noting(name) for name in asked} | {n: handing(n) for n in (_OF_PARTS if kind is str else ())}

    def hashed(self: Any) -> int:
        seen.extend(key for key in looked_up(sys._getframe(1)) if type(key) is kind)
        return kind.__hash__(self)

    made: Scalar = type(kind.__name__, (kind,), {**methods, "__bool__": truth, "__hash__": hashed})(value)
    return made


def looked_up(frame: FrameType) -> Iterator[Any]:
    """The keys of all tables and sets that a line of code may look something up in: those that its function knows by
    name, writes out, or finds in attributes that it names. None of them is asked for its attributes by its own code."""
    code, names = frame.f_code, frame.f_code.co_names
    reached: list[Any] = [*(frame.f_globals[n] for n in names if n in frame.f_globals), *frame.f_locals.values()]
    known = [*reached]
    for _ in range(_STEPS):
        reached = [found for value in reached for name in names for found in _attribute(value, name)]
        known = [*reached, *known]  # what is far away is none of the function's own arguments
    written = [*constants_of(code)]
    for table in (*written, *known):
        if isinstance(table, (Mapping, Set)):
            yield from table
    for keys in written:  # a table that is written out has its keys in one
        if isinstance(keys, tuple):
            yield from keys
    for package in known:
        if isinstance(package, ModuleType):
            yield from (name for name in _FUNCTIONS if hasattr(package, name))


def _attribute(value: Any, name: str) -> Iterable[Any]:
    found = inspect.getattr_static(value, name, None)
    parts = vars(value).get("_modules", {}) if hasattr(value, "__dict__") else {}
    return [part for part in (found, parts.get(name)) if part is not None]
