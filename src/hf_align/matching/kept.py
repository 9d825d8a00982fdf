"""Weights that are read many times: kept while they fit into memory, else computed again each time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hf_align.devices import CPU

KEPT = 2**30
"""Bytes of each model that are kept: matching reads every tensor a few times in each sweep."""


class KeptWeights(Mapping[str, Tensor]):
    """Weights as float64, the first ones of `weights` that are asked for kept up to a number of bytes.

    First come, first kept: whoever goes through all tensors in the same order over and over finds none in a cache that
    lets go of the oldest.

    Args:
        device: where they are given.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], names: Iterable[str], most: int, device: torch.device = CPU
    ) -> None:
        self._weights = weights
        self._names = tuple(names)
        self._left = most
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        tensor = self._weights[name].to(self._device, torch.float64)
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            self._kept[name] = tensor
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
