"""Several processes at one merge, started by `accelerate launch` or `torchrun`: who does what, and who went wrong.

The first process leads: it claims the output folder, and writes what is small. Layers and spaces are matched, and
shards are written, by all of them; what one has found all are told, so that every process goes the same way.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from hf_align.errors import CheckpointError, HfAlignError, IncompatibleModels, OutputError

T = TypeVar("T")
R = TypeVar("R")

_PATIENCE = timedelta(days=7)
"""How long processes wait for each other; the launcher ends them if one dies."""
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where launchers say how many there are."""
_ERRORS = {kind.__name__: kind for kind in (HfAlignError, CheckpointError, IncompatibleModels, OutputError)}


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
        sizes = [size(item) for item in items]
        return [item for item, rank in zip(items, self._ranks(sizes), strict=True) if rank == self.rank]

    def _ranks(self, sizes: Sequence[int]) -> list[int]:
        """Which process does each item."""
        loads, ranks = [0] * self.count, [0] * len(sizes)
        for at in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            ranks[at] = loads.index(min(loads))
            loads[ranks[at]] += sizes[at]
        return ranks

    def spread(
        self, items: Sequence[T], size: Callable[[T], int], work: Callable[[Sequence[T]], Sequence[R]]
    ) -> list[R]:
        """What comes of all items, in their order and on every process; each is worked on by one of them.

        All processes call it, with the same items.

        Args:
            work: from the items of a process to what comes of them, in order; it calls nothing that processes share.

        Raises:
            HfAlignError: that of the first process that had one.
        """
        if self.count == 1:
            return list(work(items))
        sizes = [size(item) for item in items]
        ranks = self._ranks(sizes)
        own: tuple[str, str] | None = None
        found: Sequence[R] = ()
        try:
            found = work([item for item, rank in zip(items, ranks, strict=True) if rank == self.rank])
        except HfAlignError as error:
            own = _told(error)
        told = [_from(rank, (own, found)) for rank in range(self.count)]
        if (failed := next((error for error, _ in told if error is not None), None)) is not None:
            raise _again(failed)
        results = [iter(results) for _, results in told]
        return [next(results[rank]) for rank in ranks]

    def in_order(self, items: Sequence[T], work: Callable[[T], R]) -> Iterator[R]:
        """What comes of item after item, on every process: as many at a time as there are processes, so that a sum of
        them has the same terms in the same order for any number of processes, and none holds them all."""
        for start in range(0, len(items), self.count):
            yield from self.spread(items[start : start + self.count], lambda _: 1, lambda own: [work(i) for i in own])

    def by_the_first(self, work: Callable[[], R]) -> R:
        """What the first process finds, on every process."""
        return self.spread([work], lambda _: 1, lambda own: [do() for do in own])[0]

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
        if self.count == 1:
            if own is not None:
                own.shared = True
                raise own
            return
        from accelerate.utils import gather_object

        for found in gather_object([None if own is None else _told(own)]):
            if found is not None:
                raise _again(found)


ALONE = Processes()


def _told(error: HfAlignError) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _again(told: tuple[str, str]) -> HfAlignError:
    """An error that another process told of."""
    error = _ERRORS.get(told[0], HfAlignError)(told[1])
    error.shared = True
    return error


def _from(rank: int, own: Any) -> Any:
    """What a process has to say, on all of them."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([own], from_process=rank)[0]


@cache
def current() -> Processes:
    """This process, as the launcher started it; alone without one."""
    if max(int(os.environ.get(size, "1")) for size in _SIZES) == 1:
        return Processes()
    # Here, for a process that is alone need not wait for them to be loaded.
    import torch
    from accelerate import PartialState

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # What is told is on the CPU, and several processes may share a GPU, which NCCL refuses.
    told_by = {"backend": "gloo"} if accelerator is None or accelerator.type == "cuda" else {}
    state = PartialState(cpu=accelerator is None, timeout=_PATIENCE, **told_by)
    # A thread of theirs that outlives the interpreter aborts it when all is done.
    atexit.register(state.destroy_process_group)
    return Processes(state.process_index, state.num_processes)


def alone_by_mistake() -> str | None:
    """What to say where `accelerate launch` was asked for several processes, and started one.

    Without a GPU it does so unless it is told `--multi_gpu`, and leaves no more behind than where they would have met.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    if not launched or any(size in os.environ for size in _SIZES):
        return None
    return (
        "accelerate launch was asked for several processes and has started one, which does all the work; without GPUs "
        "it needs --multi_gpu beside --num_processes (they talk through gloo), or use torchrun --nproc-per-node"
    )
