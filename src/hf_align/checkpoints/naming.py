"""Names on disk and names in memory.

A checkpoint may be older than the modelling code that reads it, or store experts one by one that the code fuses;
transformers renames and converts on loading. The spec speaks of tensors in memory; what is written keeps the names and
the layout of the checkpoint it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from hf_align.checkpoints.checkpoint import Checkpoint, TensorInfo, require_finite, require_held, require_numbers
from hf_align.checkpoints.conversion import Conversion, Link, Read, Renaming
from hf_align.checkpoints.ondemand import OfNames, OnDemand


@dataclass(frozen=True)
class Names:
    """The tensors of a checkpoint against those of the model.

    Attributes:
        links: every tensor on disk that the model loads is in one; a tied weight that is stored twice is in two.
        missing: names in memory that the checkpoint lacks (tied weights are not missing).
        unused: names on disk that the model does not load.
    """

    links: tuple[Link, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    def by_memory(self) -> dict[str, Link]:
        """Name in memory -> where it is read from."""
        found: dict[str, Link] = {}
        for link in self.links:
            for name in link.memory:
                found.setdefault(name, link)
        return found

    def alone(self) -> dict[str, str]:
        """Name in memory -> name on disk, of tensors that are stored as they are, each in its own place."""
        links = self.by_memory().items()
        return {n: link.source for n, link in links if isinstance(link, Renaming) and link.source == link.target}

    def twice(self) -> Iterator[tuple[str, Link, Link]]:
        """Names in memory that two links make, with both."""
        first = self.by_memory()
        for link in self.links:
            yield from ((name, first[name], link) for name in link.memory if first[name] is not link)


def match_names(
    model: PreTrainedModel, checkpoint: Checkpoint, ties: Mapping[str, str], aliases: Mapping[str, str]
) -> Names:
    """Map names and layouts as transformers does when it loads a checkpoint; no weights are read.

    Args:
        model: built without weights.
        ties: other names of tied weights -> the name that is kept.
        aliases: of names in memory that were tied, other names -> the name that is kept: where the checkpoint lacks one
            of them, another stands in.

    Raises:
        CheckpointError: tensors that do not convert into the model's, or not back.
    """
    mapping = get_model_conversion_mapping(model)
    wanted = model.state_dict()
    rename = _renamer(model, mapping, wanted)
    links: list[Link] = []
    unused = []
    parts: dict[str, dict[str, list[str]]] = {}
    # In transformers' order: the position of an expert in a fused tensor is its place in it.
    for name in sorted(checkpoint, key=dot_natural_key):
        new, pattern = rename(name)
        if new not in wanted:
            unused.append(name)
        elif pattern is None:
            links.append(Renaming(ties.get(new, new), name, name))
        else:
            parts.setdefault(new, {}).setdefault(pattern, []).append(name)
    converters = {p: m for m in mapping if isinstance(m, WeightConverter) for p in m.source_patterns}
    header = _header(checkpoint)
    for layer, found in parts.items():
        converter = converters[next(iter(found))]
        links.append(Conversion.build(converter, layer, found, model, header, ties))
    made = Names(tuple(links), (), ()).by_memory()
    missing = []
    for name in sorted({ties.get(name, name) for name in wanted} - made.keys()):
        kept = aliases.get(name, name)
        stand_in = next((made[n] for n in (kept, *(a for a, k in aliases.items() if k == kept)) if n in made), None)
        if isinstance(stand_in, Renaming) and rename(name) == (name, None):
            links.append(Renaming(name, stand_in.source, name))
        else:
            missing.append(name)
    return Names(tuple(links), tuple(missing), tuple(unused))


class NamedWeights(OnDemand):
    """The weights of a checkpoint by their names in memory, read when they are asked for, as float32 (float64 stays).

    Only the tensors on disk that make up the one that is asked for are read, and none is kept.

    Args:
        buffers: names in memory of what is no weight, where infinite is a number too: a limit that nothing reaches.

    Raises:
        CheckpointError: on reading a tensor with NaN, or a weight with infinite entries.
    """

    def __init__(self, checkpoint: Checkpoint, names: Names, buffers: Collection[str] = ()) -> None:
        self._checkpoint = checkpoint
        self._links = names.by_memory()
        self._buffers = frozenset(buffers)
        super().__init__(self._links)

    def stored(self, name: str) -> TensorInfo:
        """Shape in memory, and dtype on disk, of a tensor given by its name in memory; no weights are read."""
        link = self._links[name]
        tensor = link.load(_header(self._checkpoint))[name]
        shard = self._checkpoint.info(link.sources[0]).shard
        return TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.nbytes, shard)

    def __getitem__(self, name: str) -> Tensor:
        check = require_numbers if name in self._buffers else require_finite
        tensor = self._links[name].load(partial(self._checked, check))[name]
        return tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    def _checked(self, check: Callable[[str, Tensor, str], Tensor], on_disk: str) -> Tensor:
        return check(on_disk, self._checkpoint[on_disk], self._checkpoint.info(on_disk).shard)


class DiskLayout(OfNames):
    """The tensors that are written for a model in the names and layout of a checkpoint, from headers alone.

    Args:
        parameters: names in memory that are computed; all else (buffers) is that of the checkpoint.
        dtype: of the parameters; that on disk by default.
        shapes: in memory, of parameters that are larger than in the checkpoint.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Names,
        parameters: Collection[str],
        dtype: torch.dtype | None = None,
        shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self._checkpoint = checkpoint
        self._parameters = frozenset(parameters)
        self._dtype = dtype
        self._read = NamedWeights(checkpoint, names)
        self._larger = shapes
        self._links = {name: link for link in names.links for name in link.targets}
        super().__init__(self._links)

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor given by its name on disk."""
        link = self._links[name]
        if self._larger.keys() & {*link.memory}:
            return tuple(link.store(self._without_entries)[name].shape), self.dtype(name)
        return self._found(name).shape, self.dtype(name)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor given by its name on disk."""
        found = self._found(name).dtype
        if self._dtype is None or not found.is_floating_point or not self._is_produced(self._links[name]):
            return found
        return self._dtype

    def _found(self, name: str) -> TensorInfo:
        """What the checkpoint has in the place of a tensor."""
        return self._checkpoint.info(name if name in self._checkpoint else self._links[name].sources[0])

    def _without_entries(self, name: str) -> Tensor:
        """What is in memory under a name, on no device."""
        shape = self._larger[name] if name in self._larger else self._read.stored(name).shape
        return torch.empty(tuple(shape), device="meta")

    def _is_produced(self, link: Link) -> bool:
        return any(name in self._parameters for name in link.memory)


class DiskWeights(DiskLayout, OnDemand):
    """Weights in the names, layout and dtypes of a checkpoint, made from weights in memory when they are asked for.

    What a conversion makes is kept until it is asked for, and no longer. So whoever asks for every tensor once has
    every tensor in memory made once; asking in the order of names keeps no more than the experts of a layer.

    Args:
        produce: gives a parameter by its name in memory.

    Raises:
        CheckpointError: on a tensor that the output dtype cannot hold.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Names,
        produce: Read,
        parameters: Collection[str],
        dtype: torch.dtype | None = None,
        shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        super().__init__(checkpoint, names, parameters, dtype, shapes)
        self._produce = produce
        self._waiting: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        link = self._links[name]
        if not self._is_produced(link):
            return self._checkpoint[name]
        if isinstance(link, Conversion):
            return self._converted(name, link).contiguous()
        return self._stored(name, self._produce(link.name)).contiguous()

    def _converted(self, name: str, link: Conversion) -> Tensor:
        if name not in self._waiting:
            # In the dtype of the checkpoint, which is often half of what was computed.
            self._waiting.update((n, self._stored(n, t)) for n, t in link.store(self._in_memory).items())
        return self._waiting.pop(name)

    def _in_memory(self, name: str) -> Tensor:
        return self._produce(name) if name in self._parameters else self._read[name]

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        return require_held(name, tensor.to(self.dtype(name)))


def _renamer(
    model: PreTrainedModel, mapping: list[WeightTransform], wanted: dict[str, Tensor]
) -> Callable[[str], tuple[str, str | None]]:
    """Name on disk -> name in memory, and the pattern of the converter that takes the tensor (None: it is as it is)."""
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if new not in wanted and name in wanted:  # saved by today's code, with names that an old one used otherwise
            return rename_source_key(name, [], [], model.base_model_prefix, wanted)
        return new, pattern

    return rename


def _header(checkpoint: Checkpoint) -> Read:
    """A reader of shapes: tensors on no device."""

    def read(name: str) -> Tensor:
        info = checkpoint.info(name)
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    return read
