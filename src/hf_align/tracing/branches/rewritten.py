"""The source of a Python module, in which a function is asked for each condition that a call may decide.

A condition is what `if`, `while`, `… if … else …` and comprehensions test, what stands before `and` and `or`, a case,
any other comparison or question of a kind, whether a `range` has a number, and whether a `try` fails. One that depends
on nothing but how the model was built goes the same way in every call, and stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from types import CodeType
from typing import Any, Literal, NamedTuple, cast

from hf_align.tracing.branches.fixed import InScopes, Known

ASKED, _MATCHED = "__hf_align_asked__", "__hf_align_matched__"
"""What the function is called in the rewritten code, and what a case is compared with."""
_SEQUENCE, _MAPPING = 1 << 5, 1 << 6
"""Flags of classes that a case with parts takes for a sequence or a mapping."""
_QUESTIONS = ("isinstance", "issubclass", "hasattr", "callable", "bool", "any", "all")
"""Functions that answer yes or no."""
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


Taken = dict[tuple[Place, str], frozenset[bool]]
"""Conditions that a call has met, each with the module that asked, and whether they held."""


@lru_cache(maxsize=64)
def rewritten(source: str, file: str, known: Known) -> dict[CodeType, CodeType]:
    """The code of each function that has such conditions -> the same with all of them asked for."""
    plain, asking = (ast.parse(source) for _ in range(2))
    _Asking(file, plain, known).visit(asking)
    before, after = (
        _codes(compile(tree, file, "exec", dont_inherit=True)) for tree in (plain, ast.fix_missing_locations(asking))
    )
    return {old: new for old, new in zip(before, after, strict=True) if old != new}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _matches(pattern: ast.pattern, value: ast.expr) -> ast.expr | None:
    """The condition under which a value matches a pattern, which binds what that does; None where none is known."""
    parts = list[ast.expr | None]()
    match pattern:
        case ast.MatchValue(value=plain):
            return ast.Compare(value, [ast.Eq()], [plain])
        case ast.MatchSingleton(value=single):
            return ast.Compare(value, [ast.Is()], [ast.Constant(single)])
        case ast.MatchOr(patterns=patterns):
            either = [_matches(each, value) for each in patterns]
            known = [each for each in either if each is not None]
            return ast.BoolOp(ast.Or(), list[ast.expr](known)) if len(known) == len(either) else None
        case ast.MatchAs(pattern=within, name=name):
            bound = value if name is None else ast.NamedExpr(ast.Name(name, ast.Store()), value)
            parts = [ast.Tuple([bound], ast.Load()), *([] if within is None else [_matches(within, value)])]
        case ast.MatchSequence(patterns=patterns) if not any(isinstance(each, ast.MatchStar) for each in patterns):
            length = ast.Compare(_call("len", value), [ast.Eq()], [ast.Constant(len(patterns))])
            parts = [_is_of(value, _SEQUENCE), length]
            parts += [_matches(p, ast.Subscript(value, ast.Constant(i), ast.Load())) for i, p in enumerate(patterns)]
        case ast.MatchMapping(keys=keys, patterns=patterns, rest=None):
            parts = [_is_of(value, _MAPPING)]
            for key, each in zip(keys, patterns, strict=True):
                held = ast.Subscript(value, key, ast.Load())
                parts += [ast.Compare(key, [ast.In()], [value]), _matches(each, held)]
        case ast.MatchClass(cls=kind, patterns=[], kwd_attrs=names, kwd_patterns=patterns):
            parts = [_call("isinstance", value, kind)]
            for name, each in zip(names, patterns, strict=True):
                has = _call("hasattr", value, ast.Constant(name))
                parts += [has, _matches(each, ast.Attribute(value, name, ast.Load()))]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return ast.BoolOp(ast.And(), list[ast.expr](known)) if len(known) > 1 else known[0]


def _is_of(value: ast.expr, kind: int) -> ast.expr:
    """Whether a value is a sequence, or a mapping, as cases see it (PEP 634)."""
    flags = ast.Attribute(ast.Attribute(value, "__class__", ast.Load()), "__flags__", ast.Load())
    return ast.BinOp(flags, ast.BitAnd(), ast.Constant(kind))


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


class _Asking(InScopes, ast.NodeTransformer):
    """Puts a call around each condition that may differ from call to call."""

    def __init__(self, file: str, tree: ast.Module, known: Known) -> None:
        super().__init__(tree, known)
        self._file, self._number = file, 0

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
                counts = not self.is_fixed(node.iter)
            case _:
                counts = False
        self.generic_visit(node)
        node.iter = self._asked(node.iter) if counts else node.iter
        return node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        """A case as a condition."""
        is_fixed = self.is_fixed(node.subject)
        guards = [None if case.guard is None else self._condition(case.guard) for case in node.cases]
        for case in node.cases:
            case.guard = None
        self.generic_visit(node)
        for case, guard in zip(node.cases, guards, strict=True):
            holds_always = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            matched = ast.Name(_MATCHED, ast.Load())
            equal = None if is_fixed or holds_always else _matches(case.pattern, matched)
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
            raised += [self._raised(kind, handler) for kind in kinds[:1]]  # some catch nothing
        node.body = [*raised, *node.body]
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        """As a `try` where errors are suppressed."""
        self.generic_visit(node)
        for item in node.items:
            match item.context_expr:
                case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=[kind, *_]):
                    node.body = [self._raised(kind, kind), *node.body]
        return node

    def _raised(self, kind: ast.expr | None, at: ast.expr | ast.ExceptHandler) -> ast.stmt:
        never = ast.copy_location(ast.Constant(False), at)
        return ast.If(self._asked(never), [ast.Raise(kind or ast.Name("Exception", ast.Load()))], [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A question of a kind that something may be chosen by."""
        if isinstance(node.func, ast.Name) and node.func.id in _QUESTIONS:
            return self._leaf(node, "value")
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """A comparison that a table, a product or another function may decide by."""
        return self._leaf(node, "value")

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        *first, last = node.values
        node.values = [*map(self._condition, first), self._leaf(last, "value")]
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
                return self._leaf(test, kind)

    def _leaf(self, test: ast.expr, kind: Kind) -> ast.expr:
        is_fixed = self.is_fixed(test)
        visited: Any = self.generic_visit(test) if isinstance(test, (ast.Compare, ast.Call)) else self.visit(test)
        return cast(ast.expr, visited) if is_fixed else self._asked(visited, kind)

    def _has_fixed(self, test: ast.expr) -> bool:
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._has_fixed(operand)
            case ast.BoolOp(values=parts):
                return any(map(self._has_fixed, parts))
        return self.is_fixed(test)

    def _asked(self, test: ast.expr, kind: Kind = "test") -> ast.expr:
        at: Any = tuple(Place(self._file, test.lineno, self._number, kind))
        self._number += 1
        call = ast.Call(ast.Name(ASKED, ast.Load()), [ast.Constant(at), test], [])
        return ast.copy_location(call, test)
