"""The source of a Python module, in which a function is asked for each condition that a call may decide.

A condition is what `if`, `while`, `… if … else …` and comprehensions test, what stands before `and` and `or`, a case of
plain values, whether a `range` has a number, and whether a `try` fails. One that depends on nothing but how the model
was built goes the same way in every call, and stays as it is.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from types import CodeType, MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

ASKED, _MATCHED = "__hf_align_asked__", "__hf_align_matched__"
"""What the function is called in the rewritten code, and what a case is compared with."""
_BUILT_BY = ("__init__", "__post_init__")
_LOOKED_UP_BY = ("getattr", "hasattr")
_CHANGES = frozenset({*dir(list), *dir(dict), *dir(set)}.difference(dir(tuple), dir(frozenset), dir(MappingProxyType)))
"""Methods that change what they are called on."""
_READS = frozenset(dir(str) + dir(MappingProxyType) + ["to_dict"])
"""Methods that give the same of the same."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Kind = Literal["test", "loop", "value", "assertion"]


class Place(NamedTuple):
    """A condition in a file.

    Attributes:
        number: among those of the file.
        kind: a loop goes on as long as it holds; a value may be no truth at all; an assertion is no branch.
    """

    file: str
    line: int
    number: int
    kind: Kind


Taken = Mapping[tuple[Place, str], frozenset[bool]]
"""Conditions that a call has met, each with the module that asked, and whether they held."""


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
def rewritten(source: str, file: str, known: Known) -> dict[CodeType, CodeType]:
    """The code of each function that has such conditions -> the same with all of them asked for."""
    plain, asking = (ast.parse(source) for _ in range(2))
    _Asking(file, known, _declared(plain)).visit(asking)
    before, after = (
        _codes(compile(tree, file, "exec", dont_inherit=True)) for tree in (plain, ast.fix_missing_locations(asking))
    )
    return {old: new for old, new in zip(before, after, strict=True) if old != new}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _declared(tree: ast.Module) -> frozenset[str]:
    """The names of a file that functions set which do not own them."""
    return frozenset(n for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for n in node.names)


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


def _equal(pattern: ast.pattern) -> ast.expr | None:
    """The comparison that a pattern of plain values stands for; None for any other."""
    matched = ast.Name(_MATCHED, ast.Load())
    match pattern:
        case ast.MatchValue(value=value):
            return ast.Compare(matched, [ast.Eq()], [value])
        case ast.MatchSingleton(value=single):
            return ast.Compare(matched, [ast.Is()], [ast.Constant(single)])
        case ast.MatchOr(patterns=patterns):
            found = [_equal(each) for each in patterns]
            known = [each for each in found if each is not None]
            return ast.BoolOp(ast.Or(), list[ast.expr](known)) if len(known) == len(found) else None
    return None


class _Asking(ast.NodeTransformer):
    """Puts a call around each condition that may differ from call to call."""

    def __init__(self, file: str, known: Known, declared: frozenset[str]) -> None:
        self._file, self._known, self._declared = file, known, declared
        self._scopes: list[_Scope] = []
        self._within: list[str] = []
        self._is_method, self._number = False, 0

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

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        static = any(isinstance(n, ast.Name) and n.id == "staticmethod" for n in node.decorator_list)
        self._within += [node.name, "<locals>"]
        self._inside(node, is_method=self._is_method and not static)
        del self._within[-2:]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return self._inside(node, is_method=False)

    def _inside(self, node: Function, *, is_method: bool) -> ast.AST:
        before, self._is_method = self._is_method, False
        self._scopes.append(_Scope.of(node, is_method=is_method))
        self.generic_visit(node)
        self._scopes.pop()
        self._is_method = before
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """No branch; a turned call goes on against it."""
        self.generic_visit(node)
        node.test = self._asked(node.test, "assertion")
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._deciding(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._deciding(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._deciding(node, "loop")

    def _deciding(self, node: ast.If | ast.IfExp | ast.While, kind: Kind = "test") -> ast.AST:
        test, node.test = self._condition(node.test, kind), ast.Constant(True)
        self.generic_visit(node)
        node.test = test
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        tests, node.ifs = [self._condition(test) for test in node.ifs], []
        self._looping(node)
        node.ifs = tests
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._looping(node)

    def _looping(self, node: ast.For | ast.comprehension) -> ast.AST:
        """Whether a loop that counts is run at all."""
        match node.iter:
            case ast.Call(func=ast.Name(id="range")):
                counts = not self._is_fixed(node.iter)
            case _:
                counts = False
        self.generic_visit(node)
        node.iter = self._asked(node.iter) if counts else node.iter
        return node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        """A case of plain values as a comparison."""
        is_fixed = self._is_fixed(node.subject)
        guards = [None if case.guard is None else self._condition(case.guard) for case in node.cases]
        for case in node.cases:
            case.guard = None
        self.generic_visit(node)
        for case, guard in zip(node.cases, guards, strict=True):
            equal = None if is_fixed else _equal(case.pattern)
            asked = [] if equal is None else [self._asked(ast.copy_location(equal, case.pattern))]
            if equal is not None:
                case.pattern = ast.MatchAs(name=_MATCHED)
            tests = [*asked, *([] if guard is None else [guard])]
            case.guard = ast.BoolOp(ast.And(), tests) if len(tests) > 1 else next(iter(tests), None)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """What follows an error that no call ends in: the error is raised at once where that is asked for."""
        self.generic_visit(node)
        raised = list[ast.stmt]()
        for handler in node.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            error = ast.Raise(kinds[0] or ast.Name("Exception", ast.Load()))
            never = ast.copy_location(ast.Constant(False), handler)
            raised.append(ast.If(self._asked(never), [error], []))
        node.body = [*raised, *node.body]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        *first, last = node.values
        is_fixed = self._is_fixed(last)
        visited: ast.expr = self.visit(last)
        node.values = [*map(self._condition, first), visited if is_fixed else self._asked(visited, "value")]
        return node

    def _condition(self, test: ast.expr, kind: Kind = "test") -> ast.expr:
        """A condition that is asked for, and so are its parts: each alone, and all that stand together. Where something
        fixed stands beside them, they are not met if that decides."""
        match test:
            case ast.UnaryOp(op=ast.Not()):
                test.operand = self._condition(test.operand, kind)
                return test
            case ast.BoolOp(values=parts):
                together = [(part, self._has_fixed(part)) for part in parts]
                test.values = []
                for has_fixed, group in groupby(together, key=itemgetter(1)):
                    asked = [self._condition(part, kind) for part, _ in group]
                    if not has_fixed and len(asked) > 1:
                        asked = [self._asked(ast.copy_location(ast.BoolOp(test.op, asked), test), kind)]
                    test.values += asked
                return test if len(test.values) > 1 else test.values[0]
            case _:
                is_fixed = self._is_fixed(test)
                visited: ast.expr = self.visit(test)
                return visited if is_fixed else self._asked(visited, kind)

    def _has_fixed(self, test: ast.expr) -> bool:
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._has_fixed(operand)
            case ast.BoolOp(values=parts):
                return any(map(self._has_fixed, parts))
        return self._is_fixed(test)

    def _asked(self, test: ast.expr, kind: Kind = "test") -> ast.expr:
        at: Any = tuple(Place(self._file, test.lineno, self._number, kind))
        self._number += 1
        call = ast.Call(ast.Name(ASKED, ast.Load()), [ast.Constant(at), test], [])
        return ast.copy_location(call, test)

    def _is_fixed(self, value: ast.expr, asked: frozenset[str] = frozenset()) -> bool:
        """Whether a value is the same in every call, as far as its code tells.

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
                return all(v is not None and (name in asked or self._is_fixed(v, rest)) for v in values)
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
