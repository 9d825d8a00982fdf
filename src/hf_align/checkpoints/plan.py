"""Which tensor goes into which file: a plan of shards made from shapes alone.

`huggingface_hub.split_state_dict_into_shards_factory` gives a tensor that is larger than a shard a file before those of
its neighbours. Here files follow the order of the tensors, in which they are computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_align.checkpoints.checkpoint import NAMES, SINGLE, bytes_of
from hf_align.settings.options import bytes_in


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

    @property
    def file_size(self) -> int:
        """Bytes of the file, its header included."""
        return len(self.header) + self.nbytes

    def begins(self, path: Path) -> bool:
        """Whether a file begins as this one: the header shows that it belongs to this plan."""
        with path.open("rb") as file:
            return file.read(len(self.header)) == self.header


@dataclass(frozen=True)
class ShardPlan:
    """Which tensor goes into which file, decided from shapes before anything is computed."""

    shards: tuple[Shard, ...]

    @classmethod
    def build(cls, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], max_shard_size: str) -> ShardPlan:
        """Fill shards in order up to a size such as "5GB", in the file layout of `save_pretrained`.

        Raises:
            OptionError: the size is not understood.
        """
        limit = bytes_in(max_shard_size)
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
