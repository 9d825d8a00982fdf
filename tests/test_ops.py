"""What is known of ops stands in one room: `symmetry/rules/`, by way of `tracing/ops.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hf_align.symmetry.rules  # noqa: F401  (fills the tables)
from hf_align.symmetry.interpreter.call import RULES
from hf_align.tracing import ops

KNOWN = RULES.keys() | ops._TRAITS.keys()
SOURCES = Path(ops.__file__).parents[1]
ROOM = SOURCES / "symmetry" / "rules"
OTHERS = sorted(f for f in SOURCES.rglob("*.py") if ROOM not in f.parents)
BY_NAME = {
    "tracing/ops.py": "where traits are looked up",
    "tracing/program.py": "evidence names the op",
    "symmetry/interpreter/call.py": "what a rule need not ask for is noted with it",
    "symmetry/interpreter/interpret.py": "rules are looked up, and an op without one is named",
}
"""Files that may ask for the name of an op, and what for."""
BUILDS = {
    "tracing/recorder.py": "writes down ops that the model did not call: a copy",
    "tracing/synonyms.py": "and which of several names of one op",
    "tracing/listed.py": "and what lets through only those rows that a list holds",
    "tracing/memory.py": "and what puts a new value into the place of a view",
}
"""Files that may name ops of torch, and what for."""
WORDS = {
    "symmetry/interpreter/call.py": {"cat"},  # a role of evidence
    "tracing/arguments.py": {"copy"},  # an argument of many ops
    "tracing/lookups.py": {"index"},  # the same
    "tracing/alike.py": {"index"},  # a name for a size
}
"""Names of ops that are other words there."""


def path_of(file: Path) -> str:
    return file.relative_to(SOURCES).as_posix()


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def named(file: Path) -> Iterator[str]:
    """The names of ops in a file that handles graphs, as strings or attributes of `torch.ops`."""
    nodes = list(ast.walk(tree_of(file)))
    graphs = any(isinstance(n, ast.ImportFrom) and "fx" in {a.name for a in n.names} for n in nodes)
    for node in nodes:
        if graphs and isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KNOWN:
            yield node.value
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops."):
            yield ast.unparse(node)


def test_no_other_file_names_an_op() -> None:
    found = {path_of(file): set(named(file)) - WORDS.get(path_of(file), set()) for file in OTHERS}
    assert {file: names for file, names in found.items() if names and file not in BUILDS} == {}


def test_no_other_file_asks_for_the_name_of_an_op() -> None:
    asking = {
        path_of(f) for f in OTHERS if "op_name" in {n.id for n in ast.walk(tree_of(f)) if isinstance(n, ast.Name)}
    }
    assert asking == set(BY_NAME)


def test_every_exception_is_needed() -> None:
    assert all(set(named(SOURCES / file)) >= words for file, words in WORDS.items())
    assert all(set(named(SOURCES / file)) for file in BUILDS)
