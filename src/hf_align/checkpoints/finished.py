"""Whether a folder holds a whole model, before anyone else sees it."""

from __future__ import annotations

from pathlib import Path

from hf_align.checkpoints.adapters import WEIGHTS
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.claim import COMPLETE, PLAN, WORK
from hf_align.errors import CheckpointError, OutputError


def require_whole(folder: Path, *, adapter: bool) -> None:
    """See that no run is still to go on in a folder, and that all weights are there.

    Args:
        adapter: whether it holds an adapter, and no whole model.

    Raises:
        OutputError: it is not whole.
    """
    if (folder / WORK / PLAN).exists() and not (folder / COMPLETE).exists():
        raise OutputError(f"{folder} is not finished; start the command that writes it once more")
    try:
        Checkpoint.of_file(folder, WEIGHTS) if adapter else Checkpoint.open(folder)
    except CheckpointError as error:
        raise OutputError(f"{folder} is not whole, and nothing is uploaded: {error}") from error
