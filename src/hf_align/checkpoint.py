"""Checkpoints: a reader that is a mapping, a plan of shards made from shapes alone, and an atomic writer.

Only headers are read until a tensor is asked for, and only one tensor is in memory while shards are written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_align.errors import CheckpointError, OutputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WORK, _PLAN = ".hf-align", "plan.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SMALL = 1 << 20
"""Bytes of a tensor that is kept in memory when its shard is dropped: gains are read with every tensor they scale."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor: dtype, shape, bytes, and the shard that holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    shard: str


class Shards(Protocol):
    """Weights that are not in the folder yet, by file name."""

    @property
    def commit(self) -> str:
        """What stands for the contents of all files."""

    def has(self, file: str) -> bool:
        """Whether there is such a file."""

    def head(self, file: str) -> tuple[bytes, int]:
        """The start of a shard, at least its header; and the size of the whole shard in bytes."""

    def fetch(self, file: str) -> Path:
        """The whole shard on this disk."""

    def drop(self, file: str) -> None:
        """Take the shard off this disk."""


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder of safetensors, by name on disk, each read when it is asked for."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo], remote: Shards | None = None) -> None:
        self.folder = folder
        self._tensors = dict(tensors)
        self._remote = remote
        self._files: dict[str, Any] = {}
        self._kept: dict[str, Tensor] = {}
        self._dropping: frozenset[str] = frozenset()
        self._unread: dict[str, set[str]] = {}

    @classmethod
    def open(cls, folder: Path, remote: Shards | None = None) -> Checkpoint:
        """Read all headers and check them against the files.

        Args:
            folder: config, index, and all shards but those that `remote` has.
            remote: gives shards when they are needed.

        Raises:
            CheckpointError: no safetensors, a shard that is missing, truncated or damaged, an index that does not
                match its shards or points outside the folder, quantised weights.
        """
        _refuse_quantised(folder)
        shards = _shards(folder, remote)
        tensors: dict[str, TensorInfo] = {}
        for shard, expected in shards.items():
            found = _read_header(folder / shard, shard, remote)
            if expected is not None and (lost := sorted(expected - found.keys())):
                raise CheckpointError(f"{folder / INDEX} promises {lost[0]} in {shard}, which does not hold it")
            tensors.update(found if expected is None else {n: found[n] for n in expected})
        return cls(folder, tensors, remote)

    def drop_when_read(self, names: Collection[str]) -> None:
        """From now on, take a shard off this disk as soon as those of these tensors that it holds have been read.

        It is fetched again when one is asked for again. Shards in a folder of the user's own stay.
        """
        self._dropping = frozenset(names)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and place of a tensor; no weights are read."""
        return self._tensors[name]

    @property
    def identity(self) -> str:
        """Digest of which files these are: another one for other shards, or for shards written since.

        No weights are read, so it is cheap for any size; a run that resumes may trust what it wrote from the same one.
        """
        digest = hashlib.sha256()
        if self._remote is not None:
            digest.update(self._remote.commit.encode())
        for shard in sorted({info.shard for info in self._tensors.values()}) if self._remote is None else ():
            path = (self.folder / shard).resolve()
            state = path.stat()
            digest.update(json.dumps([shard, str(path), state.st_size, state.st_mtime_ns]).encode())
        return digest.hexdigest()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        shard = self._tensors[name].shard
        try:
            if shard not in self._files:
                path = self._remote.fetch(shard) if self._remote is not None else self.folder / shard
                self._files[shard] = safe_open(path, "pt")
                wanted = self._dropping - self._kept.keys()
                self._unread[shard] = {n for n in wanted if self._tensors[n].shard == shard}
            tensor: Tensor = self._files[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {self.folder / shard}: {error}") from error
        if self._dropping and self._remote is not None:
            tensor = tensor.clone()  # what safetensors gives is a view of the file
            self._note_read(name, shard, tensor)
        return tensor

    def _note_read(self, name: str, shard: str, tensor: Tensor) -> None:
        if tensor.nbytes <= _SMALL:
            self._kept[name] = tensor
        self._unread[shard].discard(name)
        if not self._unread[shard]:
            del self._files[shard]
            self._remote.drop(shard)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def require_finite(name: str, tensor: Tensor, origin: str) -> Tensor:
    """The tensor, if all of its entries are finite.

    Raises:
        CheckpointError: it has NaN or infinite entries.
    """
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} in {origin} has NaN or infinite entries; this checkpoint is damaged")
    return tensor


def _refuse_quantised(folder: Path) -> None:
    config = folder / "config.json"
    if config.is_file() and _json_object(config).get("quantization_config"):
        raise CheckpointError(f"{folder} is quantised; merge the original weights and quantise the result")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON; fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch it again")
    return content


def _shards(folder: Path, remote: Shards | None) -> dict[str, set[str] | None]:
    """Shard -> the tensors that the index promises there; None where there is no index."""
    if (folder / INDEX).is_file():
        return {**_indexed(folder / INDEX)}
    if (folder / SINGLE).is_file() or (remote is not None and remote.has(SINGLE)):
        return {SINGLE: None}
    if any(folder.glob("pytorch_model*.bin*")) or (remote is not None and remote.has("pytorch_model.bin")):
        raise CheckpointError(f"{folder} has pickled weights only; convert them to safetensors first")
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; other formats must be converted first")


def _indexed(index: Path) -> dict[str, set[str]]:
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch it again")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # The path as it is written: the Hub's cache holds links out of the folder, and those are fine.
        path = PurePosixPath(shard)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{index} points outside its folder: {shard}")
        shards.setdefault(shard, set()).add(name)
    return shards


def _read_header(path: Path, shard: str, remote: Shards | None) -> dict[str, TensorInfo]:
    if remote is not None:
        return _parse_header(*remote.head(shard), path, shard)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; fetch it again")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        return _parse_header(start + file.read(min(int.from_bytes(start, "little"), size)), size, path, shard)


def _parse_header(start: bytes, size: int, path: Path, shard: str) -> dict[str, TensorInfo]:
    length = int.from_bytes(start[:8], "little")
    if length > size - 8:
        raise CheckpointError(f"{path} is truncated or no safetensors file: its header does not fit {size} bytes")
    try:
        header = json.loads(start[8 : 8 + length])
        header.pop("__metadata__", None)
        tensors = {name: _info(name, entry, path, shard) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} has no valid safetensors header; fetch it again") from error
    end = 8 + length + sum(info.nbytes for info in tensors.values())
    if size != end:
        fault = "truncated" if size < end else "damaged"
        raise CheckpointError(f"{path} is {fault}: {size} bytes where its header says {end}; fetch it again")
    return tensors


def _info(name: str, entry: dict[str, Any], path: Path, shard: str) -> TensorInfo:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{name} in {path} is stored as {entry['dtype']}; quantised weights cannot be merged")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != _nbytes(shape, dtype):
        raise ValueError(f"{name}: {end - begin} bytes for {shape} of {dtype}")
    return TensorInfo(dtype, shape, end - begin, shard)


# Writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One file to be: its name and its tensors in the order of their bytes."""

    file: str
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(shape, dtype) for _, shape, dtype in self.tensors)

    @property
    def header(self) -> bytes:
        """The safetensors header, length prefix included, padded to 8 bytes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape, dtype in self.tensors:
            end = offset + _nbytes(shape, dtype)
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
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
            size = _nbytes(shape, dtype)
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
                progress(_nbytes(shape, dtype))

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


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _parse_size(size: str) -> int:
    number, unit = size[:-2], size[-2:].upper()
    if unit in _UNITS and number.strip().replace(".", "", 1).isdigit():
        return int(float(number) * _UNITS[unit])
    if size.isdigit():
        return int(size)
    raise OutputError(f"{size!r} is no shard size; write 500MB or 5GB")
