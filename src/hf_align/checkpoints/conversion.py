"""Tensors on disk and the tensors in memory that they make up: another name, or another layout as well.

Layouts are converted by transformers' own operations, forwards and in reverse; no model is known by its name here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from hf_align.errors import CheckpointError

Read = Callable[[str], Tensor]
"""Gives a tensor by its name."""


@dataclass(frozen=True)
class Renaming:
    """One tensor, which has the same layout on disk and in memory.

    Attributes:
        name: in memory.
        source: the name on disk that is read.
        target: the name on disk that is written; not that which is read for a head that was tied.
    """

    name: str
    source: str
    target: str

    @property
    def memory(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    def load(self, read: Read) -> dict[str, Tensor]:
        """Name in memory -> tensor, from a reader of tensors on disk."""
        return {self.name: read(self.source)}

    def store(self, read: Read) -> dict[str, Tensor]:
        """Name on disk -> tensor, from a reader of tensors in memory."""
        return {self.target: read(self.name)}


@dataclass(frozen=True)
class Conversion:
    """Tensors on disk that make up tensors in memory together: experts that are fused, projections that are split.

    Attributes:
        forward, backward: transformers' converter, and its reverse.
        disk: the names on disk for each source pattern of `forward`, in the order in which it takes them.
        memory: the name in memory for each target pattern of `forward`.
        layer: the name by which operations look up sizes in the model.
        model: built without weights; some operations ask it, or its config, for sizes.
    """

    forward: WeightConverter
    backward: WeightConverter
    disk: tuple[tuple[str, ...], ...]
    memory: tuple[str, ...]
    layer: str
    model: PreTrainedModel

    @classmethod
    def build(
        cls,
        converter: WeightConverter,
        layer: str,
        found: Mapping[str, Sequence[str]],
        model: PreTrainedModel,
        header: Read,
        ties: Mapping[str, str],
    ) -> Conversion:
        """Find what the tensors make up, from shapes alone.

        Args:
            layer: the name in memory that transformers gives to all of the tensors.
            found: source pattern of the converter -> names on disk.
            header: gives a tensor on the meta device by its name on disk.
            ties: other names of tied weights -> the name that is kept.

        Raises:
            CheckpointError: the tensors do not convert, or not back into what they were.
        """
        if foreign := sorted(found.keys() - set(converter.source_patterns)):
            raise CheckpointError(f"{layer} is stored in two layouts, and {found[foreign[0]][0]} is of the other")
        disk = tuple(tuple(found.get(pattern, ())) for pattern in converter.source_patterns)
        memory = tuple(ties.get(name, name) for name in _full_names(layer, converter.target_patterns))
        conversion = cls(converter, _reverse(converter, layer), disk, memory, layer, model)
        conversion._require_inverse(header)
        return conversion

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for names in self.disk for name in names)

    @property
    def targets(self) -> tuple[str, ...]:
        return self.sources

    def load(self, read: Read) -> dict[str, Tensor]:
        """Name in memory -> tensor, from a reader of tensors on disk.

        Raises:
            CheckpointError: the tensors do not fit together.
        """
        # No other reference to what is read: operations let go of their inputs one by one, and experts are large.
        patterns = self.forward.source_patterns
        made = self._run(
            self.forward, {p: [read(n) for n in names] for p, names in zip(patterns, self.disk, strict=True) if names}
        )
        return self._named(made, dict(zip(self.forward.target_patterns, self.memory, strict=True)), self.forward)

    def store(self, read: Read) -> dict[str, Tensor]:
        """Name on disk -> tensor, from a reader of tensors in memory.

        Raises:
            CheckpointError: the tensors do not come apart into those of the checkpoint.
        """
        patterns = self.backward.source_patterns
        made = self._run(self.backward, {p: [read(n)] for p, n in zip(patterns, self.memory, strict=True)})
        # Operations number what they split; that is the place of a tensor among those that were put together.
        keys = {
            pattern.replace("*", str(i)): name
            for pattern, names in zip(self.backward.target_patterns, self.disk, strict=True)
            for i, name in enumerate(names)
        }
        return self._named(made, keys, self.backward)

    def _require_inverse(self, header: Read) -> None:
        made = self.load(header)
        for name, tensor in self.store(made.__getitem__).items():
            before = header(name)
            if tensor.shape != before.shape:
                shapes = f"{list(tensor.shape)}, it is {list(before.shape)}"
                raise CheckpointError(f"{self._described(self.backward)}: {name} would be {shapes}")

    def _run(self, converter: WeightConverter, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """What the converter's operations make; keys are its patterns, not yet names. Empties `tensors`."""
        try:
            with torch.no_grad():
                for operation in converter.operations:
                    tensors = operation.convert(
                        tensors,
                        source_patterns=converter.source_patterns,
                        target_patterns=converter.target_patterns,
                        full_layer_name=self.layer,
                        model=self.model,
                        config=self.model.config,
                        missing_keys=None,
                    )
        except Exception as error:  # operations check nothing, and fail in as many ways as torch has
            raise CheckpointError(f"{self._described(converter)}: {error}") from error
        return {key: value[0] if isinstance(value, list) else value for key, value in tensors.items()}

    def _named(
        self, made: Mapping[str, Tensor], names: Mapping[str, str], converter: WeightConverter
    ) -> dict[str, Tensor]:
        if made.keys() != names.keys():
            raise CheckpointError(f"{self._described(converter)}: {len(made)} tensors come out, not {len(names)}")
        return {names[key]: tensor for key, tensor in made.items()}

    def _described(self, converter: WeightConverter) -> str:
        names = ", ".join(type(o).__name__ for o in converter.operations)
        if converter is self.backward:
            return f"{self.layer} cannot be written in the layout of the checkpoint ({names})"
        return f"{self.layer} cannot be made from {self.sources[0]} and the like ({names})"


Link = Renaming | Conversion
"""Either way in which tensors on disk belong to tensors in memory."""


def _reverse(converter: WeightConverter, layer: str) -> WeightConverter:
    try:
        # Of a copy, since reversing edits the lists of patterns in place.
        return cast(WeightConverter, copy.deepcopy(converter).reverse_transform())
    except (NotImplementedError, ValueError) as error:
        names = ", ".join(type(o).__name__ for o in converter.operations)
        message = f"{layer} cannot be written in the layout of the checkpoint: no reverse of {names}"
        raise CheckpointError(message) from error


def _full_names(layer: str, patterns: Sequence[str]) -> list[str]:
    """The names of all targets; transformers names a layer by its first target."""
    if len(patterns) == 1:
        return [layer]
    head, found, tail = layer.partition(patterns[0])
    if not found:
        raise CheckpointError(f"{layer} is one of {len(patterns)} tensors, and the names of the others cannot be told")
    return [head + pattern + tail for pattern in patterns]
