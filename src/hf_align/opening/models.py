"""A model as the pipeline sees it: folder, config, and weights by their names in memory; and whether two fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from hf_align.checkpoints.adapters import adapted
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.companions import require_same_vocabulary
from hf_align.checkpoints.hub import Source, resolve
from hf_align.checkpoints.naming import NamedWeights, Names, match_names
from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import CheckpointError, IncompatibleModels
from hf_align.opening.agreement import require_alike
from hf_align.opening.depths import Deepening, Places, deepening_of, is_unchanged, places_for
from hf_align.opening.heads import choose_heads, is_tied, loses_ties
from hf_align.opening.vocabularies import (
    RespelledWeights,
    Respelling,
    require_same_number_of_tokens,
    respelling_of,
)
from hf_align.opening.widths import Architecture, described, widen
from hf_align.runtime.progress import waiting
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.symmetry.widening import is_wider
from hf_align.tracing.budget import ANY, Budget, within
from hf_align.tracing.build import build_without_weights, inventory, read_config
from hf_align.tracing.stored import with_stored


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk.

    Attributes:
        source: where it came from.
        names: its tensors on disk against those of the architecture.
        weights: by name in memory, in the sizes of the architecture of the pair.
        widened: what grew, in words that follow a name, where the checkpoint is of a smaller size.
        idle: weights of layers that were added to it, on which nothing depends.
        respelled: what brought it into the vocabulary of the first, likewise, where it has another.
    """

    source: Source
    config: PretrainedConfig
    checkpoint: Checkpoint
    names: Names
    weights: Mapping[str, Tensor]
    widened: str | None = None
    idle: frozenset[str] = frozenset()
    respelled: str | None = None

    @property
    def ref(self) -> str:
        """What the user called it."""
        return self.source.reference

    @property
    def changes(self) -> list[str]:
        """What was done to it so that it fits, in words that follow its name."""
        return [change for change in (self.respelled, self.widened) if change is not None]

    @property
    def folder(self) -> Path:
        """Config, tokenizer, and whatever else is no weights."""
        return self.source.folder


Respell = Callable[[Model, Model], Model]
"""A model in the vocabulary of another, and that other -> the model."""


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture, with what can be done to it.

    Attributes:
        config: of the aligned models, the wider one's; heads are untied in it where that enlarges the group.
        untied: whether those of one were.
    """

    a: Model
    b: Model
    config: PretrainedConfig
    spec: SymmetrySpec
    untied: bool

    def layout(self, preferred: Model) -> Model:
        """The model whose files a result is written like: the preferred one, or the other if that was changed."""
        if not preferred.changes:
            return preferred
        return self.b if preferred is self.a else self.a

    @property
    def reads(self) -> tuple[Path, ...]:
        """The folders that are read."""
        return (*self.a.source.reads, *self.b.source.reads)

    def require_one_size(self) -> None:
        """For what takes models in the sizes in which they are stored.

        Raises:
            IncompatibleModels: one of the two was made larger.
        """
        for model in (self.a, self.b):
            if model.widened is not None:
                raise IncompatibleModels(
                    f"{model.ref} is smaller than the others; merge makes it larger, two models at a time"
                )


def open_pair(
    a: str,
    b: str,
    *,
    untie: bool | None = None,
    specs: Path | None = None,
    respell: Respell | None = None,
    trust_remote_code: bool = False,
) -> Pair:
    """Open two models and derive the symmetries of their architecture; the smaller one is made larger.

    Args:
        a, b: folders or Hub references.
        respell: what is done further to B in the vocabulary of A, where it has another; without it such are refused.
        untie: write `tie_word_embeddings: false`; None decides by whether that enlarges the group.
        specs: a folder of reviewed overrides to use before those that ship with the package.

    Raises:
        IncompatibleModels: other vocabularies, models that compute differently, or sizes, that nothing brings together.
        CheckpointError: weights that are missing, damaged or not finite.
    """
    sources = [resolve(a), resolve(b)]
    folders = [source.folder for source in sources]
    configs = [read_config(f, trust_remote_code=trust_remote_code) for f in folders]
    if respell is None:
        require_same_vocabulary((a, b), folders)
    stored = [Checkpoint.open(source.folder, source.shards) for source in sources]
    configs = [_with_buffers(*each) for each in zip(configs, sources, stored, strict=True)]
    respelling = None if respell is None else respelling_of(folders, configs)
    if respelling is not None:
        configs[1] = respelling.config
    deep = [deepening_of(*each) for each in (configs, configs[::-1])]
    deeper = [c if d is None else d.config for c, d in zip(configs, deep, strict=True)]
    with waiting("comparing the configs"):
        alike = require_alike((a, b), deeper[0], deeper[1], untie)
    if respell is None:
        require_same_number_of_tokens((a, b), alike, folders)
    with waiting("deriving the symmetries"):
        config, spec, _ = choose_heads(alike[0], untie, specs)
        first = second = Architecture(config, spec)
        if _shapes(alike[0]) != _shapes(alike[1]):
            second = Architecture(*choose_heads(alike[1], is_tied(alike[1]) and not is_tied(config), specs)[:2])
        stored_as = [x if d is None else _shallow(own, x, specs)
                     for own, x, d in zip(configs, (first, second), deep, strict=True)]  # fmt: skip
    untied = any(loses_ties(own, config) for own in configs)
    narrow = None if second is first else int(is_wider(spec, second.spec))
    changed = {narrow, *(i for i, d in enumerate(deep) if d is not None), *([] if respelling is None else [1])} - {None}
    if len(changed) > 1:
        raise IncompatibleModels(
            f"neither {a} nor {b} has the layers, the widths and the tokenizer of the result: name the larger one first"
        )
    opened = zip(sources, stored, configs, stored_as, (None, respelling), strict=True)
    models = _in_one_precision([_open(*each) for each in opened])
    if respell is not None and respelling is not None:
        models[1] = respell(models[1], models[0])
    sizes = _Sizes(models, stored_as, (first, second), deep, narrow)
    fitted = sizes.fitted(sizes.places)
    wide = first if narrow != 0 else second
    return Pair(fitted[0], fitted[1], wide.config, wide.spec, untied)


@dataclass(frozen=True)
class _Sizes:
    """Two models of which one may be smaller.

    Attributes:
        stored_as: their architectures on disk.
        architectures: the same at the depth of the deeper one.
        deepenings: what makes a model as deep as the other, where it is not.
        narrow: which one is narrower.
    """

    models: Sequence[Model]
    stored_as: Sequence[Architecture]
    architectures: Sequence[Architecture]
    deepenings: Sequence[Deepening | None]
    narrow: int | None

    @cached_property
    def places(self) -> Places:
        """Where the layers of the shallower one belong; none where both are as deep."""
        parts = zip(self.models, self.stored_as, self.architectures, self.deepenings, strict=True)
        for model, own, made, deepening in parts:
            if deepening is not None:
                wide = self.architectures[0 if self.narrow is None else 1 - self.narrow]
                with waiting("looking for layers that correspond"):
                    return places_for(
                        deepening, wide.spec, lambda places: [each.weights for each in self.fitted(places)],
                        partial(is_unchanged, model.weights, own.config, made.config, deepening),
                    )  # fmt: skip
        return ()

    def fitted(self, places: Places) -> list[Model]:
        """Both in one size, the layers of the shallower one in some places."""
        made = [
            model if deepening is None else _deepened(model, deepening, places)
            for model, deepening in zip(self.models, self.deepenings, strict=True)
        ]
        if self.narrow is not None:
            own, wide = self.architectures[self.narrow], self.architectures[1 - self.narrow]
            made[self.narrow] = _widened(made[self.narrow], own, wide)
        return made


def _shallow(own: PretrainedConfig, deep: Architecture, specs: Path | None) -> Architecture:
    """The architecture of a checkpoint that will be made deeper, its head tied or not as it will be."""
    return Architecture(*choose_heads(own, is_tied(own) and not is_tied(deep.config), specs)[:2])


def _deepened(model: Model, deepening: Deepening, places: Places) -> Model:
    return replace(model, weights=deepening.spread(places, model.weights), config=deepening.config,
                   widened=deepening.described(places), idle=deepening.idle(places))  # fmt: skip


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    return {n: tuple(p.shape) for n, p in build_without_weights(config).named_parameters()}


def config_of(model: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model or of a model type, of which no weights are read.

    Raises:
        HfAlignError: there is none, or it describes more than can be built.
    """
    if model in CONFIG_MAPPING and not Path(model).exists():
        return read_config(model)
    source = resolve(model)
    config = read_config(source.folder, trust_remote_code=trust_remote_code)
    budget = ANY
    with suppress(CheckpointError):  # there may be a config alone
        stored = Checkpoint.open(source.folder)
        budget = Budget.of_stored(len(stored), stored.entries_in_all)
    with within(budget, model):
        build_without_weights(config)
    return config


def _widened(model: Model, own: Architecture, wide: Architecture) -> Model:
    weights, change = widen(model.weights, own, wide)
    what = f"is widened ({described(own.spec, wide.spec)}); its outputs change by {change:.0e}"
    return replace(model, weights=weights, widened=what if model.widened is None else f"{model.widened}, and {what}")


def _open(
    source: Source,
    stored: Checkpoint,
    own: PretrainedConfig,
    architecture: Architecture,
    respelling: Respelling | None,
) -> Model:
    ref = source.reference
    aliases = inventory(build_without_weights(own)).ties if loses_ties(own, architecture.config) else {}
    names = match_names(build_without_weights(architecture.config), stored, architecture.spec.ties, aliases)
    if names.missing:
        more = f" and {len(names.missing) - 1} more" if len(names.missing) > 1 else ""
        raise CheckpointError(f"{ref} lacks {names.missing[0]}{more}, which its architecture needs")
    checkpoint = adapted(stored, source, names.alone())
    _require_tied(ref, checkpoint, names)
    weights = NamedWeights(checkpoint, names)
    fitting = weights if respelling is None else RespelledWeights(weights, respelling)
    _require_shapes(ref, fitting, architecture.spec)
    return Model(source, own, checkpoint, names, fitting,
                 respelled=None if respelling is None else respelling.described)  # fmt: skip


def _with_buffers(config: PretrainedConfig, source: Source, stored: Checkpoint) -> PretrainedConfig:
    """The config with the buffers of its checkpoint that are no weights: masks, tables, counters.

    Raises:
        IncompatibleModels: the config describes another order of magnitude than what is stored.
    """
    with within(Budget.of_stored(len(stored), stored.entries_in_all), source.reference):
        model = build_without_weights(config)
    found = inventory(model)
    if not found.buffers:
        return config
    weights = NamedWeights(stored, match_names(model, stored, found.ties, {}))
    for name in found.buffers.keys() & weights.keys():
        if weights.stored(name).shape != found.buffers[name]:
            shapes = f"{list(weights.stored(name).shape)} in {source.reference}, but {list(found.buffers[name])}"
            raise CheckpointError(f"{name} is {shapes} by its config.json")
    return with_stored(config, {name: weights[name] for name in found.buffers if name in weights})


def _in_one_precision(models: list[Model]) -> list[Model]:
    """What one of two models stores as float64 is read as float64 from both."""
    stored = [NamedWeights(m.checkpoint, m.names) for m in models]
    wide = {n for weights in stored for n in weights if weights.stored(n).dtype == torch.float64}
    if not wide:
        return models

    def doubled(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return Computed(weights, lambda name: weights[name].double() if name in wide else weights[name])

    return [replace(model, weights=doubled(model.weights)) for model in models]


def _require_tied(ref: str, checkpoint: Checkpoint, names: Names) -> None:
    """What is stored twice must be the same twice: transformers unties such weights, against the config."""
    for name, first, second in names.twice():
        if not torch.equal(*(link.load(checkpoint.__getitem__)[name] for link in (first, second))):
            raise CheckpointError(
                f"{ref} holds {name} as {first.sources[0]} and as {second.sources[0]}, and they differ; "
                "if they are not tied, set tie_word_embeddings to false in its config.json"
            )


def _require_shapes(ref: str, weights: NamedWeights | RespelledWeights, spec: SymmetrySpec) -> None:
    for name in spec.parameters:
        stored, expected = weights.stored(name), spec.shape(name)
        if not stored.dtype.is_floating_point:
            raise CheckpointError(f"{name} is stored as {stored.dtype} in {ref}, but its architecture computes with it")
        shape = stored.shape
        if tuple(shape) != expected:
            raise IncompatibleModels(
                f"{name} is {list(shape)} in {ref}, but of different sizes, {list(expected)}, by its config.json"
            )
