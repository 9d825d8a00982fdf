"""Whether a value in a function is the same in every call, as far as its code tells: made of what a model was built
with, and of constants."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import torch

_BUILT_BY = ("__init__", "__post_init__")
_LOOKED_UP_BY = ("getattr", "hasattr")
_CHANGES = frozenset({*dir(list), *dir(dict), *dir(set)}.difference(dir(tuple), dir(frozenset), dir(MappingProxyType)))
"""Methods that change what they are called on."""
_READS = frozenset(dir(str) + dir(MappingProxyType) + ["to_dict"])
"""Methods that give the same of the same."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Known:
    """What the code of a model tells of its objects, in all of its files.

    Attributes:
        modules: the names of the classes whose objects are part of a model: what these hold stays as it was built.
        set_later: the attributes that are set, or computed, after that.
    """

    modules: frozenset[str]
    set_later: frozenset[str]


@lru_cache(maxsize=64)
def set_later(source: str) -> frozenset[str]:
    """The attributes that are set, or changed, by more than the functions that build their object."""
    found = set[str]()
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    for node in (node for f in functions if f.name not in _BUILT_BY for node in ast.walk(f)):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Subscript(value=ast.Attribute(attr=name), ctx=ast.Store()):
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr=method)) if method in _CHANGES:
                found.add(name)
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found.add(name)
    return frozenset(found)


def _declared(tree: ast.Module) -> frozenset[str]:
    """The names of a file that functions set which do not own them."""
    return frozenset(n for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for n in node.names)


@dataclass(frozen=True)
class _Scope:
    """What is known of the names in a function.

    Attributes:
        given: its arguments, but for the object whose method it is.
        bound: the other names -> what they are bound to; None where that is not a plain value.
    """

    given: frozenset[str] = frozenset()
    bound: dict[str, list[ast.expr | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Function, *, is_method: bool) -> _Scope:
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args]
        others = [*arguments.kwonlyargs, *(a for a in (arguments.vararg, arguments.kwarg) if a is not None)]
        scope = cls(frozenset(a.arg for a in (*named[1 if is_method else 0 :], *others)))
        body = function.body if isinstance(function.body, list) else [function.body]
        for statement in body:
            for node in ast.walk(statement):
                for target, value in _bindings(node):
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                            scope.bound.setdefault(name.id, []).append(value)
                if isinstance(node, (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)) and node.name is not None:
                    scope.bound.setdefault(node.name, []).append(None)
        return scope


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
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


class Scopes:
    """The functions around a place in a file, the innermost last.

    Args:
        tree: the file.
    """

    def __init__(self, tree: ast.Module, known: Known) -> None:
        self._known, self._declared = known, _declared(tree)
        self._scopes: list[_Scope] = []

    @contextmanager
    def inside(self, function: Function, *, is_method: bool) -> Iterator[None]:
        """While a function is looked at."""
        self._scopes.append(_Scope.of(function, is_method=is_method))
        yield
        self._scopes.pop()

    def is_fixed(self, value: ast.expr, asked: frozenset[str] = frozenset()) -> bool:
        """Whether a value is the same in every call.

        Args:
            asked: the names that it is part of what they are bound to.
        """
        return _is_of_model(value) or all(self._is_fixed_part(node, asked) for node in ast.walk(value))

    def _is_fixed_part(self, node: ast.AST, asked: frozenset[str]) -> bool:
        match node:
            case ast.Attribute(attr=name):
                return name not in self._known.set_later and name != "__dict__"
            case ast.Call(func=ast.Name(id=name), args=[_, ast.Constant(value=str(found)), *_]) if (
                name in _LOOKED_UP_BY
            ):
                return found not in self._known.set_later
            case ast.Call(func=ast.Name(id=name)):
                return hasattr(builtins, name) and name not in (*_LOOKED_UP_BY, "vars", "next", "globals", "locals")
            case ast.Call(func=ast.Attribute(attr=name)):
                return name in _READS
            case ast.Name(id=name, ctx=ast.Load()):
                return self._is_fixed_name(name, asked)
        return not isinstance(node, (ast.Call, ast.Await, ast.Yield, ast.YieldFrom))

    def _is_fixed_name(self, name: str, asked: frozenset[str]) -> bool:
        if name in self._declared:
            return False
        for scope in reversed(self._scopes):
            if name in scope.given:
                return False
            if name in scope.bound:
                values, rest = scope.bound[name], asked | {name}
                return all(v is not None and (name in asked or self.is_fixed(v, rest)) for v in values)
        return True


def _is_of_model(value: ast.expr) -> bool:
    """Whether it asks which kind of floating point numbers something holds, or where it lies."""
    match value:
        case ast.Compare(left=ast.Attribute(attr="dtype"), comparators=[kinds]):
            found = kinds.elts if isinstance(kinds, (ast.Tuple, ast.List, ast.Set)) else [kinds]
            return all(isinstance(each, ast.Attribute) and _is_floating(each.attr) for each in found)
        case ast.Compare(left=ast.Attribute(attr="type", value=ast.Attribute(attr="device"))):
            return True
        case ast.Compare(left=ast.Attribute(attr="device")):
            return True
    return False


def _is_floating(name: str) -> bool:
    kind = getattr(torch, name, None)
    return isinstance(kind, torch.dtype) and kind.is_floating_point
