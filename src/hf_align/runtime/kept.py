"""The folder of what was found out once, and is true as long as the code is the same."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import constants

VARIABLE = "HF_ALIGN_CACHE"
"""The environment variable that names another folder, or is `off`."""


def kept_folder() -> Path | None:
    """None where nothing is to be kept."""
    named = os.environ.get(VARIABLE, "")
    if named.lower() in ("off", "0", "no", "false"):
        return None
    return Path(named) if named else Path(constants.HF_HOME) / "hf-align" / "specs"
