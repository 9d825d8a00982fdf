"""What stands for the contents of files and folders, so that a run goes on only with what it was begun with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_SMALL = 1 << 20
"""Bytes up to which contents are read; of larger files path, size and time stand for them."""


def of_file(path: Path) -> str:
    """A file, by its contents if it is small."""
    state = path.stat()
    if state.st_size <= _SMALL:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    where = json.dumps([str(path.resolve()), state.st_size, state.st_mtime_ns])
    return hashlib.sha256(where.encode("utf-8", "surrogateescape")).hexdigest()


def of_folder(folder: Path) -> dict[str, str]:
    """The files of a folder, by name; not what is in folders inside it."""
    return {path.name: of_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def of_data(path: Path) -> str:
    """A file or a folder of examples."""
    found = of_folder(path) if path.is_dir() else {path.name: of_file(path)} if path.is_file() else {}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
