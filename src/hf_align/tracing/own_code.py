"""The code that a model brings along: of its classes, and of the functions that stand beside them. What it names, and
which numbers it compares with, tells what it may look at in a call."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType

from torch import nn
from transformers import PretrainedConfig

from hf_align.tracing.fields import parts

LIBRARIES = ("torch.", "transformers.modeling_utils", "transformers.generation", "transformers.integrations")
_TOOLS = (*LIBRARIES, "transformers.utils", "transformers.configuration_utils", "transformers.distributed",
          f"{__name__.partition('.')[0]}.")  # fmt: skip
"""What modelling code is built with, and what holds a plain module here."""


_SENTENCE = 40
"""Characters of what is no single word."""


def kinds_of(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of a model's modules, but for those of torch."""
    return [k for k in {type(m): None for m in model.modules()} if not k.__module__.startswith("torch.")]


def methods(kind: type) -> Iterator[CodeType]:
    """The code of a class and of those that it is made from, but for what is no modelling code."""
    for base in kind.__mro__:
        if base is not object and not base.__module__.startswith(LIBRARIES):
            yield from (inspect.unwrap(method).__code__ for method in vars(base).values() if inspect.isfunction(method))


def files_of(model: nn.Module) -> frozenset[str]:
    """The names of the Python modules in which a model's code stands, and of those in the same folder from which these
    import."""
    bases = (base for kind in kinds_of(model) for base in kind.__mro__ if base is not object)
    found = {base.__module__ for base in bases if base.__module__ in sys.modules}
    for name in [*found]:
        folder = name.rpartition(".")[0]
        if "." in folder:  # a package of its own, as all modelling code is that comes from somewhere
            owners = {getattr(value, "__module__", None) for value in vars(sys.modules[name]).values()}
            found |= {o for o in owners if isinstance(o, str) and o.startswith(f"{folder}.") and o in sys.modules}
    return frozenset(name for name in found if not f"{name}.".startswith(_TOOLS))


def code_of(model: nn.Module) -> Iterator[CodeType]:
    """The code of a model's classes, and of the functions that stand beside them."""
    for kind in kinds_of(model):
        for base in kind.__mro__:
            if base is not object and not f"{base.__module__}.".startswith(_TOOLS):
                yield from (code for value in vars(base).values() for code in _code_in(value))
    for name in files_of(model):
        beside = [value for value in vars(sys.modules[name]).values() if inspect.isfunction(value)]
        yield from (code for value in beside if value.__module__ == name for code in _code_in(value))


def _code_in(function: object) -> Iterator[CodeType]:
    """The code of a function or property, and of what is defined in it."""
    if isinstance(function, CodeType):
        yield function
        for constant in function.co_consts:
            yield from _code_in(constant) if isinstance(constant, CodeType) else ()
        return
    if isinstance(function, property):
        function = function.fget
    elif isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    if inspect.isfunction(function):
        yield from _code_in(inspect.unwrap(function).__code__)


def words_of(model: nn.Module) -> frozenset[str]:
    """All names and words that stand in a model's code."""
    found = set[str]()
    for code in code_of(model):
        found |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    return frozenset(found)


def words_beside(model: nn.Module, part: str) -> frozenset[str]:
    """The words that stand in code which has a name with some part, but for documentation and that name itself."""
    codes = [code for code in code_of(model) if any(part in name for name in code.co_names)]
    words = (word for code in codes for word in code.co_consts if isinstance(word, str))
    return frozenset(word for word in words if part not in word and not word.isspace() and len(word) < _SENTENCE)


def numbers_compared(model: nn.Module) -> frozenset[int]:
    """The whole numbers that a model's code compares something with, or whose remainder or multiple decides: those that
    it names, and those that its modules and its config hold under a name that it compares with."""
    found, names = set[int](), set[str]()
    for code in code_of(model):
        for before, line in pairwise(dis.get_instructions(code)):
            if line.opname not in ("COMPARE_OP", "CONTAINS_OP") and line.argrepr not in ("%", "//"):
                continue
            if before.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")):
                numbers = before.argval if isinstance(before.argval, (tuple, frozenset)) else (before.argval,)
                found |= {n for n in numbers if type(n) is int}
            elif before.opname == "LOAD_ATTR":
                names.add(str(before.argval))
    config = getattr(model, "config", None)
    holders = (*model.modules(), *(parts(config) if isinstance(config, PretrainedConfig) else ()))
    held = (vars(holder).get(name) for holder in holders for name in names)
    return frozenset(found | {n for n in held if type(n) is int})
