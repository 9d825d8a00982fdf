"""The tensors of a checkpoint, each read when it is asked for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_align.checkpoints.dtypes import Dtype, Raw
from hf_align.checkpoints.stored import Stored
from hf_align.errors import CheckpointError
from hf_align.ondemand import OnDemand


class Checkpoint(Stored, OnDemand):
    """The tensors of a folder of safetensors, by name on disk."""

    def __getitem__(self, name: str) -> Tensor:
        info = self.info(name)
        return self.entries(name, 0, math.prod(info.shape)).view(info.shape)

    def entries(self, name: str, start: int, stop: int) -> Tensor:
        """Entries [start, stop) of a tensor laid out flat, [stop - start]; from any thread.

        Raises:
            CheckpointError: the file cannot be read, or has shrunk.
        """
        return tensor_of(self.raw(name, start, stop), self.info(name).dtype)


def tensor_of(raw: Raw, dtype: Dtype) -> Tensor:
    """Stored entries as a tensor, flat, in the same memory."""
    return torch.from_numpy(raw.view(dtype.bits)).view(dtype.in_torch)


def require_finite(name: str, tensor: Tensor, origin: str) -> Tensor:
    """The tensor, if all of its entries are finite.

    Raises:
        CheckpointError: it has NaN or infinite entries.
    """
    if not is_finite(tensor):
        raise CheckpointError(f"{name} in {origin} has NaN or infinite entries; this checkpoint is damaged")
    return tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite: in one pass, without a mask of the tensor's size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    least, largest = torch.aminmax(tensor)
    return math.isfinite(least) and math.isfinite(largest)
