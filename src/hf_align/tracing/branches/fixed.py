"""Whether a value in a function is the same in every call, as far as its code tells: made of what a model was built
with, and of constants."""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from hf_align.tracing.branches.changed import READS, Named, bindings
from hf_align.tracing.branches.set_by_methods import BUILDS, CALLED_BY_OTHERS, called

_LOOKED_UP_BY = ("getattr", "hasattr")
Function = Named | ast.Lambda


@dataclass(frozen=True)
class Known:
    """What the code of a model tells of its objects, in all of its files.

    Attributes:
        modules: the names of the classes whose objects are part of a model: what these hold stays as it was built.
        set_later: the attributes that are set, or computed, after that, and variables whose contents change.
        handed: functions with those of their arguments that are the same wherever they are called.
    """

    modules: frozenset[str]
    set_later: frozenset[str]
    handed: frozenset[tuple[str, str]] = frozenset()


def with_handed(known: Known, sources: Iterable[str]) -> Known:
    """What is known, and which arguments are the same wherever a function is called once a model is built: they are as
    long as no call of the files hands it anything else, and nobody else calls it."""
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = [node for node in nodes if isinstance(node, Named)]
    mentioned = {n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, (ast.Name, ast.Attribute))}
    made = [names for names in map(_by_name, nodes) if names is not None]
    # Of several functions of one name, nothing tells which is called.
    once = {name for name, count in Counter(n.name for n in named).items() if count == 1}
    known_by_name = {name for name in once if any(re.fullmatch(names, name) for names in made)}
    functions = {n.name: n for n in named if n.name in once & mentioned - CALLED_BY_OTHERS - known_by_name}
    later = frozenset(name for n in named if n.name not in BUILDS for name in called(n))
    found = frozenset((n.name, a.arg) for n in functions.values() for a in (*n.args.args, *n.args.kwonlyargs))
    while True:
        assumed = replace(known, handed=found)
        for tree in trees:
            calls = _Calls(tree, assumed, functions, later)
            calls.visit(tree)
            found -= calls.differing
        if found == assumed.handed:
            return assumed


def _by_name(node: ast.AST) -> str | None:
    """The names, as a regular expression, under which an object looks up a method of its own."""
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self" | "cls"), name, *_]):
            parts = name.values if isinstance(name, ast.JoinedStr) else [name]
            return "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".*" for p in parts)
    return None


def _is_static(function: Named) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "staticmethod" for n in function.decorator_list)


def _is_module(argument: ast.arg, known: Known) -> bool:
    """Whether an argument is declared to be a module."""
    match argument.annotation:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name == nn.Module.__name__ or name in known.modules
    return False


def _declared(tree: ast.Module) -> frozenset[str]:
    """The names of a file that functions set which do not own them."""
    return frozenset(n for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for n in node.names)


@dataclass(frozen=True)
class Scope:
    """What is known of the names in a function.

    Attributes:
        given: its arguments, but for the object whose method it is, and those that are the same in every call.
        bound: the other names -> what they are bound to; None where that is not a plain value.
        nodes: all that its code is made of.
    """

    given: frozenset[str] = frozenset()
    bound: dict[str, list[ast.expr | None]] = field(default_factory=dict)
    nodes: tuple[ast.AST, ...] = ()

    @classmethod
    def of(cls, function: Function, *, is_method: bool, fixed: frozenset[str] = frozenset()) -> Scope:
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args]
        others = [*arguments.kwonlyargs, *(a for a in (arguments.vararg, arguments.kwarg) if a is not None)]
        given = frozenset(a.arg for a in (*named[1 if is_method else 0 :], *others)) - fixed
        body = function.body if isinstance(function.body, list) else [function.body]
        scope = cls(given, nodes=tuple(node for statement in body for node in ast.walk(statement)))
        for node in scope.nodes:
            for target, value in bindings(node):
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        scope.bound.setdefault(name.id, []).append(value)
            if isinstance(node, (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)) and node.name is not None:
                scope.bound.setdefault(node.name, []).append(None)
        return scope


class InScopes(ast.NodeTransformer):
    """Goes through a file, and knows in which functions it is.

    Args:
        tree: the file.
    """

    def __init__(self, tree: ast.Module, known: Known) -> None:
        self._known, self._declared = known, _declared(tree)
        self._scopes: list[Scope] = []
        self._within: list[str] = []
        self._is_method = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self._is_method = self._is_method, ".".join([*self._within, node.name]) in self._known.modules
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        self._is_method = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return self._inside(node, Scope.of(node, is_method=False))

    def _function(self, node: Named) -> ast.AST:
        is_method = self._is_method and not _is_static(node)
        scope = Scope.of(node, is_method=is_method, fixed=self._fixed_arguments(node))
        self._within += [node.name, "<locals>"]
        self._inside(node, scope)
        del self._within[-2:]
        return node

    def _fixed_arguments(self, node: Named) -> frozenset[str]:
        """The arguments of a function that are the same wherever it is called."""
        return frozenset(argument for function, argument in self._known.handed if function == node.name)

    def _inside(self, node: Function, scope: Scope) -> ast.AST:
        before, self._is_method = self._is_method, False
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()
        self._is_method = before
        return node

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
                return name in READS
            case ast.Name(id=name, ctx=ast.Load()):
                return self._is_fixed_name(name, asked)
        return not isinstance(node, (ast.Call, ast.Await, ast.Yield, ast.YieldFrom))

    def _is_fixed_name(self, name: str, asked: frozenset[str]) -> bool:
        if name in self._declared or name in self._known.set_later:
            return False
        for scope in reversed(self._scopes):
            if name in scope.given:
                return False
            if name in scope.bound:
                values, rest = scope.bound[name], asked | {name}
                return all(v is not None and (name in asked or self.is_fixed(v, rest)) for v in values)
        return True


class _Calls(InScopes):
    """Looks at what functions are handed.

    Attributes:
        differing: functions with those of their arguments that may be others from call to call.
    """

    def __init__(
        self, tree: ast.Module, known: Known, functions: Mapping[str, Named], built_later: frozenset[str]
    ) -> None:
        super().__init__(tree, known)
        self._functions, self._built_later, self.differing = functions, built_later, set[tuple[str, str]]()

    def _fixed_arguments(self, node: Named) -> frozenset[str]:
        """Those, and modules that it cannot do without: what these hand on is as it was built."""
        required = node.args.args[: len(node.args.args) - len(node.args.defaults)]
        modules = frozenset(a.arg for a in required if _is_module(a, self._known))
        return super()._fixed_arguments(node) | modules

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node.func:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in self._functions:
                self._handed(self._functions[name], node, bound=isinstance(node.func, ast.Attribute))
                for part in (*node.args, *node.keywords):
                    self.visit(part)
            case _:
                self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._mentioned(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.visit(node.value)
        return self._mentioned(node, node.attr)

    def _mentioned(self, node: ast.AST, name: str) -> ast.AST:
        """Whoever gets hold of a function may hand it anything."""
        if name in self._functions:
            self.differing |= {(name, argument) for function, argument in self._known.handed if function == name}
        return node

    def _handed(self, function: Named, call: ast.Call, *, bound: bool) -> None:
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        names = names[1:] if bound and names[:1] in (["self"], ["cls"]) else names
        handed = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        is_spread = any(isinstance(value, ast.Starred) for value in call.args) or any(
            k.arg is None for k in call.keywords
        )
        for name, value in handed:
            if name is not None and not (self._builds() or self.is_fixed(value)):
                self.differing.add((function.name, name))
        if is_spread:
            self._mentioned(call, function.name)

    def _builds(self) -> bool:
        """Whether this is done when a module is built, and none of its kind is built in a call."""
        match self._within:
            case [*owner, name, "<locals>"] if name in BUILDS and len(self._scopes) == 1:
                return ".".join(owner) in self._known.modules - self._built_later
        return False


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
