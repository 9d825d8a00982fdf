"""What mergekit has written, held against the models that it has read before it becomes part of the result.

mergekit writes whatever its methods come to, also where weights of nothing are divided by their sum.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path

import torch
from torch import Tensor

from hf_align.checkpoints.checkpoint import Checkpoint, TensorInfo, is_finite, require_finite, require_held
from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.hub import Source

_SLICE = 2**22
"""Entries at a time, so that no tensor is in memory as a whole."""


def take(folder: Path, claim: Claim, sources: Sequence[Source]) -> None:
    """Make all that mergekit has written part of the result.

    Args:
        sources: the models that buffers in it come from.

    Raises:
        CheckpointError: a tensor has entries that are no numbers, or infinite ones that are not the models' own.
    """
    with claim.refusing():
        claim.processes.by_the_first(lambda: require_numbers_in(folder, sources))
    if claim.processes.leads:
        for file in folder.iterdir():
            os.replace(file, claim.documents / file.name)


def require_numbers_in(folder: Path, sources: Sequence[Source]) -> None:
    """See that a merged checkpoint has numbers only, but for limits that nothing reaches, which its models have, too.

    Raises:
        CheckpointError: it has others.
    """
    written, models = Checkpoint.open(folder), _Models(sources)
    memory = torch.empty(_SLICE * torch.float64.itemsize, dtype=torch.uint8, device="cpu")
    for name in written:
        info = written.info(name)
        if not info.dtype.is_floating_point:
            continue
        for start, stop in _slices(info):
            part = written.entries(name, start, stop, memory)
            if not is_finite(part):
                models.require_limits(name, info, start, part)


@dataclass(frozen=True)
class _Models:
    """The models of a merge, which are opened only where something of it is not finite."""

    sources: Sequence[Source]

    @cached_property
    def _checkpoints(self) -> dict[str, Checkpoint]:
        """By what the user calls them."""
        return {source.reference: Checkpoint.open(source.folder, source.shards) for source in self.sources}

    def require_limits(self, name: str, info: TensorInfo, start: int, part: Tensor) -> None:
        """See that all that is infinite in a part of a tensor is so in the models, from the same entry on.

        Raises:
            CheckpointError: something is not; it is the models' fault where one has NaN, or is infinite alone.
        """
        alike = [name, *(n for n in self._alike(name) if n != name)]
        owner = next((n for n in alike if self._having(n, info)), name)
        stored = self._entries(owner, info, start, start + len(part))
        rest = part[~_limits([part, *stored.values()])] if stored else part
        if is_finite(rest):
            return
        for other in alike:  # of layers that are stacked, any may be where the fault comes from
            self._require_finite(other)
        require_held(name, rest)

    def _require_finite(self, name: str) -> None:
        """See that a tensor is finite in all models that store it, but for the limits that they share."""
        for info in {c.info(name).shape: c.info(name) for c in self._checkpoints.values() if name in c}.values():
            for start, stop in _slices(info):
                found = self._entries(name, info, start, stop)
                limits = _limits([*found.values()])
                for reference, tensor in found.items():
                    require_finite(name, tensor[~limits], reference)

    def _entries(self, name: str, info: TensorInfo, start: int, stop: int) -> dict[str, Tensor]:
        """Entries of a tensor in each of the models that store it."""
        return {reference: c.entries(name, start, stop) for reference, c in self._having(name, info).items()}

    def _having(self, name: str, info: TensorInfo) -> dict[str, Checkpoint]:
        """The models that store a tensor of this name and shape."""
        return {r: c for r, c in self._checkpoints.items() if name in c and c.info(name).shape == info.shape}

    def _alike(self, name: str) -> list[str]:
        """Tensors of the same name in any layer of the models, for layers are numbered anew where they are stacked."""
        stored = {n for checkpoint in self._checkpoints.values() for n in checkpoint}
        return sorted(n for n in stored if _without_numbers(n) == _without_numbers(name))


def _limits(tensors: Sequence[Tensor]) -> Tensor:
    """Where all are infinite alike."""
    first = tensors[0]
    return reduce(torch.logical_and, (first == other for other in tensors[1:]), first.isinf())


def _slices(info: TensorInfo) -> Iterator[tuple[int, int]]:
    count = math.prod(info.shape)
    for start in range(0, count, _SLICE):
        yield start, min(start + _SLICE, count)


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+\.", ".#.", name)
