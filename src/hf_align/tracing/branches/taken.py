"""Which way each branch of a model's own code goes in a call, and calls in which some go the other way."""

from __future__ import annotations

import dis
import gc
import io
import linecache
import site
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn

from hf_align.tracing.branches.changed import set_later
from hf_align.tracing.branches.fixed import Known, with_handed
from hf_align.tracing.branches.rewritten import ASKED, Place, Taken, rewritten
from hf_align.tracing.own_code import files_of

INSTALLED = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (
        sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], sysconfig.get_paths()["stdlib"],
        *site.getsitepackages(), site.getusersitepackages(),
        str(Path(str(transformers.__file__)).parent), str(Path(str(torch.__file__)).parent),
    )
)  # fmt: skip
"""Where the code of packages stands."""
_WRITTEN = "_torchdynamo_inline"
"""Where a function that torch has compiled keeps the one that it was made from."""
_MOST = 10_000
"""Times that one condition is met in a turned call, which may not end otherwise."""
NOTED = ("assertion", "reached")
"""Kinds of conditions that are not turned, only noted."""
Functions = list[tuple[FunctionType, CodeType]]
_FOUND: MutableMapping[nn.Module, Functions] = WeakKeyDictionary()
"""The functions of a model's own code, and what they are rewritten to."""


class Turn(NamedTuple):
    """A condition that says the opposite of what it finds.

    Attributes:
        sites: the modules for which it does; None for all.
    """

    place: Place
    sites: frozenset[str] | None


@contextmanager
def branching(model: nn.Module, turns: Collection[Turn] = ()) -> Iterator[Taken]:
    """While conditions in the code that a model brings along are noted as they are met.

    Args:
        turns: those that say the opposite of what they find. What the model leaves behind in its code then, as in a
            global name or a cache, is taken back.

    Raises:
        RuntimeError: a turned call would not end, or ends the whole process.
    """
    functions = _functions(model)
    if not functions:
        yield {}
        return
    asking, own = _Asking(model, turns), brought(model)
    before = [(f, f.__code__) for f, _ in functions]
    for function, code in functions:
        function.__globals__[ASKED], function.__code__ = asking.asked, code
    try:
        with _as_written(own), _without_traces(own) if turns else nullcontext():
            yield asking.taken
    except SystemExit as error:
        raise RuntimeError("ends the process") from error
    finally:
        for function, code in before:  # what is kept of a call may go on to ask
            function.__globals__[ASKED], function.__code__ = _plain, code


def left_open(taken: Taken) -> bool:
    """Whether a condition that was met may go another way than it went wherever it was met."""
    ways = defaultdict[Place, set[bool]](set)
    for (place, _), held in taken.items():
        ways[place] |= held
    return any(place.kind not in NOTED and place.leaves_open(held) for place, held in ways.items())


def noted(model: nn.Module) -> AbstractContextManager[object]:
    """`branching`, unless somebody notes the conditions of the model already."""
    return branching(model) if _asking(model) is None else nullcontext()


def _asking(model: nn.Module) -> _Asking | None:
    """What the conditions of a model's own code are noted in."""
    asked = [function.__globals__.get(ASKED) for function, _ in _functions(model)[:1]]
    found = getattr(asked[0], "__self__", None) if asked else None
    return found if isinstance(found, _Asking) else None


@contextmanager
def in_runs(model: nn.Module) -> Iterator[Taken]:
    """While runs are made that a call is held against, in the block of its conditions.

    Yields:
        in the end, the conditions that runs alone have met; all others are noted as the call's own.
    """
    asking = _asking(model)
    if asking is None:
        yield {}
        return
    own, met = asking.taken, Taken()
    asking.taken = met
    try:
        yield met
    finally:
        asking.taken, places = own, {place for place, _ in own}
        for at in [at for at in met if at[0] in places]:
            own[at] = own.get(at, frozenset()) | met.pop(at)


def _plain(at: object, value: Any) -> Any:
    return value


class _Asking:
    """What is asked in one call.

    Attributes:
        taken: the conditions that it has met.
    """

    def __init__(self, model: nn.Module, turns: Collection[Turn]) -> None:
        self.taken = Taken()
        self._model, self._turns = model, {turn.place: turn.sites for turn in turns}
        self._times, self._turned_last = Counter[Place](), set[Place]()

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(module): path for path, module in self._model.named_modules()}

    def asked(self, at: tuple[Any, ...], value: Any) -> Any:
        """What a condition says."""
        place = Place(*at)
        if place.kind == "assertion":
            if not self._turns:
                return value
            self.taken |= {} if value else {(place, self._site(sys._getframe(1))): frozenset((False,))}
            return True
        if place.kind == "value" and type(value) is not bool:
            return value
        holds, site = bool(value), self._site(sys._getframe(1))
        self._times[place] += 1
        if self._turns and self._times[place] > _MOST:
            raise RuntimeError(f"line {place.line} of {place.file} is met without end")
        if self._is_turned(place, site):
            holds = not holds
            value = range(int(holds)) if isinstance(value, range) else holds
        self.taken[place, site] = self.taken.get((place, site), frozenset()) | {holds}
        return value

    def _is_turned(self, place: Place, site: str) -> bool:
        """Whether a condition is turned here; one that keeps a loop running, every other time."""
        if place not in self._turns:
            return False
        sites = self._turns[place]
        found = (sites is None or site in sites) and not (place.kind == "loop" and place in self._turned_last)
        (self._turned_last.add if found else self._turned_last.discard)(place)
        return found

    def _site(self, frame: FrameType | None) -> str:
        """The module that asks, by its path, and the line in which it calls what asks for it."""
        line = ""
        while frame is not None:
            path = self._paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return f"{path}{line}"
            frame = frame.f_back
            line = f":{frame.f_lineno}" if frame is not None else ""
        return ""


@contextmanager
def _as_written(modules: Collection[ModuleType]) -> Iterator[None]:
    """While what the code of a model has torch compile runs as it is written."""
    compiled = [
        (owner, name, kept, function)
        for owner in _owners(modules)
        for name, kept in vars(owner).items()
        if isinstance(function := getattr(kept, "__func__", kept), torch.jit.ScriptFunction)
        and hasattr(function, _WRITTEN)
    ]
    for owner, name, _, function in compiled:
        written = getattr(function, _WRITTEN)
        setattr(owner, name, staticmethod(written) if isinstance(owner, type) else written)
    try:
        yield
    finally:
        for owner, name, kept, _ in compiled:
            setattr(owner, name, kept)


@contextmanager
def _without_traces(modules: Collection[ModuleType]) -> Iterator[None]:
    """Take back what a call leaves in the code of a model, and what it says; nobody is asked to debug it."""
    before = [(owner, dict(vars(owner))) for owner in _owners(modules)]
    try:
        with redirect_stdout(io.StringIO()), patch.object(sys, "breakpointhook", lambda *_, **__: None):
            yield
    finally:
        for owner, values in before:
            for name in [n for n, value in vars(owner).items() if n not in values or value is not values[n]]:
                if name not in values:
                    delattr(owner, name)
                elif not name.startswith("__"):
                    setattr(owner, name, values[name])
            for value in values.values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _owners(modules: Collection[ModuleType]) -> list[Any]:
    """The Python modules and their classes."""
    return [*modules, *(kind for module in modules for kind in _classes(module))]


def _classes(module: ModuleType) -> list[type]:
    return [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]


def brought(model: nn.Module) -> list[ModuleType]:
    """The Python modules that a model brings along: those with code of its own that belong to no installed package."""
    modules = [sys.modules[name] for name in sorted(files_of(model))]
    files = [(module, getattr(module, "__file__", None)) for module in modules]
    return [m for m, file in files if file is not None and not str(Path(file).resolve()).startswith(INSTALLED)]


def sources_of(modules: Collection[ModuleType]) -> dict[str, str]:
    """The files of some Python modules, and what stands in them."""
    return {str(module.__file__): "".join(linecache.getlines(str(module.__file__))) for module in modules}


def refuses(model: nn.Module, error: BaseException, taken: Taken) -> bool:
    """Whether a call fails because the code of a model says so, by an error that it raises or by an assertion."""
    files = {str(module.__file__) for module in brought(model)}
    return any(place.kind == "assertion" for place, _ in taken) or any(_is_raised(e, files) for e in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_raised(error: BaseException, files: Collection[str]) -> bool:
    """Whether an error comes from a `raise` in one of some files."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or at.tb_frame.f_code.co_filename not in files:
        return False
    return dis.opname[at.tb_frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"


def _functions(model: nn.Module) -> Functions:
    """The functions of a model's own code that have such conditions, wherever they are kept, and their new code."""
    if model not in _FOUND:
        modules = brought(model)
        codes = _codes(modules) if modules else {}
        files = {code.co_filename for code in codes}
        functions = [f for f in (gc.get_objects() if codes else ()) if type(f) is FunctionType]
        own = [f for f in functions if f.__code__.co_filename in files]
        _FOUND[model] = [(f, codes[f.__code__]) for f in own if f.__code__ in codes]
    return _FOUND[model]


def _codes(modules: Collection[ModuleType]) -> dict[CodeType, CodeType]:
    sources = sources_of(modules)
    classes = [kind for module in modules for kind in _classes(module)]
    computed = {n for kind in classes for n, v in vars(kind).items() if hasattr(v, "__get__") and not callable(v)}
    names = frozenset(kind.__qualname__ for kind in classes if issubclass(kind, nn.Module))
    found = dict[CodeType, CodeType]()
    try:
        known = Known(names, frozenset(computed).union(*map(set_later, sources.values())))
        known = with_handed(known, sources.values())
        for file, source in sources.items():
            found |= rewritten(source, file, known)
    except (SyntaxError, ValueError):  # what was loaded stands there no more
        return {}
    return found
