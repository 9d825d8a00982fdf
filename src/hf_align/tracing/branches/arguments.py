"""Whether nothing but the arguments that a call is given, and other conditions, decide a condition.

It asks whether an argument is given, of which kind it is, or how many dimensions it has; or whether a variable has been
set, which is as other conditions have gone.
"""

from __future__ import annotations

import ast

import torch
from torch import Tensor
from torch.nn import functional

from hf_align.tracing.branches.changed import READS, Named
from hf_align.tracing.branches.fixed import InScopes, Known, Scope

_QUESTIONS = ("isinstance", "issubclass", "hasattr", "callable")
_LOOKS_UP = ("getattr", "next")
_OF_TENSORS, _OF_TORCH = frozenset(dir(Tensor)), frozenset(dir(torch) + dir(functional))
_DIMENSIONS = ("dim", "ndim")
_NONE = frozenset[str]()
_READ = ("len", "enumerate", "zip", "tuple", "list", "sum", "reversed")
"""Functions that change no list that they are given."""


class OfArguments(InScopes):
    """Goes through a file, and knows in each function what it was handed."""

    def __init__(self, tree: ast.Module, known: Known) -> None:
        super().__init__(tree, known)
        nodes = [*ast.walk(tree)]
        imports = (n for n in nodes if isinstance(n, ast.Import) or (isinstance(n, ast.ImportFrom) and not n.level))
        self._imported = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
        self._functions = [node for node in nodes if isinstance(node, Named)]

    def is_decided_before(self, test: ast.expr) -> bool:
        """Whether nothing but arguments that are given, and other conditions, decide a condition."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand) | ast.Call(func=ast.Name(id="bool"), args=[operand]):
                return self.is_decided_before(operand)
            case ast.BoolOp(values=parts):
                return any(map(self.is_decided_before, parts))
            case ast.Compare(left=value, ops=[ast.Is() | ast.IsNot()]):
                return self._is_argument(value, or_something=True)
            case ast.Compare(left=value) if _is_kind(value):
                return True
            case ast.Compare(left=ast.Constant(), ops=[ast.In() | ast.NotIn()], comparators=[value]):
                return self._is_argument(value)
            case ast.Compare(left=ast.Name() as value, comparators=[ast.Constant(value=str())]):
                return self._is_argument(value)
            case ast.Compare(left=value, comparators=[ast.Constant()]) if not isinstance(
                value, ast.Name
            ) and _is_no_number_of_a_tensor(value):
                return self._is_argument(value)
            case ast.Compare(left=value, comparators=[other]):
                return _is_dtype(other) or self._asks_for_dimensions(value, other)
            case ast.Call(func=ast.Name(id=name)) if name in _QUESTIONS:
                return True
            case ast.Call(func=called, args=[], keywords=[]) if self._is_of_package(called):
                return True
        return self._asks_whether_empty(test) or (_is_no_number_of_a_tensor(test) and self._is_argument(test))

    def _asks_whether_empty(self, test: ast.expr) -> bool:
        """Whether it asks if anything was put in a list that the function has begun: the conditions around what puts
        something there decide that."""
        match test:
            case ast.Compare(left=ast.Call() as counted, ops=[ast.Gt() | ast.Eq() | ast.NotEq()],
                             comparators=[ast.Constant(value=0)]):  # fmt: skip
                return self._asks_whether_empty(counted)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]) | ast.Name(id=name):
                scope = next((scope for scope in reversed(self._scopes) if name in scope.bound), Scope())
                bound = scope.bound.get(name, [])
                begun = bool(bound) and all(isinstance(value, ast.List) and not value.elts for value in bound)
                return begun and not any(self._may_fill(node, name) for node in scope.nodes)
        return False

    def _may_fill(self, node: ast.AST, name: str) -> bool:
        """Whether something puts into a list of some name what is not appended to it, as far as that can be read."""
        match node:
            case ast.Attribute(value=ast.Name(id=used), attr=method):
                return used == name and method != "append"
            case ast.Call(func=called, args=arguments):
                handed = any(isinstance(value, ast.Name) and value.id == name for value in arguments)
                of_package = isinstance(called, ast.Attribute) and self._is_of_package(called)
                return handed and not of_package and not (isinstance(called, ast.Name) and called.id in _READ)
        return False

    def _is_of_package(self, called: ast.expr) -> bool:
        """Whether a function was imported from an installed package: what it says of nothing, it says in each call."""
        match called:
            case ast.Attribute(value=owner):
                return self._is_of_package(owner)
            case ast.Name(id=name):
                return name in self._imported
        return False

    def _asks_for_dimensions(self, value: ast.expr, other: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            bound = next((scope.bound[value.id] for scope in reversed(self._scopes) if value.id in scope.bound), [])
            named = [each for each in bound if each is not None and not isinstance(each, ast.Name)]
            return bool(bound) and len(named) == len(bound) and all(self._asks_for_dimensions(v, other) for v in named)
        asked = _of_which_dimensions(value)
        is_number = isinstance(other, ast.Constant) or _of_which_dimensions(other) is not None
        return asked is not None and is_number and self._is_argument(asked)

    def _is_argument(self, value: ast.expr, asked: frozenset[str] = frozenset(), *, or_something: bool = False) -> bool:
        """Whether a value is an argument, part of one, or one of several.

        Args:
            or_something: or what is not None for certain.
        """
        match value:
            case ast.Name(id=name):
                return self._is_argument_name(name, asked, or_something)
            case ast.Attribute(value=owner) | ast.Call(func=ast.Attribute(value=owner)):
                return self._is_argument(owner, asked)
            case ast.Subscript(value=owner) | ast.Call(func=ast.Name(id="getattr"), args=[owner, *_]):
                return self._is_argument(owner, asked)
            case ast.IfExp(body=first, orelse=second):
                return self._is_one_of([first, second], asked, or_something)
            case ast.BoolOp(values=values):
                return self._is_one_of(values, asked, or_something)
        return False

    def _is_argument_name(self, name: str, asked: frozenset[str], or_something: bool) -> bool:
        for scope in reversed(self._scopes):
            if name in scope.given:
                return True
            if name in scope.bound:
                bound = scope.bound[name]
                known = [value for value in bound if value is not None]
                is_known = or_something or len(known) == len(bound)  # what is added to is something
                return name in asked or (is_known and self._is_one_of(known, asked | {name}, or_something))
        return False

    def _is_one_of(self, values: list[ast.expr], asked: frozenset[str], or_something: bool) -> bool:
        """Whether all of them are arguments, or conditions that are asked for, or the same in every call; and
        some are not the same."""
        differing = [value for value in values if not self.is_fixed(value, asked)]
        return bool(differing) and all(
            (
                self._is_argument(value, asked, or_something=or_something)
                and (or_something or _is_no_number_of_a_tensor(value))
            )
            or isinstance(value, ast.Compare)
            or self.is_decided_before(value)
            or (or_something and not self._may_be_none(value))
            for value in differing
        )

    def _may_be_none(self, value: ast.expr | None, scope: Scope | None = None, asked: frozenset[str] = _NONE) -> bool:
        """Whether a value may be None by itself: what is looked up, or what a function returns that looks it up.

        Args:
            scope: of the function that returns it, where that is followed.
            asked: the functions, and the names of that one, that are followed already.
        """
        match value:
            case ast.Call(func=ast.Name(id=name)):
                return name in _LOOKS_UP or self._may_return_none(name, asked)
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                is_known = name in _OF_TENSORS | _OF_TORCH or self._is_own(owner)
                return not is_known or name in READS - _OF_TENSORS or self._may_return_none(name, asked)
            case ast.Call(func=called):
                return not self._is_own(called)
            case ast.Subscript(slice=index):
                return not any(isinstance(part, (ast.Slice, ast.Constant)) for part in ast.walk(index))
            case ast.IfExp(body=first, orelse=second):
                return any(self._may_be_none(each, scope, asked) for each in (first, second))
            case ast.Name(id=name) if scope is not None:
                bound = () if name in asked else scope.bound.get(name, ())
                return any(self._may_be_none(each, scope, asked | {name}) for each in bound if each is not None)
            case ast.Constant(value=held):
                return held is None
        return value is None or isinstance(value, (ast.Name, ast.Attribute, ast.BoolOp, ast.Await))

    def _may_return_none(self, name: str, asked: frozenset[str]) -> bool:
        """Whether a function of this file, if it is one, may give None."""
        functions = [] if name in asked else [f for f in self._functions if f.name == name]
        return any(
            self._may_be_none(node.value, Scope.of(function, is_method=False), asked | {name})
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Return)
        )

    def _is_own(self, value: ast.expr) -> bool:
        """Whether a value belongs to the object whose method this is."""
        match value:
            case ast.Attribute(value=owner) | ast.Subscript(value=owner):
                return self._is_own(owner)
            case ast.Name(id=name):
                return name in ("self", "cls")
        return False


def _is_no_number_of_a_tensor(value: ast.expr) -> bool:
    """Whether what belongs to an argument, or is one of several, is nothing that a tensor tells of itself."""
    match value:
        case ast.Attribute(value=owner, attr=name) | ast.Call(func=ast.Attribute(value=owner, attr=name)):
            return name not in _OF_TENSORS and _is_no_number_of_a_tensor(owner)
        case ast.Subscript(value=owner):
            return _is_no_number_of_a_tensor(owner)
    return True


def _is_kind(value: ast.expr) -> bool:
    """Whether a value is the class of something, or what that is called."""
    match value:
        case ast.Call(func=ast.Name(id="type"), args=[_]):
            return True
        case ast.Attribute(value=owner, attr=name):
            return name == "__class__" or _is_kind(owner)
    return False


def _is_dtype(value: ast.expr) -> bool:
    match value:
        case ast.Attribute(value=ast.Name(id=torch.__name__), attr=name):
            return isinstance(getattr(torch, name, None), torch.dtype)
    return False


def _of_which_dimensions(value: ast.expr) -> ast.expr | None:
    """What the number of dimensions of is asked for."""
    match value:
        case ast.Attribute(value=owner, attr=name) | ast.Call(func=ast.Attribute(value=owner, attr=name)):
            return owner if name in _DIMENSIONS else None
        case ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(value=owner, attr="shape")]):
            return owner
    return None
