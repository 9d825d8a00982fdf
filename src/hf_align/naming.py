"""Names on disk and names in memory.

A checkpoint may be older than the modelling code that reads it; transformers renames on loading. The spec speaks of
names in memory; what is written keeps the names of the checkpoint it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hf_align.checkpoint import Checkpoint, TensorInfo, require_finite
from hf_align.errors import CheckpointError


@dataclass(frozen=True)
class Names:
    """A one-to-one map between the tensors of a checkpoint and those of the model.

    Attributes:
        disk: name in memory -> name on disk, for every tensor that the checkpoint holds.
        missing: names in memory that the checkpoint lacks (tied weights are not missing).
        unused: names on disk that the model does not load.
    """

    disk: Mapping[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def match_names(model: PreTrainedModel, on_disk: Iterable[str], ties: Mapping[str, str]) -> Names:
    """Map names as transformers does when it loads a checkpoint.

    Args:
        model: built without weights.
        ties: other names of tied weights -> the name that is kept.

    Raises:
        CheckpointError: the checkpoint stores weights in another layout (split or fused), which needs a conversion.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    wanted = model.state_dict()
    disk: dict[str, str] = {}
    unused = []
    for name in on_disk:
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if new not in wanted and name in wanted:
            new, pattern = name, None
        if pattern is not None:
            raise CheckpointError(
                f"{name} is stored in another layout than {type(model).__name__} uses in memory; "
                "load and save the model with transformers 5 first"
            )
        if new in wanted:
            disk[ties.get(new, new)] = name
        else:
            unused.append(name)
    kept = {ties.get(name, name) for name in wanted}
    return Names(disk, tuple(sorted(kept - disk.keys())), tuple(unused))


class NamedWeights(Mapping[str, Tensor]):
    """The weights of a checkpoint by their names in memory, read one at a time, as float32 (float64 stays).

    Args:
        checkpoint: tensors by name on disk.
        names: the map between the two.
        aliases: names in memory that the checkpoint stores under another one (a head that was tied).

    Raises:
        CheckpointError: on reading a tensor with NaN or infinite entries.
    """

    def __init__(self, checkpoint: Checkpoint, names: Names, aliases: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._disk = dict(names.disk)
        for name in names.missing:
            if aliases.get(name) in names.disk:
                self._disk[name] = names.disk[aliases[name]]

    def stored(self, name: str) -> TensorInfo:
        """Shape and dtype on disk of a tensor given by its name in memory."""
        return self._checkpoint.info(self._disk[name])

    def __getitem__(self, name: str) -> Tensor:
        on_disk = self._disk[name]
        tensor = self._checkpoint[on_disk]
        if not tensor.is_floating_point():
            return tensor
        tensor = require_finite(on_disk, tensor, self._checkpoint.info(on_disk).shard)
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._disk)

    def __len__(self) -> int:
        return len(self._disk)
