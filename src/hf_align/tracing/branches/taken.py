"""Which way each branch of a model's own code goes in a call, and calls in which some go the other way."""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from hf_align.tracing.branches.rewritten import ASKED, Place, rewritten
from hf_align.tracing.own_code import files_of

_INSTALLED = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (
        sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], sysconfig.get_paths()["stdlib"],
        Path(str(transformers.__file__)).parent, Path(str(torch.__file__)).parent,
    )
)  # fmt: skip
"""Where the code of packages stands."""
_MOST = 256
"""Times that a branch is turned in a call: a loop may never end otherwise."""


@contextmanager
def branching(model: nn.Module, turned: Collection[Place] = ()) -> Iterator[dict[Place, frozenset[bool]]]:
    """While conditions in the code that a model brings along are noted as they are met: whether they held.

    Args:
        turned: those that say the opposite of what they find.
    """
    taken, times = dict[Place, frozenset[bool]](), Counter[Place]()

    def asked(at: tuple[str, int, int, bool, bool], value: Any) -> Any:
        place = Place(*at)
        holds = bool(value)
        if place in turned:
            times[place] += 1
            if times[place] <= (1 if place.repeats else _MOST):
                holds = not holds
                value = range(int(holds)) if isinstance(value, range) else holds
        taken[place] = taken.get(place, frozenset()) | {holds}
        return value

    functions = [(f, code) for module in brought(model) for f, code in _asking(module)]
    before = [(f, f.__code__) for f, _ in functions]
    for function, code in functions:
        function.__globals__[ASKED], function.__code__ = asked, code
    try:
        yield taken
    finally:
        for function, code in before:
            function.__code__ = code
            function.__globals__.pop(ASKED, None)


def brought(model: nn.Module) -> list[ModuleType]:
    """The Python modules that a model brings along: those with code of its own that belong to no installed package."""
    modules = [sys.modules[name] for name in sorted(files_of(model))]
    files = [(module, getattr(module, "__file__", None)) for module in modules]
    return [m for m, file in files if file is not None and not str(Path(file).resolve()).startswith(_INSTALLED)]


def _asking(module: ModuleType) -> Iterator[tuple[FunctionType, CodeType]]:
    """The functions of a module that have such conditions, and their rewritten code."""
    file = str(module.__file__)
    source = "".join(linecache.getlines(file, vars(module)))
    try:
        codes = rewritten(source, file)
    except (SyntaxError, ValueError):  # what was loaded stands there no more
        return
    for function in dict.fromkeys(_functions(module)):
        if (code := codes.get(function.__code__)) is not None:
            yield function, code


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module and of its classes."""
    for value in vars(module).values():
        inner = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else (value,)
        for found in inner:
            found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            found = inspect.unwrap(found) if callable(found) else found
            if isinstance(found, FunctionType) and found.__module__ == module.__name__:
                yield found
