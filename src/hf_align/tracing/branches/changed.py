"""What a file sets, or changes the contents of, after its objects are built: attributes, and names of variables.

Objects have several names. What is changed under one of them has changed under all: those that it was bound to, those
that it is part of, and those that a function was handed which changes it.
"""

from __future__ import annotations

import ast
import contextvars
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from functools import lru_cache
from types import MappingProxyType

from torch import Tensor

BUILT_BY = ("__init__", "__post_init__")
READS = frozenset(dir(str) + dir(MappingProxyType) + ["to_dict"])
"""Methods that give the same of the same."""
_KINDS = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict, contextvars.ContextVar)
_NAMED = frozenset(kind.__name__ for kind in _KINDS)
_LOOKS = frozenset().union(*map(dir, (tuple, frozenset, MappingProxyType, str)))
_IN_PLACE = frozenset(name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__"))
_CHANGES = frozenset(name for kind in _KINDS for name in dir(kind)) - _LOOKS | _IN_PLACE
"""Methods that change what they are called on."""
_CHANGING = frozenset(("setitem", "delitem", "iadd", "ior", "iconcat", "heappush", "heappop", "insort", "shuffle"))
"""Functions that change an argument."""
_HANDS_OUT = frozenset(("get", "setdefault", "values", "items", "__getitem__"))
"""Methods that hand out what an object holds."""
Named = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=64)
def set_later(source: str, but_by: frozenset[str] = frozenset()) -> frozenset[str]:
    """The attributes and variables that are set, or changed, by more than the functions that build their object.

    Args:
        but_by: the names of functions that do not count, either.
    """
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, Named) and n.name not in but_by.union(BUILT_BY)]
    parts = [(function, node) for function in functions for node in ast.walk(function)]
    found = set[str]().union(*(_set(node, tree) for _, node in parts))
    changed = [(function, value) for function, node in parts for value in _changed(node)]
    calls = [(function, node) for function, node in parts if isinstance(node, ast.Call)]
    changing = defaultdict[Named, set[str]](set)
    while changed:
        named = [(function, _names(value, function)) for function, value in changed]
        found.update(*(names for _, names in named))
        more = [(function, names & _arguments(function.args) - changing[function]) for function, names in named]
        for function, arguments in more:
            changing[function] |= arguments  # what is handed to such an argument is changed, too
        changed = [(caller, value) for caller, call in calls for function, arguments in more
                   if arguments and function.name == _called(call)
                   for value in _handed(call, function.args, arguments)]  # fmt: skip
    return frozenset(found)


def bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a statement binds, and to what."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            match target, node.value:
                case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                    yield from zip(targets, values, strict=True)
                case _:
                    yield target, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield node.target, node.value
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield node.target, node.iter
    elif isinstance(node, ast.AugAssign):
        yield node.target, None
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, None


def _set(node: ast.AST, tree: ast.Module) -> set[str]:
    """The attributes that a part of a function sets itself."""
    match node:
        case ast.Attribute(attr="__dict__") | ast.Name(id="vars"):
            return _held(tree)
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return {name}
        case ast.Call(func=ast.Name(id="setattr") | ast.Attribute(attr="__setattr__"), args=[*_, name, _]):
            return {str(name.value)} if isinstance(name, ast.Constant) else _held(tree)
    return set()


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """What a part of a function changes the contents of."""
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            yield value
        case ast.Call(func=ast.Attribute(value=ast.Name(id=kind)), args=[value, *_]) if kind in _NAMED:
            yield value  # `dict.update(value, …)`
        case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in _CHANGES:
            yield value
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=arguments) if name in _CHANGING:
            yield from arguments


def _names(value: ast.expr | None, function: Named, asked: frozenset[str] = frozenset()) -> set[str]:
    """The attributes and variables that a value is the contents of, wherever a function has it from."""
    match value:
        case ast.Attribute(value=owner, attr=name):
            return {name} | _names(owner, function, asked)
        case ast.Subscript(value=owner) | ast.Starred(value=owner):
            return _names(owner, function, asked)
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in _HANDS_OUT:
            return _names(owner, function, asked)
        case ast.IfExp(body=first, orelse=second):
            return _names(first, function, asked) | _names(second, function, asked)
        case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
            return set().union(*(_names(each, function, asked) for each in values))
        case ast.Name(id=name) if name not in asked and name not in ("self", "cls"):
            bound = [v for node in ast.walk(function) for target, v in bindings(node) if _binds(target, name)]
            return {name}.union(*(_names(each, function, asked | {name}) for each in bound))
    return set()


def _binds(target: ast.expr, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(target))


def _arguments(given: ast.arguments) -> set[str]:
    return {*_in_order(given), *(a.arg for a in given.kwonlyargs), *_open(given)}


def _in_order(given: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*given.posonlyargs, *given.args)]


def _open(given: ast.arguments) -> set[str]:
    """The names of what takes as many arguments as there are."""
    return {argument.arg for argument in (given.vararg, given.kwarg) if argument is not None}


def _handed(call: ast.Call, given: ast.arguments, names: set[str]) -> Iterator[ast.expr]:
    """What a call hands to some arguments of a function, or may: which is the first of a method depends on whether its
    object is one of them."""
    order, more = _in_order(given), int(isinstance(call.func, ast.Attribute))
    is_spread = any(isinstance(value, ast.Starred) for value in call.args) or any(k.arg is None for k in call.keywords)
    for number, value in enumerate(call.args):
        takes = {*order[number : number + 1 + more], *(_open(given) if number + more >= len(order) else ())}
        if is_spread or names & takes:
            yield value
    for keyword in call.keywords:
        takes = {keyword.arg or ""} if keyword.arg in _arguments(given) - _open(given) else _open(given)
        if is_spread or names & takes:
            yield keyword.value


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _held(tree: ast.Module) -> set[str]:
    """The attributes that classes of a file name, and those that the functions which build their objects set."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    built = [f for kind in classes for f in kind.body if isinstance(f, Named) and f.name in BUILT_BY]
    named = [target for kind in classes for statement in kind.body for target, _ in bindings(statement)]
    stored = (node for f in built for node in ast.walk(f) if isinstance(node, ast.Attribute))
    return {t.id for t in named if isinstance(t, ast.Name)} | {n.attr for n in stored if isinstance(n.ctx, ast.Store)}
