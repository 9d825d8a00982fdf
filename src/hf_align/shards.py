"""Writing checkpoints: a plan of shards made from shapes alone, and an atomic writer.

The names of all files are known before anything is computed, and each appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_align.checkpoint import INDEX, NAMES, SINGLE, bytes_of
from hf_align.errors import CheckpointError, OutputError

_WORK, _PLAN = ".hf-align", "plan.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Shard:
    """One file to be: its name and its tensors in the order of their bytes."""

    file: str
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @property
    def nbytes(self) -> int:
        return sum(bytes_of(shape, dtype) for _, shape, dtype in self.tensors)

    @property
    def header(self) -> bytes:
        """The safetensors header, length prefix included, padded to 8 bytes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape, dtype in self.tensors:
            end = offset + bytes_of(shape, dtype)
            entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class ShardPlan:
    """Which tensor goes into which file, decided from shapes before anything is computed."""

    shards: tuple[Shard, ...]

    @classmethod
    def build(cls, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], max_shard_size: str) -> ShardPlan:
        """Fill shards in order up to a size such as "5GB", in the file layout of `save_pretrained`.

        Raises:
            OutputError: the size is not understood.
        """
        limit = _parse_size(max_shard_size)
        groups: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
        filled = 0
        for name, shape, dtype in tensors:
            size = bytes_of(shape, dtype)
            if groups[-1] and filled + size > limit:
                groups.append([])
                filled = 0
            groups[-1].append((name, tuple(shape), dtype))
            filled += size
        count = len(groups)
        files = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        # Wide types first keeps every tensor aligned, as in safetensors' own writer.
        ordered = [tuple(sorted(group, key=lambda t: (-t[2].itemsize, t[0]))) for group in groups]
        return cls(tuple(Shard(file, group) for file, group in zip(files, ordered, strict=True)))

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.shards)

    def index(self) -> dict[str, Any]:
        """The contents of model.safetensors.index.json."""
        weight_map = {name: s.file for s in self.shards for name, _, _ in s.tensors}
        return {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}


def write_shards(
    plan: ShardPlan,
    produce: Callable[[str], Tensor],
    folder: Path,
    *,
    fingerprint: str,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write every shard: temporary file, fsync, rename. A run that was killed goes on where it stopped.

    Args:
        produce: computes one tensor, of the planned shape and dtype.
        fingerprint: of inputs and options; shards of a run with another one are never kept.
        overwrite: replace the weights in a folder that another run has filled or begun.
        progress: called with the bytes of each tensor as it is written, and with those of the shards that are kept.

    Raises:
        OutputError: the folder is not writable, not empty, in use by another run, begun with other inputs, or the disk
            is too small; nothing is computed then, and the folder stays as it was.
        CheckpointError: from `produce`; what was written is removed, since no later run could go on with it.
    """
    with _claimed(folder) as work:
        missing = _begin(plan, folder, work, fingerprint, overwrite)
        if progress is not None:
            progress(plan.nbytes - sum(s.nbytes for s in missing))
        try:
            for shard in missing:
                _write_shard(shard, produce, folder, work, progress)
        except CheckpointError:
            _remove(_weight_files(folder) | {work / _PLAN})
            raise
        if len(plan.shards) > 1:
            text = json.dumps(plan.index(), indent=2) + "\n"
            _replace(work / INDEX, folder / INDEX, lambda file: file.write(text.encode()))
        _remove({work / _PLAN})


def _begin(plan: ShardPlan, folder: Path, work: Path, fingerprint: str, overwrite: bool) -> list[Shard]:
    """Make place for a plan, note that it is under way, and return the shards to write."""
    resumed = _may_resume(folder, work, fingerprint, overwrite)
    kept = [s for s in plan.shards if resumed and _is_complete(folder / s.file, s)]
    missing = [s for s in plan.shards if s not in kept]
    stale = (_weight_files(folder) | _weight_files(work)) - {folder / s.file for s in kept}
    _require_room(folder, sum(s.nbytes + len(s.header) for s in missing) - sum(p.stat().st_size for p in stale))
    # Before the plan is noted: a stale shard that outlived a kill here would pass for one of this run.
    _remove(stale)
    _replace(work / "begun", work / _PLAN, lambda file: file.write(json.dumps(fingerprint).encode()))
    return missing


@contextmanager
def _claimed(folder: Path) -> Iterator[Path]:
    """The work folder inside the output, locked against other runs; it stays only while it holds a plan."""
    work, is_new = folder / _WORK, not folder.exists()
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("w")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"another run is writing to {folder}") from error
        try:
            yield work
        finally:
            if not (work / _PLAN).exists():
                shutil.rmtree(work, ignore_errors=True)
                with suppress(OSError):  # it is not empty
                    if is_new:
                        folder.rmdir()


def _may_resume(folder: Path, work: Path, fingerprint: str, overwrite: bool) -> bool:
    """Whether the shards in the folder are this run's own; refuses a folder that is someone else's."""
    begun = work / _PLAN
    if begun.is_file() and begun.read_text() == json.dumps(fingerprint):
        return True
    if overwrite:
        return False
    if begun.is_file():
        raise OutputError(f"{folder} was begun with other inputs or options; choose another -o, or --overwrite")
    if any(path != work for path in folder.iterdir()):
        raise OutputError(f"{folder} is not empty; choose another -o, or --overwrite")
    return False


def _weight_files(folder: Path) -> set[Path]:
    """What `from_pretrained` would load: shards of any count, and the index."""
    patterns = (SINGLE, INDEX, "model-?????-of-?????.safetensors")
    return {path for pattern in patterns for path in folder.glob(pattern)}


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed")


def _is_complete(path: Path, shard: Shard) -> bool:
    """Renamed into place, so written whole; the header shows that it belongs to this plan."""
    if not path.is_file():
        return False
    header = shard.header
    with path.open("rb") as file:
        return path.stat().st_size == len(header) + shard.nbytes and file.read(len(header)) == header


def _write_shard(
    shard: Shard, produce: Callable[[str], Tensor], folder: Path, work: Path, progress: Callable[[int], object] | None
) -> None:
    def body(file: Any) -> None:
        file.write(shard.header)
        for name, shape, dtype in shard.tensors:
            tensor = produce(name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise OutputError(
                    f"{name} came out as {list(tensor.shape)} {tensor.dtype}, planned {list(shape)} {dtype}"
                )
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            if progress is not None:
                progress(bytes_of(shape, dtype))

    _replace(work / shard.file, folder / shard.file, body)


def _replace(temporary: Path, final: Path, body: Callable[[Any], object]) -> None:
    """Write a file so that it is whole or not there, also after a power cut."""
    try:
        with temporary.open("wb") as file:
            body(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
        directory = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise OutputError(f"{final} cannot be written: {error.strerror or error}") from error


def _parse_size(size: str) -> int:
    number, unit = size[:-2], size[-2:].upper()
    if unit in _UNITS and number.strip().replace(".", "", 1).isdigit():
        return int(float(number) * _UNITS[unit])
    if size.isdigit():
        return int(size)
    raise OutputError(f"{size!r} is no shard size; write 500MB or 5GB")
