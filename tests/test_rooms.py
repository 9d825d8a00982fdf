"""The house of rooms: imports run downward only, and a file fits a reader."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hf_align

SOURCES = Path(hf_align.__file__).parent
ROOMS = ("cli", "api", "mergekit", "jobs", "publishing", "merging", "opening", "matching", "witness", "running",
         "symmetry", "tracing", "checkpoints", "runtime", "settings")  # fmt: skip
"""From the top down; `CONTRIBUTING.md` says what each is for."""
LINES = 400
"""Of a file, at most."""


def height(module: str) -> int:
    """How far down a room is; what stands in none, as errors do, is below all."""
    room = module.partition(".")[0]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def upward(file: Path) -> Iterator[str]:
    """The imports of a file from rooms above its own."""
    room = file.relative_to(SOURCES).parts[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            package, _, rest = name.partition(".")
            if package == "hf_align" and rest and height(rest) < height(room):
                yield f"{file.relative_to(SOURCES)} imports {name}"


def test_imports_run_downward() -> None:
    files = [file for room in ROOMS for file in (SOURCES / room).rglob("*.py")]
    assert [name for file in files for name in upward(file)] == []


def test_every_folder_is_a_room_that_says_what_it_is() -> None:
    rooms = {file.parent for file in SOURCES.rglob("*.py")} - {SOURCES}
    assert {room.relative_to(SOURCES).parts[0] for room in rooms} == set(ROOMS)
    assert all(ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) for room in rooms)


def test_files_fit_a_reader() -> None:
    lines = {f.relative_to(SOURCES): len(f.read_text(encoding="utf-8").splitlines()) for f in SOURCES.rglob("*.py")}
    assert {file: count for file, count in lines.items() if count > LINES} == {}
