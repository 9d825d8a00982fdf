"""Which weights the code of a model names at all. What no traced call reads, another call may, unless no code can."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType, ModuleType

import torch
import transformers
from torch import nn

from hf_align.tracing.own_code import LIBRARIES, code_of, files_of, kinds_of

_ANY = "*"
"""In place of a name that only a run tells."""
_LISTING = {"__dict__", "__getattr__", "__getattribute__", "_modules", "_parameters", "attrgetter", "buffers",
            "children", "get_parameter", "get_submodule", "getmembers", "methodcaller", "modules", "named_buffers",
            "named_children", "named_modules", "named_parameters", "parameters", "state_dict", "vars"}  # fmt: skip
"""What hands on parts of a module without naming them."""
_UNTOLD = frozenset(("eval", "exec"))
_BEFORE_CALLS = "_init_weights"
"""The method that gives weights their first values."""
_BASE = "transformers.modeling_utils"
"""Whose code finds some parts, as the embedding, by names that are written there."""
_LIBRARY = re.compile(r"transformers\.(?!models\.(?!auto\.))")
"""Whose code finds parts by names that are written there, or in a class of the model: `base_model_prefix`."""
_FOLDERS = tuple(str(Path(str(package.__file__)).parent) for package in (torch, transformers))
"""Of code that models are built with, and wrapped in."""
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
"""Where packages lie."""


@dataclass(frozen=True)
class Names:
    """The attributes that some code reads.

    Attributes:
        own: of `self`, by the class in whose methods it is read; an entry for every class.
        other: of anything else.
        holders: the names of what it is read off.
        loaded: the Python modules that are imported when the code is.
    """

    own: Mapping[str, frozenset[str]]
    other: frozenset[str]
    holders: frozenset[str]
    loaded: frozenset[str]


def never_named(model: nn.Module, weights: Iterable[str]) -> tuple[str, ...]:
    """Those of some weights of a model that none of its code can read: on every way to such a weight there is an
    attribute that no code reads off the module that has it.

    Args:
        weights: names as of `named_parameters`.
    """
    weights = tuple(weights)
    if not weights:
        return ()
    found = _sources(model)
    files = [names for names in found.values() if names is not None]
    if len(files) < len(found) or not _all_stands_in(model, found, files):
        return ()
    names, modules = _together(files), dict(model.named_modules(remove_duplicate=False))
    known = dict(model.named_parameters(remove_duplicate=False))
    ways: dict[int, list[str]] = defaultdict(list)
    for name, weight in known.items():
        ways[id(weight)].append(name)
    return tuple(n for n in weights if n in known and not any(_is_named(w, modules, names) for w in ways[id(known[n])]))


def _sources(model: nn.Module) -> Mapping[str, Names | None]:
    """What the Python modules read in which a model's code stands, and those from which these import."""
    found, waiting = dict[str, Names | None](), [_BASE, *sorted(files_of(model))]
    while waiting:
        name = waiting.pop()
        if name in found or name not in sys.modules or (name != _BASE and _is_of_library(name)):
            continue
        homes = {_home(value) for value in vars(sys.modules[name]).values()} if name != _BASE else set()
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(_INSTALLED) and name != _BASE and not any(f"{home}.".startswith("torch.") for home in homes):
            continue  # it knows nothing of modules
        found[name] = names = _names_in(name)
        waiting += sorted(homes | (names.loaded if names is not None and name != _BASE else frozenset()))
    return found


def _home(value: object) -> str:
    """The Python module that something is, or comes from."""
    if isinstance(value, ModuleType):
        return value.__name__
    return str(value.__module__) if isinstance(value, (FunctionType, type)) else ""


def _all_stands_in(model: nn.Module, sources: Collection[str], files: Sequence[Names]) -> bool:
    """Whether the code of a model was all looked at: of its classes, their methods, and functions that modules hold."""
    classes = {kind for names in files for kind in names.own}
    bases = [base for kind in kinds_of(model) for base in kind.__mro__ if not _is_of_library(base.__module__)]
    held = (value for module in model.modules() for value in vars(module).values())
    functions = (value for value in held if isinstance(value, (FunctionType, MethodType)))
    codes = (*code_of(model), *(inspect.unwrap(function).__code__ for function in functions))
    known = {getattr(sys.modules[name], "__file__", None) for name in sources}
    return all(f"{base.__module__}.{base.__qualname__}" in classes for base in bases) and all(
        code.co_filename in known or code.co_filename.startswith(_FOLDERS) for code in codes
    )


def _is_of_library(module: str) -> bool:
    name = f"{module}."
    return (
        name.startswith(LIBRARIES)
        or _LIBRARY.match(name) is not None
        or module.partition(".")[0] in sys.stdlib_module_names
    )


def _together(files: Sequence[Names]) -> Names:
    """What several files read; a method that is read off its class may be given anything."""
    holders = frozenset[str]().union(*(names.holders for names in files))
    own = {kind: read for names in files for kind, read in names.own.items()}
    lent = (read for kind, read in own.items() if kind.rpartition(".")[2] in holders)
    other = frozenset[str]().union(*(names.other for names in files), *lent)
    return Names(own, other, holders, frozenset[str]().union(*(names.loaded for names in files)))


def _is_named(weight: str, modules: Mapping[str, nn.Module], names: Names) -> bool:
    """Whether code may go this way to a weight."""
    steps = weight.split(".")
    return all(_reads(modules[".".join(steps[:i])], step, names) for i, step in enumerate(steps))


def _reads(module: nn.Module, attribute: str, names: Names) -> bool:
    """Whether some code may read an attribute of a module. That of a library may read what it has made."""
    kind, wanted = type(module), {attribute, _ANY}
    if _is_of_library(kind.__module__) or wanted & names.other:
        return True
    return any(wanted & names.own.get(f"{base.__module__}.{base.__qualname__}", frozenset()) for base in kind.__mro__)


@cache
def _names_in(module: str) -> Names | None:
    """The attributes that a Python module reads; None where there is no source to look at."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError):
        return None
    own, other, holders = defaultdict[str, set[str]](set), set[str](), set[str]()
    of_library = _is_of_library(module)
    for kind, holder, name in _read_in(tree, "", ""):
        called = holder.id if isinstance(holder, ast.Name) else ""
        if name == _ANY and of_library:
            continue
        if not name:
            own[f"{module}.{kind}"] |= set()
        elif kind and called == "self":
            own[f"{module}.{kind}"].add(name)
        else:
            other.add(name)
            holders.add(called)
    package = getattr(sys.modules[module], "__package__", None) or module.rpartition(".")[0]
    imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    loaded = frozenset(name for node in imports for name in _imported(node, package))
    return Names({kind: frozenset(names) for kind, names in own.items()}, frozenset(other), frozenset(holders), loaded)


def _read_in(node: ast.AST, scope: str, kind: str) -> Iterator[tuple[str, ast.expr | None, str]]:
    """What some code reads: the class that it stands in, what it reads from, and the attribute.

    Args:
        scope: the beginning of the names of what is defined there.
        kind: the class.
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.name == _BEFORE_CALLS:
            return
        scope += f"{node.name}.<locals>."
        yield from [("", None, _ANY)] if _hands_to_others(node) else []
    elif isinstance(node, ast.ClassDef):
        kind, scope = f"{scope}{node.name}", f"{scope}{node.name}."
        yield kind, None, ""
        yield from (("", None, word) for word in _words(node))
    elif (module := _whose_weights_are_only_asked(node)) is not None:
        yield from _read_in(module, scope, kind)
        return
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield kind, node.value, _ANY if node.attr in _LISTING else node.attr
    elif isinstance(node, ast.MatchClass):
        yield from (("", None, name) for name in node.kwd_attrs)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from ((kind, holder, name) for holder, name in _called(node.func.id, node.args))
    for inner in ast.iter_child_nodes(node):
        yield from _read_in(inner, scope, kind)


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """What is imported, as far as it is Python modules.

    Args:
        package: in which the code stands; if it is not known, what lies in it is called by what no module is called.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _hands_to_others(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function imports what may read anything: not what is only asked whether something is of its kind, nor
    what is not installed."""
    nodes = list(ast.walk(function))
    asked = (n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "isinstance")
    kinds = {id(inner) for call in asked for kind in call.args[1:] for inner in ast.walk(kind)}
    used = {n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in kinds}
    used |= {name for n in nodes if isinstance(n, ast.Global) for name in n.names}
    imports = [n for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom))]
    needed = [n for n in imports if any((alias.asname or alias.name).partition(".")[0] in used for alias in n.names)]
    modules = [name for n in needed for name in _imported(n, "")]
    return any(_is_there(name) and not _is_of_library(name) for name in modules)


def _is_there(module: str) -> bool:
    """Whether the package that a Python module is in is installed; one without a name is that of the code itself."""
    package = module.partition(".")[0]
    return not package or package in sys.modules or importlib.util.find_spec(package) is not None


def _called(function: str, arguments: list[ast.expr]) -> Iterator[tuple[ast.expr | None, str]]:
    """What a call of a function without an owner may read of what it is given."""
    if function in _LISTING:
        yield arguments[0] if arguments else None, _ANY
    elif function in _UNTOLD:
        yield None, _ANY
    elif function == "getattr" and not _is_config(arguments[0]):
        name = arguments[1]
        yield arguments[0], str(name.value) if isinstance(name, ast.Constant) else _ANY


def _words(kind: ast.ClassDef) -> Iterator[str]:
    """The words that a class is given: some are names of its parts."""
    values = (line.value for line in kind.body if isinstance(line, (ast.Assign, ast.AnnAssign)))
    yield from (v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str))


def _whose_weights_are_only_asked(node: ast.AST) -> ast.expr | None:
    """The module in `next(module.parameters()).dtype`, and in a loop that freezes its weights: neither reads any."""
    match node:
        case ast.Attribute(
            value=ast.Call(
                func=ast.Name(id="next"), args=[ast.Call(func=ast.Attribute(value=module, attr="parameters"))]
            ),
            attr="dtype" | "device",
        ):
            return module
        case ast.For(
            iter=ast.Call(func=ast.Attribute(value=module, attr="parameters")),
            body=[ast.Assign(targets=[ast.Attribute(attr="requires_grad")], value=ast.Constant())],
        ):
            return module
    return None


def _is_config(value: ast.expr) -> bool:
    """Whether something is a config by what it is called: it holds no weights."""
    called = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
    return called.endswith("config")
