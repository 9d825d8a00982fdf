"""Inputs are read-only: nothing is written to a file or folder that is read, whatever its name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hf_align.errors import OutputError


def require_apart(output: Path, reads: Iterable[Path]) -> None:
    """See that nothing that is read would be written to: by where paths lead, and by what is there.

    Args:
        output: a folder or file to be.
        reads: files, and folders with what they link to.

    Raises:
        OutputError: the output is an input, is inside one, or holds one.
    """
    written = _lineage(output)
    for path in reads:
        inside = [entry for entry in path.iterdir() if entry.is_symlink()] if path.is_dir() else []
        if identity(path) in written or any(identity(output) in _lineage(p) for p in (path, *inside)):
            raise OutputError(f"{output} is, contains or is inside {path}, which is read; choose another -o")


def _lineage(path: Path) -> set[tuple[int, int]]:
    """What a path leads to and all folders around it, as the file system knows them."""
    real = path.resolve()
    return {found for p in (real, *real.parents) if (found := identity(p)) is not None}


def identity(path: Path) -> tuple[int, int] | None:
    """The same for all names of a file or folder; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
