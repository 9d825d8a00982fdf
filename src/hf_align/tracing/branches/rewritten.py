"""The source of a Python module, in which a function is asked for each condition that a call may decide.

A condition is what `if`, `while`, `… if … else …` and comprehensions test, what stands before `and` and `or`, a case,
any other comparison or question of a kind, whether a `range` has a number, and whether a `try` fails. One that depends
on nothing but how the model was built goes the same way in every call, and stays as it is.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby, takewhile
from operator import itemgetter
from types import CodeType
from typing import Any, Literal, NamedTuple, cast

from hf_align.tracing.branches.arguments import OfArguments
from hf_align.tracing.branches.fixed import Function, Known, Scope
from hf_align.tracing.branches.told import Raising, require_told

ASKED, _MATCHED = "__hf_align_asked__", "__hf_align_matched__"
"""What the function is called in the rewritten code, and what a case is compared with."""
_SEQUENCE, _MAPPING = 1 << 5, 1 << 6
"""Flags of classes that a case with parts takes for a sequence or a mapping."""
_QUESTIONS = ("isinstance", "issubclass", "hasattr", "callable", "bool", "any", "all")
"""Functions that answer yes or no."""
Kind = Literal["test", "loop", "count", "value", "assertion", "reached"]


class Place(NamedTuple):
    """A condition in a file.

    Attributes:
        number: among those of the file.
        kind: a loop goes on as long as it holds; a count is whether one runs at all; a value may be no truth at all; an
            assertion is no branch; what is to be reached is the body of a loop, or the end of statements whose errors
            are caught.
        is_decided_before: whether nothing but arguments that are given, and other conditions, decide it.
    """

    file: str
    line: int
    number: int
    kind: Kind
    is_decided_before: bool

    def leaves_open(self, ways: Set[bool]) -> bool:
        """Whether it may go another way, if it has gone these; a loop has something to go through in each."""
        return len(ways) < 2 and not self.is_decided_before and not (self.kind in ("loop", "count") and True in ways)


Taken = dict[tuple[Place, str], frozenset[bool]]
"""Conditions that a call has met, each with the module that asked, and whether they held."""


@lru_cache(maxsize=64)
def rewritten(source: str, file: str, known: Known) -> dict[CodeType, CodeType]:
    """The code of each function that has such conditions -> the same with all of them asked for."""
    plain, asking = (ast.parse(source) for _ in range(2))
    told = require_told(asking)
    _Asking(file, plain, known).visit(asking)
    Raising(told).visit(asking)
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


def _is_range(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Name(id="range")):
            return True
    return False


def _noted(ending: Any, way: bool) -> ast.Expr:
    return ast.Expr(_call(ASKED, ast.Constant(ending), ast.Constant(way)))


class _Asking(OfArguments, ast.NodeTransformer):
    """Puts a call around each condition that may differ from call to call."""

    def __init__(self, file: str, tree: ast.Module, known: Known) -> None:
        super().__init__(tree, known)
        self._file, self._number = file, 0
        self._open = list[Any]()

    @contextmanager
    def _opened(self, endings: list[Any]) -> Iterator[None]:
        """While some endings are to come; None stands for a loop."""
        before, self._open = self._open, endings
        yield
        self._open = before

    def _inside(self, node: Function, scope: Scope) -> ast.AST:
        with self._opened([]):
            return super()._inside(node, scope)

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
        with self._opened([*self._open, None] if kind == "loop" else self._open):
            self.generic_visit(node)
        node.test = test
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        tests, node.ifs = [self._condition(test) for test in node.ifs], []
        self._looping(node)
        node.ifs = tests
        return node

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        """Whether the body is run at all."""
        is_known = _is_range(node.iter) or self.is_fixed(node.iter) or self.is_decided_before(node.iter)
        self._looping(node)
        if is_known:
            return node
        body = self._at(node, "reached")
        node.body.insert(0, _noted(body, True))
        return [_noted(body, False), node]

    def _looping(self, node: ast.For | ast.comprehension) -> ast.AST:
        """Whether a loop that counts is run at all."""
        counts = _is_range(node.iter) and not self.is_fixed(node.iter)
        with self._opened([*self._open, None]):
            self.generic_visit(node)
        node.iter = self._asked(node.iter, "count") if counts else node.iter
        return node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        """A case as a condition."""
        is_fixed, subject = self.is_fixed(node.subject), copy.deepcopy(node.subject)
        guards = [None if case.guard is None else self._condition(case.guard) for case in node.cases]
        for case in node.cases:
            case.guard = None
        self.generic_visit(node)
        for case, guard in zip(node.cases, guards, strict=True):
            holds_always = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            matched = ast.Name(_MATCHED, ast.Load())
            equal = None if is_fixed or holds_always else _matches(case.pattern, matched)
            is_before = equal is not None and self.is_decided_before(_matches(case.pattern, subject) or subject)
            asked = [] if equal is None else [self._asked(ast.copy_location(equal, case.pattern), "test", is_before)]
            if equal is not None:
                case.pattern = ast.MatchAs(name=_MATCHED)
            tests = [*asked, *([] if guard is None else [guard])]
            case.guard = ast.BoolOp(ast.And(), tests) if len(tests) > 1 else next(iter(tests), None)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """What follows an error that no call ends in: the error is raised at once where that is asked for."""
        raised = list[ast.stmt]()
        for handler in node.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            raised += [self._raised(kind, handler) for kind in kinds[:1]]  # some catch nothing
        body, node.body = node.body, []
        self.generic_visit(node)
        node.body = self._catching(body, raised)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        """As a `try` where errors are suppressed."""
        raised = list[ast.stmt]()
        for item in node.items:
            match item.context_expr:
                case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=[kind, *_]):
                    raised.append(self._raised(kind, kind))
        body, node.body = node.body, []
        self.generic_visit(node)
        node.body = self._catching(body, raised)
        return node

    def _catching(self, body: list[ast.stmt], raised: list[ast.stmt]) -> list[ast.stmt]:
        """Statements whose errors are caught, and what notes whether they come to their end. An import does so whatever
        the call."""
        if not raised or all(isinstance(each, (ast.Import, ast.ImportFrom)) for each in body):
            return [*raised, *self._statements(body)]
        ending = self._at(body[0], "reached")
        self._open.append(ending)
        visited = self._statements(body)
        self._open.pop()
        return [_noted(ending, False), *raised, *visited, _noted(ending, True)]

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return cast(ast.Module, self.generic_visit(ast.Module(body, []))).body

    def _raised(self, kind: ast.expr | None, at: ast.expr | ast.ExceptHandler) -> ast.stmt:
        never = ast.copy_location(ast.Constant(False), at)
        return ast.If(self._asked(never), [ast.Raise(kind or ast.Name("Exception", ast.Load()))], [])

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.stmt]:
        """Comes to an end where its value does not fail."""
        self.generic_visit(node)
        open_here = [at for at in self._open if at is not None]
        if open_here:
            value = node.value or ast.Constant(None)
            parts = [value, *(_noted(at, True).value for at in open_here)]
            node.value = ast.copy_location(
                ast.Subscript(ast.Tuple(parts, ast.Load()), ast.Constant(0), ast.Load()), node
            )
        return node

    def visit_Break(self, node: ast.Break) -> list[ast.stmt]:
        return self._leaving(node)

    def visit_Continue(self, node: ast.Continue) -> list[ast.stmt]:
        return self._leaving(node)

    def _leaving(self, node: ast.Break | ast.Continue) -> list[ast.stmt]:
        """Comes to an end of what stands within the same loop."""
        here = list(takewhile(lambda at: at is not None, reversed(self._open)))
        return [*(_noted(at, True) for at in here if at is not None), node]

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
                    plain = [part for part, _ in group]
                    is_before = any(map(self.is_decided_before, plain))
                    asked = [self._condition(part, kind) for part in plain]
                    if not has_fixed and len(asked) > 1:
                        whole = ast.copy_location(ast.BoolOp(test.op, asked), test)
                        asked = [self._asked(whole, kind, is_before)]
                    test.values += asked
                return test if len(test.values) > 1 else test.values[0]
            case _:
                return self._leaf(test, kind)

    def _leaf(self, test: ast.expr, kind: Kind) -> ast.expr:
        is_fixed, is_before = self.is_fixed(test), self.is_decided_before(test)
        visited: Any = self.generic_visit(test) if isinstance(test, (ast.Compare, ast.Call)) else self.visit(test)
        return cast(ast.expr, visited) if is_fixed else self._asked(visited, kind, is_before)

    def _has_fixed(self, test: ast.expr) -> bool:
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._has_fixed(operand)
            case ast.BoolOp(values=parts):
                return any(map(self._has_fixed, parts))
        return self.is_fixed(test)

    def _asked(self, test: ast.expr, kind: Kind = "test", is_before: bool = False) -> ast.expr:
        return ast.copy_location(_call(ASKED, ast.Constant(self._at(test, kind, is_before)), test), test)

    def _at(self, node: ast.expr | ast.stmt, kind: Kind, is_before: bool = False) -> Any:
        self._number += 1
        return tuple(Place(self._file, node.lineno, self._number - 1, kind, is_before))
