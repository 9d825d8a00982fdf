"""Several processes at one merge, started by `accelerate launch` or `torchrun`: who does what, and who went wrong.

The first process leads: it claims the output folder, matches, and writes what is small. Shards are spread over all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch

from hf_align.errors import CheckpointError, HfAlignError, OutputError

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""How long the others wait for the first to match; the launcher ends them if it dies."""
_ERRORS = {kind.__name__: kind for kind in (HfAlignError, CheckpointError, OutputError)}


@dataclass(frozen=True)
class Processes:
    """This process among `count`."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share_of(self, items: Sequence[T], size: Callable[[T], int]) -> list[T]:
        """The items that this process does: the largest first, each to whom has least to do."""
        loads = [0] * self.count
        mine = []
        for item in sorted(items, key=size, reverse=True):
            least = loads.index(min(loads))
            loads[least] += size(item)
            if least == self.rank:
                mine.append(item)
        return [item for item in items if item in mine]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Leave the block when all have left it; an error in one is an error in all.

        Raises:
            HfAlignError: that of the first process that had one.
        """
        own: HfAlignError | None = None
        try:
            yield
        except HfAlignError as error:
            own = error
        failed = own if self.count == 1 else self._first(own)
        if failed is not None:
            failed.shared = True
            raise failed

    def _first(self, own: HfAlignError | None) -> HfAlignError | None:
        from accelerate.utils import gather_object

        told = None if own is None else (type(own).__name__, str(own))
        for found in gather_object([told]):
            if found is not None:
                return _ERRORS.get(found[0], HfAlignError)(found[1])
        return None


@cache
def current() -> Processes:
    """This process, as the launcher started it; alone without one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    # Here, for a process that is alone need not wait for it to be loaded.
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_PATIENCE)
    return Processes(state.process_index, state.num_processes)
