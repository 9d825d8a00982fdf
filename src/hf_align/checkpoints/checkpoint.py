"""Reading checkpoints: a folder of safetensors as a mapping. Only headers are read until a tensor is asked for.

Headers are parsed here, not by `safetensors.safe_open`: it maps the file, it tells no offsets, so that a tensor could
not be read in slices, and it takes no header that came from the Hub without its file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from hf_align.checkpoints import companions
from hf_align.checkpoints.hub import HubShards
from hf_align.checkpoints.ondemand import OnDemand
from hf_align.checkpoints.own_files import header_size, json_object, own_json, parsed
from hf_align.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST = 2**62
"""No file has as many bytes."""
_SMALL = 1 << 20
"""Bytes of a tensor that is kept in memory when its shard is dropped: gains are read with every tensor they scale."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor: dtype, shape, bytes, and the shard that holds it, from which byte on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    shard: str
    begin: int = 0


class Checkpoint(OnDemand):
    """The tensors of a folder of safetensors, by name on disk, each read when it is asked for."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo], remote: HubShards | None = None) -> None:
        self.folder = folder
        self._tensors = dict(tensors)
        super().__init__(self._tensors)
        self._remote = remote
        self._files: dict[str, FileIO] = {}
        self._kept: dict[str, Tensor] = {}
        self._dropping: frozenset[str] = frozenset()
        self._unread: dict[str, dict[str, int]] = {}
        self._one_thread = threading.RLock()

    @classmethod
    def open(cls, folder: Path, remote: HubShards | None = None) -> Checkpoint:
        """Read all headers and check them against the files.

        Args:
            folder: config, index, and all shards but those that `remote` has.
            remote: gives shards when they are needed.

        Raises:
            CheckpointError: no safetensors, a shard that is missing, truncated or damaged, an index that does not
                match its shards or points outside the folder, quantised weights.
        """
        _refuse_quantised(folder, remote)
        shards = _shards(folder, remote)
        tensors: dict[str, TensorInfo] = {}
        listed = frozenset[str]().union(*filter(None, shards.values()))
        headers = {shard: _read_header(folder / shard, shard, remote) for shard in shards}
        for shard, expected in shards.items():
            if expected is not None and (lost := sorted(expected - headers[shard].keys())):
                raise CheckpointError(f"{folder / INDEX} lists {lost[0]} in {shard}, which does not contain it")
        for shard, expected in shards.items():  # now that all are where they are listed
            found = headers[shard]
            if expected is not None and (twice := sorted(listed & found.keys() - expected)):
                raise CheckpointError(
                    f"{twice[0]} is stored in {folder / shard}, and in the shard that {INDEX} lists it in; which of "
                    "them is loaded depends on their order"
                )
            tensors.update(found if expected is None else {n: found[n] for n in expected})
        return cls(folder, tensors, remote)

    @classmethod
    def of_file(cls, folder: Path, file: str, remote: HubShards | None = None) -> Checkpoint:
        """One file of safetensors, whatever it is called.

        Raises:
            CheckpointError: it is missing, truncated or damaged.
        """
        if not (folder / file).is_file() and not (remote is not None and remote.has(file)):
            raise CheckpointError(f"{folder} has no {file}; other formats must be converted first")
        return cls(folder, _read_header(folder / file, file, remote), remote)

    @classmethod
    def of_files(cls, files: Collection[Path]) -> Checkpoint:
        """Shards in one folder, without an index.

        Raises:
            CheckpointError: one is truncated or damaged.
        """
        tensors = {n: info for file in files for n, info in _read_header(file, file.name, None).items()}
        return cls(next(iter(files)).parent, tensors)

    def drop_when_read(self, names: Collection[str]) -> None:
        """From now on, take a shard off this disk as soon as those of these tensors that it holds have been read.

        It is fetched again when one is asked for again. Shards in a folder of the user's own stay.
        """
        self._dropping = frozenset(names)

    def drop(self) -> None:
        """Take shards off this disk that came from the Hub, read or not. Those in a folder of the user's own stay."""
        if self._remote is None:
            return
        with self._one_thread:
            for shard in {info.shard for info in self._tensors.values()}:
                if (file := self._files.pop(shard, None)) is not None:
                    file.close()
                self._remote.drop(shard)

    @property
    def bytes_to_fetch(self) -> int:
        """Of the tensors, those in shards that are not on this disk yet."""
        if self._remote is None:
            return 0
        absent = {s for s in {info.shard for info in self._tensors.values()} if not self._remote.is_here(s)}
        return sum(info.nbytes for info in self._tensors.values() if info.shard in absent)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and place of a tensor; no weights are read."""
        return self._tensors[name]

    @property
    def entries_in_all(self) -> int:
        """How many numbers the tensors have."""
        return sum(math.prod(info.shape) for info in self._tensors.values())

    @property
    def digests(self) -> dict[str, str]:
        """What the tensors depend on, by name: the commit, or shard -> digest of its header, size, path and time of
        writing.

        No weights are read, so it is cheap for any size: it tells other shards, and shards written since, but no bit
        that the disk has turned.
        """
        if self._remote is not None:
            return {"commit": self._remote.commit}
        shards = sorted({info.shard for info in self._tensors.values()})
        return {shard: _digest((self.folder / shard).resolve()) for shard in shards}

    def record(self, reference: str, config: str = "config.json") -> dict[str, str]:
        """What a result made from it depends on: `digests`, and those of its config and of what is copied, by the
        user's name for it."""
        own = {config: hashlib.sha256((self.folder / config).read_bytes()).hexdigest()}
        if self._remote is None:
            own["files beside the weights"] = companions.digest(self.folder)
        return {f"{reference}/{what}": digest for what, digest in {**own, **self.digests}.items()}

    def __getitem__(self, name: str) -> Tensor:
        info = self._tensors[name]
        return self.entries(name, 0, math.prod(info.shape)).view(info.shape)

    def entries(self, name: str, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        """Entries [start, stop) of a tensor laid out flat, [stop - start]; from any thread.

        They are copied out of the file and not mapped: pages of a mapped file count as this process' memory for as long
        as the system likes, and a file that shrinks would end the process.

        Args:
            into: uint8 memory to use again, at least as many bytes; by default new memory.

        Raises:
            CheckpointError: the file cannot be read, or has shrunk.
        """
        info = self._tensors[name]
        if name in self._kept:
            return self._kept[name][start:stop]
        size = (stop - start) * info.dtype.itemsize
        raw = torch.empty(size, dtype=torch.uint8, device="cpu") if into is None else into[:size]
        self._fill(name, raw, info.begin + start * info.dtype.itemsize)
        if self._dropping and self._remote is not None:
            self._note_read(name, raw.view(info.dtype))
        return raw.view(info.dtype)

    def _fill(self, name: str, raw: Tensor, begin: int) -> None:
        shard = self._tensors[name].shard
        view, done = raw.numpy().data, 0
        try:
            file = self._file(shard)
            while done < len(view) and (count := os.preadv(file, [view[done:]], begin + done)):
                done += count
        except OSError as error:
            raise CheckpointError(
                f"{name} cannot be read from {self.folder / shard}: {error.strerror or error}"
            ) from error
        if done < len(view):
            raise CheckpointError(f"{name} cannot be read from {self.folder / shard}: the file has become shorter")

    def _file(self, shard: str) -> int:
        with self._one_thread:
            if shard not in self._files:
                path = self._remote.fetch(shard) if self._remote is not None else self.folder / shard
                self._files[shard] = path.open("rb", buffering=0)
                wanted = self._dropping - self._kept.keys()
                self._unread[shard] = {n: math.prod(self._tensors[n].shape) for n in wanted
                                       if self._tensors[n].shard == shard}  # fmt: skip
            return self._files[shard].fileno()

    def _note_read(self, name: str, part: Tensor) -> None:
        """Count what is left to be read of a shard, in tensors that may come in parts, and drop it after the last."""
        info = self._tensors[name]
        with self._one_thread:
            left = self._unread[info.shard]
            if name in left:
                left[name] -= len(part)
                if left[name] <= 0:
                    del left[name]
            if part.nbytes == info.nbytes <= _SMALL:
                self._kept[name] = part.clone()
            if not left:
                self._files.pop(info.shard).close()
                self._remote.drop(info.shard)  # type: ignore[union-attr]


def require_finite(name: str, tensor: Tensor, origin: str) -> Tensor:
    """The tensor, if all of its entries are finite.

    Raises:
        CheckpointError: it has NaN or infinite entries.
    """
    if not is_finite(tensor):
        raise CheckpointError(f"{name} in {origin} has NaN or infinite entries; this checkpoint is damaged")
    return tensor


def require_numbers(name: str, tensor: Tensor, origin: str) -> Tensor:
    """The tensor, if none of its entries is NaN.

    Raises:
        CheckpointError: one is.
    """
    if bool(tensor.isnan().any()):
        raise CheckpointError(f"{name} in {origin} has NaN entries; this checkpoint is damaged")
    return tensor


def require_held(name: str, tensor: Tensor) -> Tensor:
    """The tensor that is written, if its dtype can hold what was computed of finite ones.

    Raises:
        CheckpointError: it has NaN or infinite entries.
    """
    if not is_finite(tensor):
        if bool(tensor.isnan().any()):  # rounding makes none of numbers
            raise CheckpointError(
                f"{name} comes to NaN, though all models are finite: see the method and its parameters"
            )
        raise CheckpointError(
            f"{name} has entries that {tensor.dtype} cannot hold; choose another --dtype, or other parameters"
        )
    return tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite: in one pass, without a mask of the tensor's size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    least, largest = torch.aminmax(tensor.detach())
    return math.isfinite(least) and math.isfinite(largest)


def _named(folder: Path, remote: HubShards | None) -> str:
    """What a user knows a checkpoint by: no folder of the cache."""
    return str(folder) if remote is None else remote.repository


def _refuse_quantised(folder: Path, remote: HubShards | None) -> None:
    if (own_json(folder, "config.json") or {}).get("quantization_config"):
        raise CheckpointError(
            f"{_named(folder, remote)} is quantised; merge the original weights and quantise the result"
        )


def _shards(folder: Path, remote: HubShards | None) -> dict[str, set[str] | None]:
    """Shard -> the tensors that the index promises there; None for a file of its own, which is what `from_pretrained`
    reads where there is an index, too."""
    if (folder / SINGLE).is_file() or (remote is not None and remote.has(SINGLE)):
        return {SINGLE: None}
    if (folder / INDEX).is_file():
        return {**_indexed(folder / INDEX)}
    if any(folder.glob("pytorch_model*.bin*")) or (remote is not None and remote.has("pytorch_model.bin")):
        raise CheckpointError(f"{_named(folder, remote)} has pickled weights only; convert them to safetensors first")
    raise CheckpointError(
        f"{_named(folder, remote)} has neither {SINGLE} nor {INDEX}; other formats must be converted first"
    )


def _indexed(index: Path) -> dict[str, set[str]]:
    weight_map = json_object(index.read_bytes(), index).get("weight_map")
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


def _read_header(path: Path, shard: str, remote: HubShards | None) -> dict[str, TensorInfo]:
    if remote is not None:
        return _parse_header(*remote.head(shard), path, shard)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; fetch it again")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        return _parse_header(start + file.read(header_size(start, path)), size, path, shard)


def _parse_header(start: bytes, size: int, path: Path, shard: str) -> dict[str, TensorInfo]:
    length = header_size(start, path)
    if length > size - 8:
        raise CheckpointError(f"{path} is truncated or not a safetensors file: its header does not fit {size} bytes")
    try:
        header = parsed(start[8 : 8 + length])
        header.pop("__metadata__", None)
        tensors = {name: _info(name, entry, path, shard, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} has no valid safetensors header; fetch it again") from error
    end = 8 + length
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.nbytes)):
        if info.begin != end:
            raise CheckpointError(
                f"{path} is damaged: its header has tensors that overlap or leave gaps; fetch it again"
            )
        end += info.nbytes
    if size != end:
        fault = "truncated" if size < end else "damaged"
        raise CheckpointError(f"{path} is {fault}: {size} bytes where its header says {end}; fetch it again")
    return tensors


def _info(name: str, entry: dict[str, Any], path: Path, shard: str, data: int) -> TensorInfo:
    """One entry of a header, in the file whose tensors begin at byte `data`.

    Raises:
        CheckpointError: a dtype of quantised weights.
        ValueError: shape and bytes do not fit.
    """
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{name} in {path} is stored as {entry['dtype']}; quantised weights cannot be merged")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < _LARGEST for number in (*shape, begin, end)):
        raise ValueError(f"{name}: {shape} is not a shape")
    if end - begin != bytes_of(shape, dtype):
        raise ValueError(f"{name}: {end - begin} bytes for {shape} of {dtype}")
    return TensorInfo(dtype, shape, end - begin, shard, data + begin)


def _digest(path: Path) -> str:
    state = path.stat()
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    where = json.dumps([str(path), state.st_size, state.st_mtime_ns]).encode()
    return hashlib.sha256(where + header).hexdigest()


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The size of a dense tensor."""
    return math.prod(shape) * dtype.itemsize
