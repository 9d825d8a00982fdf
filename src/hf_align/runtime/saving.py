"""Files of tensors, written so that what the system refuses is an error of the system."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_NUMBER = re.compile(r"\(os error (\d+)\)")


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """As `safetensors.torch.save_file`, which says of a full disk only in its own words that it is full.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        if (number := _NUMBER.search(str(error))) is None:
            raise
        raise _of_system(int(number[1]), path) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `save_tensors` wrote, in memory of its own: in a file tensors begin anywhere, and on where its factors begin
    depends the last place of a product, which would not be that of tensors that were computed."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def save_state(state: Mapping[str, object], path: Path) -> None:
    """As `torch.save`, which does not say that a disk is full.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        with path.open("wb") as file:
            torch.save(dict(state), file)
    except (OSError, RuntimeError) as error:
        refused = error if isinstance(error, OSError) else error.__context__
        if not isinstance(refused, OSError) or refused.errno is None:
            raise
        raise _of_system(refused.errno, path) from error


def _of_system(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
