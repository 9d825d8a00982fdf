"""A model as the pipeline sees it: folder, config, and weights by their names in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from hf_align.checkpoints.adapters import AdaptedCheckpoint, adapted
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.companions import code_not_run, model_code
from hf_align.checkpoints.hub import Source, resolve
from hf_align.checkpoints.naming import NamedWeights, Names, match_names
from hf_align.errors import CheckpointError, IncompatibleModels
from hf_align.opening.heads import loses_ties
from hf_align.opening.vocabularies import RespelledWeights, Respelling
from hf_align.opening.widths import Architecture
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.budget import ANY, Budget, within
from hf_align.tracing.build import build_without_weights, by_inputs, inventory, read_config, unsaved_tables
from hf_align.tracing.stored import with_stored

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk.

    Attributes:
        source: where it came from.
        names: its tensors on disk against those of the architecture.
        weights: by name in memory, in the sizes of the architecture of the pair.
        widened: what grew, in words that follow a name, where the checkpoint is of a smaller size than the other.
        enlarged: likewise, where it is of a smaller size than is asked of both.
        idle: weights of layers that were added to it, on which nothing depends.
        respelled: what brought it into the vocabulary of the first, likewise, where it has another.
    """

    source: Source
    config: PretrainedConfig
    checkpoint: Checkpoint
    names: Names
    weights: Mapping[str, Tensor]
    widened: str | None = None
    enlarged: str | None = None
    idle: frozenset[str] = frozenset()
    respelled: str | None = None

    @property
    def ref(self) -> str:
        """What the user called it."""
        return self.source.reference

    @property
    def changes(self) -> list[str]:
        """What was done to it so that it fits, in words that follow its name."""
        return [change for change in (self.respelled, self.widened, self.enlarged) if change is not None]

    @property
    def is_fitted(self) -> bool:
        """Whether it is not stored in the sizes and the vocabulary of the other."""
        return self.respelled is not None or self.widened is not None

    def dtypes(self, chosen: torch.dtype | None = None) -> dict[str, torch.dtype]:
        """What each weight is stored in, by its name in memory; or what is chosen for those of floating point."""
        found = {name: self.checkpoint.info(link.sources[0]).dtype for name, link in self.names.by_memory().items()}
        return {name: chosen if chosen and dtype.is_floating_point else dtype for name, dtype in found.items()}

    @property
    def folder(self) -> Path:
        """Config, tokenizer, and whatever else is no weights."""
        return self.source.folder


def open_model(
    source: Source,
    stored: Checkpoint,
    own: PretrainedConfig,
    architecture: Architecture,
    respelling: Respelling | None,
) -> Model:
    """A model with its weights by the names of an architecture.

    Args:
        own: its own config.
        respelling: what brings it into another vocabulary.

    Raises:
        CheckpointError: weights that are missing or damaged, or that differ although they are tied.
        IncompatibleModels: weights of other sizes than its config says.
    """
    ref = source.reference
    aliases = inventory(build_without_weights(own)).ties if loses_ties(own, architecture.config) else {}
    model = build_without_weights(architecture.config)
    names = match_names(model, stored, architecture.spec.ties, aliases)
    _require_as_computed(ref, stored, names.unused, model)
    if names.missing:
        more = f" and {len(names.missing) - 1} more" if len(names.missing) > 1 else ""
        needs = f"{ref} lacks {names.missing[0]}{more}, which {type(model).__name__} needs"
        raise CheckpointError(f"{needs}; if it is of another class, name that under architectures in its config.json")
    checkpoint = adapted(stored, source, names.alone(), by_inputs(model))
    require_parts_alone(ref, checkpoint, names, aliases or architecture.spec.ties)
    _require_tied(ref, checkpoint, names, aliases)
    weights = NamedWeights(checkpoint, names, architecture.spec.buffers)
    fitting = weights if respelling is None else RespelledWeights(weights, respelling)
    _require_shapes(ref, fitting, architecture.spec)
    return Model(source, own, checkpoint, names, fitting,
                 respelled=None if respelling is None else respelling.described)  # fmt: skip


def with_buffers(config: PretrainedConfig, source: Source, stored: Checkpoint) -> PretrainedConfig:
    """The config with the buffers of its checkpoint that are no weights: masks, tables, counters.

    Raises:
        IncompatibleModels: the config describes another order of magnitude than what is stored, or other sizes.
    """
    with within(Budget.of_stored(len(stored), stored.entries_in_all), source.reference):
        model = build_without_weights(config)
    found = inventory(model)
    weights = NamedWeights(stored, match_names(model, stored, found.ties, {}), found.buffers)
    for name, shape in {**found.shapes, **found.buffers}.items():
        if name in weights:
            _require_shape(source.reference, name, weights.stored(name).shape, shape)
    if not found.buffers:
        return config
    return with_stored(config, {name: _settled(weights[name]) for name in found.buffers if name in weights})


def _settled(buffer: Tensor) -> Tensor:
    """What a buffer says of the function: a limit that was none when the model was built is a number like a weight,
    and only that there is one is said."""
    limits = buffer.is_floating_point() and bool(buffer.isfinite().all())
    return torch.zeros_like(buffer) if limits else buffer


def config_of(model: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model or of a model type, of which no weights are read.

    Raises:
        HfAlignError: there is none, or it describes more than can be built.
    """
    if model in CONFIG_MAPPING and not Path(model).exists():
        return read_config(model)
    source = resolve(model)
    config = read_config(source.folder, trust_remote_code=trust_remote_code)
    if not trust_remote_code and model_code(source.folder):
        logger.warning(code_not_run(model, config.model_type))
    budget = ANY
    with suppress(CheckpointError):  # there may be a config alone
        stored = Checkpoint.open(source.folder)
        budget = Budget.of_stored(len(stored), stored.entries_in_all)
    with within(budget, model):
        build_without_weights(config)
    return config


def require_parts_alone(ref: str, checkpoint: Checkpoint, names: Names, ties: Mapping[str, str]) -> None:
    """An adapter changes one use of a weight, as PEFT runs it; merged into what is tied, it would change the others.

    Args:
        ties: of the model's own config: other names of tied weights -> the name that is kept.

    Raises:
        CheckpointError: an adapter changes a weight that is tied.
    """
    if not isinstance(checkpoint, AdaptedCheckpoint):
        return
    links = names.by_memory()
    for other, kept in ties.items():
        for on_disk in checkpoint.parts.keys() & set(links[kept].sources if kept in links else ()):
            raise CheckpointError(
                f"{ref}: the adapter changes {on_disk} alone, but {other} of its base is tied to it; save the base "
                "with the two apart, and give that with the adapter"
            )


def _require_as_computed(ref: str, stored: Checkpoint, unused: Iterable[str], model: PreTrainedModel) -> None:
    """A table that a class computes and does not save is read from a checkpoint that has it, by transformers; what is
    written has it no longer."""
    tables = unsaved_tables(model)
    for name in tables.keys() & {*unused}:
        found, table = stored[name], tables[name]
        eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
        if found.shape != table.shape or not torch.allclose(found.to(table), table, rtol=eps, atol=eps):
            raise CheckpointError(f"{ref} holds other values in {name} than its class computes and does not save")


def _require_tied(ref: str, checkpoint: Checkpoint, names: Names, ties: Mapping[str, str]) -> None:
    """What is stored twice must be the same twice: transformers unties such weights, against the config.

    Args:
        ties: of the model's own config, where the architecture that it is opened in has a head apart.
    """
    links, read = names.by_memory(), checkpoint.__getitem__
    twice = [(name, first, name, second) for name, first, second in names.twice()]
    twice += [(kept, links[kept], name, links[name]) for name, kept in ties.items() if {name, kept} <= links.keys()
              and links[kept].sources != links[name].sources]  # fmt: skip
    for kept, first, name, second in twice:
        if not torch.equal(first.load(read)[kept], second.load(read)[name]):
            raise CheckpointError(
                f"{ref} holds {name} as {first.sources[0]} and as {second.sources[0]}, and they differ; "
                "if they are not tied, set tie_word_embeddings to false in its config.json, if its class heeds that"
            )


def _require_shapes(ref: str, weights: NamedWeights | RespelledWeights, spec: SymmetrySpec) -> None:
    for name in spec.parameters:
        if name not in weights:
            raise CheckpointError(f"{ref} holds no {name}, with which its architecture computes; code that renames or "
                                  "joins weights where it saves them is not followed")  # fmt: skip
        stored, expected = weights.stored(name), spec.shape(name)
        if not stored.dtype.is_floating_point:
            raise CheckpointError(f"{name} is stored as {stored.dtype} in {ref}, but its architecture computes with it")
        _require_shape(ref, name, stored.shape, expected)


def _require_shape(ref: str, name: str, stored: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(stored) != tuple(expected):
        raise IncompatibleModels(
            f"{name} is {list(stored)} in {ref}, but of different sizes, {list(expected)}, by its config.json"
        )
