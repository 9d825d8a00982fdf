"""Weights that are found one by one, each put aside as it is found."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from hf_align.checkpoints.claim import Claim
from hf_align.runtime.saving import read_tensors, save_tensors

_FOUND = "found"


class KeptWeights(MutableMapping[str, Tensor]):
    """Weights by name, in files of a claim: a run with the same record finds those that were found before.

    Args:
        names: that there may be.
        called: how the names of the files begin.
    """

    def __init__(self, claim: Claim, names: Sequence[str], called: str = "solved") -> None:
        self._claim = claim
        self._whole = f"{called}.safetensors"
        self._files = {name: f"{called}-{number}.safetensors" for number, name in enumerate(names)}

    @property
    def is_whole(self) -> bool:
        """Whether no more will be found, and all that was is still there."""
        path = self._claim.kept(self._whole)
        if path is None:
            return False
        with safe_open(path, "pt") as file:
            return all(name in self for name in json.loads(file.metadata()[_FOUND]))

    def close(self) -> None:
        """Note that no more will be found."""
        self._claim.keep(self._whole, partial(save_tensors, {}, metadata={_FOUND: json.dumps(list(self))}))

    def __getitem__(self, name: str) -> Tensor:
        return read_tensors(self._path(name))[name]

    def __setitem__(self, name: str, weight: Tensor) -> None:
        self._claim.keep(self._files[name], partial(save_tensors, {name: weight.contiguous()}))

    def __delitem__(self, name: str) -> None:
        self._path(name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._files if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._files and self._claim.kept(self._files[name]) is not None

    def _path(self, name: str) -> Path:
        path = self._claim.kept(self._files[name])
        if path is None:
            raise KeyError(name)
        return path
