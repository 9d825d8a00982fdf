"""Which entries of something are taken, where the code goes on only if it is told which.

`if self.width is not None: x = x[..., : self.width]` takes all entries where there is no width, and a None among
numbers adds an axis. So a call that is turned to such code would run, and show nothing of what it does.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

_LEAVE = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LOOKED_AT = (ast.Name, ast.Attribute)


def require_told(tree: ast.Module) -> set[ast.expr]:
    """The places in subscripts of what is told, by a condition that decides whether the code there runs."""
    found = _Told()
    found.visit(tree)
    return found.places


class Raising(ast.NodeTransformer):
    """Has some names and attributes raise an IndexError where they are None."""

    def __init__(self, places: Set[ast.expr]) -> None:
        self._places = places

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if node not in self._places:
            return node
        assert isinstance(node, ast.expr)
        is_none = ast.Compare(node, [ast.Is()], [ast.Constant(None)])
        return ast.copy_location(ast.Subscript(ast.List([node], ast.Load()), is_none, ast.Load()), node)


class _Told(ast.NodeVisitor):
    def __init__(self) -> None:
        self.places = set[ast.expr]()
        self._told = frozenset[str]()

    def generic_visit(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._block(value, ())
            else:
                for part in value if isinstance(value, list) else [value]:
                    if isinstance(part, ast.AST):
                        self.visit(part)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._block(node.body, _told_by(node.test, True))
        self._block(node.orelse, _told_by(node.test, False))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._block([node.body], _told_by(node.test, True))
        self._block([node.orelse], _told_by(node.test, False))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        parts = (part for part in ast.walk(node.slice) if isinstance(part, _LOOKED_AT))
        self.places |= {part for part in parts if ast.unparse(part) in self._told}

    def _block(self, nodes: Sequence[ast.AST], told: Iterable[str]) -> None:
        """Statements that run one after the other: what one leaves at, or calls by another name, those behind it are
        told; what is bound among them may be None again."""
        before, bound = self._told, Counter(name for node in nodes for name in _bound(node))
        self._told = self._told.union(told).difference(bound)
        for node in nodes:
            self.visit(node)
            match node:
                case ast.If(test=test, body=[*_, last], orelse=[]) if isinstance(last, _LEAVE):
                    self._told = self._told.union(_told_by(test, False)).difference(bound)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if ast.unparse(value) in self._told:
                    self._told |= {name} if bound[name] == 1 else set()
        self._told = before


def _bound(node: ast.AST) -> Iterator[str]:
    """What is given a value anywhere in some code, each as often as it is."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            yield part.arg
        elif isinstance(part, _LOOKED_AT) and isinstance(part.ctx, ast.Store):
            yield ast.unparse(part)


def _told_by(test: ast.expr, holds: bool) -> set[str]:
    """What is not None if a condition holds, or does not."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _told_by(operand, not holds)
        case ast.BoolOp(op=op, values=parts) if isinstance(op, ast.And) == holds:
            return {name for part in parts for name in _told_by(part, holds)}
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=None)]) if isinstance(left, _LOOKED_AT):
            return {ast.unparse(left)} if isinstance(op, ast.IsNot if holds else ast.Is) else set()
        case ast.Name() | ast.Attribute() if holds:
            return {ast.unparse(test)}
    return set()
