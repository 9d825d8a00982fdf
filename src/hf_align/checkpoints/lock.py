"""The lock of an output folder: one run at a time writes to it, and a folder of the user's is told apart."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from hf_align.checkpoints.readonly import identity
from hf_align.errors import OutputError

LOCK = "lock"
_MARK = b"the lock of hf-align\n"
"""In the lock, so that a folder of the user's that happens to have our name is told apart."""


def make_folders(folder: Path) -> list[Path]:
    """Make a folder; those that were not there, innermost first."""
    made = [p for p in (folder, *folder.parents) if not os.path.lexists(p)]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that hold nothing."""
    for folder in folders:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def lock_folder(folder: Path, work: Path) -> IO[bytes]:
    """The lock of an output folder, held; it lies in the folder inside it for what is not finished.

    It is opened without following a link, marked as ours, and removed by whoever held it last: the filelock package
    does none of the three. `flock` exists on Linux and macOS.

    Raises:
        OutputError: another run holds it, or the folder for unfinished work is not ours.
    """
    path = work / LOCK
    for _ in range(100):
        _require_our_work(work)
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise OutputError(f"another run is writing to {folder}") from error
        if identity(path) == (os.fstat(lock.fileno()).st_dev, os.fstat(lock.fileno()).st_ino):
            lock.write(_MARK)
            lock.flush()
            os.set_inheritable(lock.fileno(), True)  # by a program that is started here, if this run is killed
            return lock
        lock.close()  # the run that held it has removed it since
        work.mkdir(parents=True, exist_ok=True)
    raise OutputError(f"another run is writing to {folder}")


def _require_our_work(work: Path) -> None:
    if work.is_symlink() or not work.is_dir():
        raise OutputError(f"{work} is not a folder of hf-align's; move it, or choose another -o")
    names = {path.name for path in work.iterdir()}
    if names <= {LOCK} and (not names or not (work / LOCK).stat().st_size):
        return
    lock = work / LOCK
    if lock.is_symlink() or not lock.is_file() or lock.read_bytes() != _MARK:
        raise OutputError(f"{work} was not made by hf-align; move it, or choose another -o")
