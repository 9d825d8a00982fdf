"""Writing shards: every tensor into its place, and every file whole or not at all."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor

from hf_align.checkpoints.checkpoint import INDEX
from hf_align.checkpoints.claim import Claim, sync
from hf_align.checkpoints.plan import Shard, ShardPlan
from hf_align.errors import CheckpointError, OutputError
from hf_align.runtime.devices import threads


@dataclass(frozen=True)
class Source:
    """Where the entries of tensors come from.

    Attributes:
        entries: (name, start, stop) -> the entries [start, stop) of a tensor laid out flat, in the planned dtype.
        most: entries that are asked for at once; None for whole tensors, in their shape.
        threads: that may ask at once.
    """

    entries: Callable[[str, int, int], Tensor]
    most: int | None = None
    threads: int = 1


def whole(produce: Callable[[str], Tensor]) -> Source:
    """A source of whole tensors, computed one after the other."""
    return Source(lambda name, start, stop: produce(name))


def write_with_bar(claim: Claim, plan: ShardPlan, source: Source, *, quiet: bool) -> None:
    """`write_shards`, with a progress bar on the process that leads."""
    hidden = quiet or not claim.processes.leads
    with tqdm(total=plan.nbytes, desc="writing", unit="B", unit_scale=True, disable=hidden) as bar:
        write_shards(claim, plan, source, bar.update)


def write_shards(
    claim: Claim, plan: ShardPlan, source: Source, progress: Callable[[int], object] | None = None
) -> None:
    """Write every shard: temporary file, fsync, rename. A run that was killed goes on where it stopped.

    Files have their full size from the start, and every tensor, or part of one, is written into its place when it is
    ready. A shard reaches the disk while the next one is computed.

    Args:
        progress: called with bytes as they are written, and with those of the shards that are kept.

    Raises:
        OutputError: the disk is too small or fails, or a tensor is not as planned.
        CheckpointError: from the source; what was written is removed, since no later run could go on with it.
    """
    processes = claim.processes
    with processes.together():
        missing = claim.missing(plan)
        claim.require_room(plan)
    with processes.together():
        if processes.leads:
            claim.begin(plan)
    if progress is not None:
        progress(plan.nbytes - sum(s.nbytes for s in missing))
    try:
        with processes.together():
            _write_files(claim, processes.share_of(missing, lambda s: s.nbytes), source, progress)
    except CheckpointError:
        if processes.leads:
            claim.forget()
        raise
    if len(plan.shards) > 1 and processes.leads:
        (claim.documents / INDEX).write_text(json.dumps(plan.index(), indent=2) + "\n", encoding="utf-8")


def _write_files(claim: Claim, shards: list[Shard], source: Source, progress: Callable[[int], object] | None) -> None:
    with ThreadPoolExecutor(1) as finisher:
        finished = []
        for shard in shards:
            _fill(claim, shard, source, progress)
            finished.append(finisher.submit(_finish, claim, shard))
        for done in finished:
            done.result()


@dataclass(frozen=True)
class _Piece:
    """Entries [start, stop) of a tensor, the shape in which they come, and the byte of the file where they go."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: int


def _pieces(shard: Shard, most: int | None) -> Iterator[_Piece]:
    at = len(shard.header)
    for name, shape, dtype in shard.tensors:
        size = math.prod(shape)
        for start in range(0, max(size, 1), most or max(size, 1)):
            stop = min(size, start + (most or size))
            yield _Piece(name, start, stop, (stop - start,) if most else shape, dtype, at + start * dtype.itemsize)
        at += size * dtype.itemsize


def _fill(claim: Claim, shard: Shard, source: Source, progress: Callable[[int], object] | None) -> None:
    """Write the temporary file of a shard."""
    # Taking the next piece of a list is atomic, so threads need no queue.
    pieces = iter(list(_pieces(shard, source.most)))
    counting = threading.Lock()

    def work(file: int) -> None:
        try:
            for piece in pieces:
                _put(file, _planned(piece, source.entries(piece.name, piece.start, piece.stop)), piece.at)
                if progress is not None:
                    with counting:
                        progress((piece.stop - piece.start) * piece.dtype.itemsize)
        finally:  # after an error the other threads find no piece any more
            deque(pieces, maxlen=0)

    with claim.failing(shard.file), (claim.work / shard.file).open("wb", buffering=0) as file:
        _reserve(file.fileno(), len(shard.header) + shard.nbytes)
        os.pwrite(file.fileno(), shard.header, 0)
        _in_threads(lambda: work(file.fileno()), source.threads)


def _reserve(file: int, size: int) -> None:
    """Take the room for a file all at once, so that a full disk is noticed before anything is computed.

    macOS has no call for that, and is told the size alone.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _planned(piece: _Piece, tensor: Tensor) -> Tensor:
    if tuple(tensor.shape) != piece.shape or tensor.dtype != piece.dtype:
        found = f"{list(tensor.shape)} {tensor.dtype}"
        raise OutputError(f"{piece.name} came out as {found}, planned {list(piece.shape)} {piece.dtype}")
    return tensor


def _in_threads(work: Callable[[], None], count: int) -> None:
    """Run the same work in several threads; the first error is raised when all have stopped."""
    if count == 1:
        return work()
    with threads(count) as pool:
        for done in [pool.submit(work) for _ in range(count)]:
            done.result()


def _put(file: int, tensor: Tensor, at: int) -> None:
    view, done = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, 0
    while done < len(view):
        done += os.pwrite(file, view[done:], at + done)


def _finish(claim: Claim, shard: Shard) -> None:
    """Bring a shard to its place; also after a power cut it is whole or not there."""
    with claim.failing(shard.file):
        sync(claim.work / shard.file)
        os.replace(claim.work / shard.file, claim.folder / shard.file)
        sync(claim.folder)
