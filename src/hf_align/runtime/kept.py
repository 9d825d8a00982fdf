"""The folder of what was found out once, and is true as long as the code is the same."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from huggingface_hub import constants

T = TypeVar("T")
logger = logging.getLogger(__name__)
VARIABLE = "HF_ALIGN_CACHE"
"""The environment variable that names another folder, or is `off`."""
_ENTRIES = 256
"""As many of one kind are kept, those that were written last."""


def kept_folder() -> Path | None:
    """None where nothing is to be kept."""
    named = os.environ.get(VARIABLE, "")
    if named.lower() in ("off", "0", "no", "false"):
        return None
    return Path(named) if named else Path(constants.HF_HOME) / "hf-align" / "specs"


def found_once(path: Path | None, find: Callable[[], T]) -> T:
    """What was found before and kept as JSON, else what is found now; nothing is kept where there is no path."""
    with suppress(OSError, ValueError):
        if path is not None:
            kept: T = json.loads(path.read_bytes())
            return kept
    found = find()
    if path is not None:
        keep(path, json.dumps(found).encode())
    return found


def keep(path: Path, content: bytes) -> None:
    """Write an entry under another name and move it into place: two writers do no harm. Older ones of its kind make
    room. Where it cannot be kept, nothing is lost but time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
        alike = path.parent.glob("*" + "".join(path.suffixes))
        for old in sorted(alike, key=lambda entry: entry.stat().st_mtime)[:-_ENTRIES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.info("%s is not kept: %s", path.name, error)
