"""Which conditions of a model's own code are asked for, and what comes of it if some are turned."""

from __future__ import annotations

import ast
import importlib.util
import sys
from array import array
from collections import UserDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from hf_align.tracing.branches.arguments import OfArguments
from hf_align.tracing.branches.changed import set_later
from hf_align.tracing.branches.fixed import Known
from hf_align.tracing.branches.rewritten import ASKED, rewritten
from hf_align.tracing.branches.set_by_methods import set_by_methods
from hf_align.tracing.branches.taken import Turn, branching, brought
from hf_align.tracing.branches.told import require_told

_CODE = """
from torch import nn

LIMIT = 3


def halved(x, often=1):
    while often > 0 and x.sum() > 1e9:
        x, often = x / 2, often - 1
    return [y for y in x if y > LIMIT]


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.bends, self.width, self.seen = True, 4, None

    def forward(self, x, mask=None, **more):
        if self.bends:  # fixed
            x = x + 1
        half = self.width // 2
        for i in range(half):
            x = x if i == 7 else x + i  # fixed
        if half > 1 and isinstance(self.width, int):  # fixed
            x = x * 2
        if mask is not None and mask.any():
            x = x - 1
        if not self.bends or len(x) > 50:
            x = -x
        if self.seen is None:
            x = x + more.get("more", 0)
        x = x if len(x) < 9 else 0 * x
        return x.sum() + sum(halved(x))

    def remember(self):
        self.seen = True

    @property
    def twice(self):
        return 2 if self.seen else 1

    @staticmethod
    def of(x):
        try:
            return (lambda y: y or 1)(x)
        except ():
            return 2
"""


@contextmanager
def imported(folder: Path, name: str, code: str) -> Iterator[Any]:
    """A module of code that a model brings along."""
    (folder / f"{name}.py").write_text(code)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Any]:
    with imported(tmp_path, "own", _CODE) as module:
        yield module


def _line(text: str) -> int:
    return next(number for number, line in enumerate(_CODE.splitlines(), 1) if text in line)


def test_what_depends_on_the_build_alone_is_not_asked(own: Any) -> None:
    model, x = own.Own(), torch.arange(4.0)
    with branching(model) as taken:
        found = model(x)
        assert model.twice == 1 and model.of(0) == 1
    assert found == model(x)
    asked = ("while", "for y in", "mask is not", "len(x) > 50", "seen is", "len(x) <", "2 if self.seen", "lambda")
    assert sorted({place.line for place, _ in taken}) == sorted(map(_line, asked))
    assert not any(_CODE.splitlines()[place.line - 1].endswith("# fixed") for place, _ in taken)


def test_a_turned_condition_takes_the_other_branch_and_the_code_is_put_back(own: Any) -> None:
    model, x = own.Own(), torch.arange(4.0)
    codes = own.Own.forward.__code__, own.halved.__code__
    with branching(model) as taken:
        plain = model(x)
    for text, expected in (("len(x) <", 0.0), ("len(x) > 50", None)):
        ((place, site),) = (met for met in taken if met[0].line == _line(text))
        with branching(model, [Turn(place, None)]) as turned:
            found = float(model(x))
        assert turned[place, site] == frozenset([not next(iter(taken[place, site]))])
        assert found == expected if expected is not None else found != float(plain)
    assert (own.Own.forward.__code__, own.halved.__code__) == codes


def test_a_loop_that_is_turned_ends(own: Any) -> None:
    model = own.Own()
    with branching(model) as taken:
        model(torch.arange(4.0))
    for place, site in taken:
        if place.kind == "loop":
            with branching(model, [Turn(place, frozenset([site]))]):
                model(torch.arange(4.0))


def test_code_of_packages_is_no_code_that_a_model_brings_along(own: Any) -> None:
    assert brought(nn.Sequential(nn.Linear(2, 2))) == []
    assert brought(nn.Sequential(own.Own(), nn.Linear(2, 2))) == [own]


_LEAVING = """
import functools
import sys
from torch import nn

COUNT = 0


@functools.lru_cache
def known(n):
    return n > 3


class Leaving(nn.Module):
    most = None

    def forward(self, x):
        global COUNT
        if len(x) > 90:
            COUNT, type(self).most = 5, x
            print("long")
        if len(x) > 91:
            sys.exit("too long")
        missing = max(0, len(x) - 50)
        while missing != 0:
            missing -= 1
        return x if known(len(x)) else -x
"""


def test_a_turned_call_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does it end the process, or go on forever."""
    with imported(tmp_path, "leaving", _LEAVING) as module:
        model, x = module.Leaving(), torch.arange(4.0)
        with branching(model) as taken:
            model(x)
        by_line = {_LEAVING.splitlines()[place.line - 1].strip(): place for place, _ in taken}
        with branching(model, [Turn(by_line["if len(x) > 90:"], None)]):
            model(x)
            assert module.COUNT == 5
        assert (module.COUNT, module.Leaving.most, capsys.readouterr().out) == (0, None, "")
        ends = Turn(by_line["if len(x) > 91:"], None)
        with pytest.raises(RuntimeError, match="ends the process"), branching(model, [ends]):
            model(x)
        with branching(model, [Turn(by_line["while missing != 0:"], None)]):
            model(x)
        (place,) = (
            place for place, _ in taken if place.line == _LEAVING[: _LEAVING.index("known(len")].count("\n") + 1
        )
        with branching(model, [Turn(place, None)]):
            assert model(x).equal(-x)


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("_STATE['n'] = x", "_STATE"),
        ("kept = self.kept\n        kept['n'] = x", "kept"),
        ("self.held['a']['n'] = x", "held"),
        ("self.recent.appendleft(x)", "recent"),
        ("self.many.fill_(x)", "many"),
        ("_MODE.set(x)", "_MODE"),
        ("operator.setitem(self.noted, 'n', x)", "noted"),
        ("dict.update(self.table, n=x)", "table"),
        ("for each in self.parts.values():\n            each['n'] = x", "parts"),
        ("outer(self.store, x)", "store"),
        ("outer(x=self.weight, one=self.store)", "store"),
        ("self.method(self.weight, self.store)", "store"),
        ("Model.method(self, x, self.store)", "store"),
        ("several(self.weight, x, self.store)", "store"),
        ("several(*(x, self.store))", "store"),
        ("self.scale = x", "scale"),
    ],
)
def test_what_is_changed_under_another_name_is_changed(body: str, changed: str) -> None:
    handing = (
        "def outer(one, x):\n    inner(one, x)\ndef inner(other, x):\n    other['n'] = x\n"
        "def method(self, like, other):\n    other['n'] = like\ndef several(x, *others):\n    others[0]['n'] = x\n"
    )
    source = f"class Model:\n    def forward(self, x):\n        {body}\n        return self.weight.get('w', self.bias)"
    assert changed in (found := set_later(handing + source)) and not found & {"weight", "bias"}
    assert changed not in set_later(handing + source.replace("forward", "__init__"))


_CASES = """
def told(value):
    match value:
        case [1, second]:
            return second
        case {"n": 2, "m": held}:
            return held
        case complex(real=3.0):
            return "a number"
        case str():
            return "a word"
        case (_, (a, 5) | (5, a)) as whole:
            return a, len(whole)
    return None
"""


def test_cases_with_parts_go_the_way_they_are_written() -> None:
    known = Known(frozenset(), frozenset())
    (asking,) = [new for old, new in rewritten(_CASES, "own.py", known).items() if old.co_name == "told"]
    plain = dict[str, Any]()
    exec(_CASES, plain)
    told = plain["told"]
    turned = FunctionType(asking, {ASKED: lambda place, value: value})
    values = [[1, 2], (1, 3), deque([1, 4]), array("i", [1, 5]), range(1, 3), "12", b"12", {"n": 2, "m": 6}, {"n": 2},
              UserDict(n=2, m=7), {1: 2}, 3 + 0j, 4 + 0j, 3.0, (0, (8, 5)), (0, (5, 9)), (0, "85"), None]  # fmt: skip
    for value in values:
        assert turned(value) == told(value), value


_ASKING = """
import re
import torch
from torch import nn
from transformers.utils import is_x_available

known = {}

class Own(nn.Module):
    def looked_up(self, x):
        return known.get(x.shape[1])

    def made(self, x):
        y = x * 2
        return y

    def forward(self, x, mask=None, word="plain", cache=None, part: nn.Module = None, **more):
        by, found, mine = known.get(len(x)), re.match("a+", word), self.looked_up(x)
        made, size = self.made(x), x.shape[1]
        offset = None
        if self.config.offset:
            offset = self.made(x)
        count, is_crossed = x.dim(), mask is not None
        return CONDITION
"""


def told(condition: str) -> bool:
    """Whether nothing but arguments, and other conditions, decide a condition."""
    tree = ast.parse(_ASKING.replace("CONDITION", condition))
    answers = list[bool]()

    class Looking(OfArguments):
        def visit_Return(self, node: ast.Return) -> ast.AST:
            answers.append(node.value is not None and self.is_decided_before(node.value))
            return node

    Looking(tree, Known(frozenset({"Own"}), frozenset())).visit(tree)
    return answers[-1]


@pytest.mark.parametrize("condition", [
    "mask is not None", "part is None", "offset is not None", "made is None", "isinstance(by, int)", "word == 'soft'",
    "count == 3", "mask.dim() == 4", "mask.dtype == torch.bool", "is_crossed", "not is_crossed", "cache.is_started",
    "cache.length() > 0", "'a' in more", "more['a']", "is_x_available()", "torch.jit.is_tracing()",
])  # fmt: skip
def test_a_condition_that_arguments_or_other_conditions_decide(condition: str) -> None:
    assert told(condition)


@pytest.mark.parametrize("condition", [
    "by is not None", "by", "found", "found is None", "mine is not None", "(by := known.get(3)) is not None",
    "size in known", "size == 4", "size", "x.shape[0] == 4", "x.max() > 3", "known",
])  # fmt: skip
def test_a_condition_that_what_a_call_holds_decides(condition: str) -> None:
    assert not told(condition)


@pytest.mark.parametrize(
    "body",
    [
        "if at is not None:\n  x = x[:at]",
        "if at is None:\n  return 0\n x = x[1:at]",
        "if at is None:\n  x = x[1:]\n else:\n  x[..., at] = 0",
        "if at:\n  n = at\n  x = x[n]",
        "x = x if not (at is not None and x.any()) else x[at::2]",
    ],
)
def test_code_that_is_told_which_entries_are_meant_does_not_take_all(body: str) -> None:
    source = f"def f(x, at=None):\n {body}\n return x\n"
    names: dict[str, Any] = {ASKED: lambda place, holds: not body.startswith("if at is None")}
    exec(compile(source, "file.py", "exec", dont_inherit=True), names)
    given = names["f"]
    codes = rewritten(source, "file.py", Known(frozenset(), frozenset()))
    expected = given(torch.arange(5), 3)
    given.__code__ = codes[given.__code__]
    assert torch.equal(given(torch.arange(5), 3), expected)
    with pytest.raises(IndexError, match="list index out of range"):
        given(torch.arange(5))


@pytest.mark.parametrize(
    "body",
    [
        "at = to\n  x = x[at:]",
        "for at in (None, 1):\n   x = x[at:]",
        "x = [x[at:] for at in (None, 1)]",
        "x = (lambda at: x[at:])(to)",
        "n = at\n  n = to\n  x = x[n:]",
        "x = x[to:]",
    ],
)
def test_what_is_not_told_may_be_none(body: str) -> None:
    source = f"def f(x, at=None, to=None):\n if at is not None:\n  {body}\n return x[:at]\n"
    assert not require_told(ast.parse(source))


def test_what_users_call_is_neither_what_builds_a_model_nor_what_a_call_runs() -> None:
    layer = """
class Layer(Module):
    def __init__(self, config):
        self._size(config)
        self.set_width(config.width)
    def _size(self, config):
        self.size = config.size
    def set_width(self, width):
        self.width = width
    def forward(self, x):
        return self.noted(x)[..., : self.width]
    def noted(self, x):
        self.seen = x
        return x
"""
    model = """
class Model(Module):
    def set_input_embeddings(self, table):
        self.table = table
    @property
    def share(self):
        return self._share
    @share.setter
    def share(self, share):
        self._share = share
def prune(model, count):
    model.layer.kept[count:] = 0
"""
    found = set_by_methods([layer, model])
    assert {"width", "_share", "kept"} <= found
    assert not found & {"size", "seen", "table"}
