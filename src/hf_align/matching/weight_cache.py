"""Weights that are read many times: kept while they fit into memory, else computed again each time."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from hf_align.checkpoints.ondemand import OnDemand
from hf_align.running.network import Weights
from hf_align.running.offload import room
from hf_align.runtime.devices import CPU, threads

CACHED = 2**30
"""Bytes of each model that are kept: matching reads every tensor a few times in each sweep."""
_SHARE = 0.6
"""Of what is free on an accelerator, for all models: bringing weights there takes longer than their products."""


def cached_on(device: torch.device, models: int) -> int:
    """Bytes of each of some models that are kept on a device."""
    return CACHED if device == CPU else int(_SHARE * room(device)) // models


class WeightCache(OnDemand):
    """Weights in a dtype, the first ones of `weights` that are asked for kept up to a number of bytes.

    First come, first kept: whoever goes through all tensors in the same order over and over finds none in a cache that
    lets go of the oldest.

    Args:
        most: bytes.
        device: where they are given.
    """

    def __init__(
        self, weights: Weights, names: Collection[str], dtype: torch.dtype, most: int = 0, device: torch.device = CPU
    ) -> None:
        super().__init__(names)
        self._weights = weights
        self._dtype = dtype
        self._left = most
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def fill(self) -> None:
        """Ask for all at once, in as many threads as torch has: reading waits for files."""
        if torch.get_num_threads() > 1:
            with threads(torch.get_num_threads()) as pool:
                list(pool.map(self._keep, self))

    def _keep(self, name: str) -> None:
        if self._left > 0:
            self[name]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        tensor = self._weights[name].to(self._device).to(self._dtype)  # in one step it would be cast on the CPU
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            self._kept[name] = tensor
        return tensor
