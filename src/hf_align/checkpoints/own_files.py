"""The small files of a model's folder: read only if they are its own, of bounded size, and what they should be.

A folder may come from anywhere. A link in it may lead to anything on this disk, a FIFO never ends, and JSON may be as
deep as it likes.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from hf_align.errors import CheckpointError

LARGEST = 2**28
"""Bytes: the largest tokenizers that people publish have a tenth of it."""
_LARGEST_HEADER = 100_000_000
"""Bytes, as in safetensors."""


def is_own(folder: Path, file: Path) -> bool:
    """Whether a file is a regular one of bounded size, and inside its folder wherever its links lead.

    In the cache of huggingface_hub the files of a commit are links to the blobs of the same repository.
    """
    root = folder.resolve()
    roots = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    try:
        real = file.resolve(strict=True)
        state = real.stat()
    except (OSError, RuntimeError):  # a link that leads nowhere, or to itself
        return False
    return stat.S_ISREG(state.st_mode) and state.st_size <= LARGEST and any(r in real.parents for r in roots)


def own_bytes(folder: Path, name: str) -> bytes | None:
    """What is in a file; None if there is none.

    Raises:
        CheckpointError: it is no file of the folder's own.
    """
    file = folder / name
    if not os.path.lexists(file):
        return None
    if not is_own(folder, file):
        raise CheckpointError(
            f"{file} is not a regular file inside {folder} of at most {LARGEST >> 20} MiB; put a copy there"
        )
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def own_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file.

    Raises:
        CheckpointError: as `own_bytes`, or it does not contain a JSON object.
    """
    content = own_bytes(folder, name)
    return None if content is None else json_object(content, folder / name)


def header_size(start: bytes, where: object) -> int:
    """The size of the header of a safetensors file, from its first 8 bytes.

    Raises:
        CheckpointError: it is larger than safetensors itself allows.
    """
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > _LARGEST_HEADER:
        raise CheckpointError(f"{where} is truncated or not a safetensors file: its header has an impossible size")
    return length


def json_object(text: str | bytes, where: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: it is none, has a key twice, or is nested too deep.
    """
    try:
        found = parsed(text)
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON; fetch it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} does not contain a JSON object; fetch it again")
    return found


def parsed(text: str | bytes) -> Any:
    """What JSON stands for.

    Raises:
        ValueError: it is none, has a key twice, or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("too deep") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found
