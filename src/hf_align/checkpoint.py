"""Checkpoints: a reader that is a mapping, a plan of shards made from shapes alone, and an atomic writer.

Only headers are read until a tensor is asked for, and only one tensor is in memory while shards are written.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_align.errors import CheckpointError, OutputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WORK = ".hf-align"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor: dtype, shape, bytes, and the shard that holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    shard: str


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder of safetensors, by name on disk, each read when it is asked for."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder
        self._tensors = dict(tensors)
        self._files: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read all headers and check them against the files.

        Raises:
            CheckpointError: no safetensors, a shard that is missing or truncated, an index that does not match its
                shards or points outside the folder, quantised weights.
        """
        _refuse_quantised(folder)
        shards = _shards(folder)
        tensors: dict[str, TensorInfo] = {}
        for shard, expected in shards.items():
            found = _read_header(folder / shard, shard)
            if expected is not None and (lost := sorted(expected - found.keys())):
                raise CheckpointError(f"{folder / INDEX} promises {lost[0]} in {shard}, which does not hold it")
            tensors.update(found if expected is None else {n: found[n] for n in expected})
        return cls(folder, tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and place of a tensor; no weights are read."""
        return self._tensors[name]

    def __getitem__(self, name: str) -> Tensor:
        shard = self._tensors[name].shard
        if shard not in self._files:
            self._files[shard] = safe_open(self.folder / shard, "pt")
        tensor: Tensor = self._files[shard].get_tensor(name)
        return tensor

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
    if config.is_file() and "quantization_config" in json.loads(config.read_text(encoding="utf-8")):
        raise CheckpointError(f"{folder} is quantised; merge the original weights and quantise the result")


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """Shard -> the tensors that the index promises there; None where there is no index."""
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"{folder / INDEX} is no safetensors index") from error
        shards: dict[str, set[str] | None] = {}
        for name, shard in weight_map.items():
            path = PurePosixPath(shard)
            if path.is_absolute() or ".." in path.parts:
                raise CheckpointError(f"{folder / INDEX} points outside its folder: {shard}")
            shards.setdefault(shard, set()).add(name)  # type: ignore[union-attr]
        return shards
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(f"{folder} has pickled weights only; convert them to safetensors first")
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _read_header(path: Path, shard: str) -> dict[str, TensorInfo]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise CheckpointError(f"{path} is truncated: {size} bytes, and its header alone needs {length + 8}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has no valid safetensors header") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise CheckpointError(f"{path} is truncated or damaged: {size} bytes where its header says {end}")
    return {name: _info(name, entry, path, shard) for name, entry in header.items()}


def _info(name: str, entry: dict[str, Any], path: Path, shard: str) -> TensorInfo:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{name} in {path} is stored as {entry['dtype']}; quantised weights cannot be merged")
    begin, end = entry["data_offsets"]
    return TensorInfo(_DTYPES[entry["dtype"]], tuple(entry["shape"]), end - begin, shard)


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
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write every shard: temporary file, fsync, rename. A run that was killed goes on where it stopped.

    Args:
        produce: computes one tensor, of the planned shape and dtype.
        fingerprint: of inputs and options; a folder begun with another one is refused.
        progress: called with the bytes of each tensor as it is written.

    Raises:
        OutputError: the folder is not writable, not empty, in use by another run, begun with other inputs, or the disk
            is too small; nothing is computed then.
    """
    with _claimed(folder, fingerprint, overwrite) as work:
        missing = [s for s in plan.shards if not _is_complete(folder / s.file, s)]
        _require_room(folder, sum(s.nbytes + len(s.header) for s in missing))
        for shard in missing:
            _write_shard(shard, produce, folder, work, progress)
        if len(plan.shards) > 1:
            text = json.dumps(plan.index(), indent=2) + "\n"
            _replace(work / INDEX, folder / INDEX, lambda file: file.write(text.encode()))


@contextmanager
def _claimed(folder: Path, fingerprint: str, overwrite: bool) -> Iterator[Path]:
    """The work folder inside the output, locked; removed when all is written."""
    work = folder / _WORK
    begun = work / "plan.json"
    try:
        if folder.exists() and any(folder.iterdir()) and not begun.is_file():
            if not overwrite:
                raise OutputError(f"{folder} is not empty; choose another -o, or --overwrite")
            for old in folder.glob("model*.safetensors*"):
                old.unlink()
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("w")
    except (OSError, NotADirectoryError) as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"another run is writing to {folder}") from error
        if begun.is_file() and json.loads(begun.read_text()).get("fingerprint") != fingerprint and not overwrite:
            raise OutputError(f"{folder} was begun with other inputs or options; choose another -o, or --overwrite")
        begun.write_text(json.dumps({"fingerprint": fingerprint}))
        yield work
        shutil.rmtree(work)


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
    shard: Shard, produce: Callable[[str], Tensor], folder: Path, work: Path, progress: Callable[[int], None] | None
) -> None:
    def body(file: Any) -> None:
        file.write(shard.header)
        for name, shape, dtype in shard.tensors:
            tensor = produce(name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise OutputError(
                    f"{name} came out as {list(tensor.shape)} {tensor.dtype}, planned {list(shape)} {dtype}"
                )
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
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
