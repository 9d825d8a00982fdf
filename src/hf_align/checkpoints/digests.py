"""What stands for the contents of files and folders, so that a run goes on only with what it was begun with."""

from __future__ import annotations

import hashlib
import json
import time
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


_SETTLED = 10**9
"""Nanoseconds since a file was last written to, after which another change to it has another time."""
_FOUND: dict[tuple[int, int, int, int], str] = {}


def of_contents(path: Path) -> str:
    """A file by all of its contents, which are read once as long as it is not written to; 16 hex digits."""
    now, state = time.time_ns(), path.stat()
    key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)  # a file that is renamed stays the same
    if key in _FOUND:
        return _FOUND[key]
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    if now - state.st_mtime_ns > _SETTLED:
        _FOUND[key] = found
    return found


def of_folder(folder: Path) -> dict[str, str]:
    """The files of a folder, by name; not what is in folders inside it."""
    return {path.name: of_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def of_data(path: Path) -> str:
    """A file or a folder of examples."""
    found = of_folder(path) if path.is_dir() else {path.name: of_file(path)} if path.is_file() else {}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
