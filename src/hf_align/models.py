"""A model as the pipeline sees it: folder, config, and weights by their names in memory; and whether two fit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.checkpoints.adapters import adapted
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.companions import require_same_vocabulary
from hf_align.checkpoints.hub import Source, resolve
from hf_align.checkpoints.naming import NamedWeights, Names, match_names
from hf_align.errors import CheckpointError, IncompatibleModels
from hf_align.progress import waiting
from hf_align.symmetry.overrides import symmetries
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.symmetry.widening import is_wider
from hf_align.tracing.trace import build_without_weights, inventory, read_config
from hf_align.widths import Architecture, described, widen


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk.

    Attributes:
        source: where it came from.
        names: its tensors on disk against those of the architecture.
        weights: by name in memory, in the sizes of the architecture of the pair.
        widened: what grew, in words, where the checkpoint is of a smaller size.
    """

    source: Source
    config: PretrainedConfig
    checkpoint: Checkpoint
    names: Names
    weights: Mapping[str, Tensor]
    widened: str | None = None

    @property
    def ref(self) -> str:
        """What the user called it."""
        return self.source.reference

    @property
    def folder(self) -> Path:
        """Config, tokenizer, and whatever else is no weights."""
        return self.source.folder


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture, with what can be done to it.

    Attributes:
        config: of the aligned models, the wider one's; heads are untied in it where that enlarges the group.
        untied: whether they were.
    """

    a: Model
    b: Model
    config: PretrainedConfig
    spec: SymmetrySpec
    untied: bool

    def layout(self, preferred: Model) -> Model:
        """The model whose files a result is written like: the preferred one, or the other if that was widened."""
        if preferred.widened is None:
            return preferred
        return self.b if preferred is self.a else self.a

    def require_one_size(self) -> None:
        """For what takes models in the sizes in which they are stored.

        Raises:
            IncompatibleModels: one of the two was widened.
        """
        for model in (self.a, self.b):
            if model.widened is not None:
                raise IncompatibleModels(
                    f"{model.ref} is narrower than the others; merge widens it, two models at a time"
                )

    def drop_when_read(self) -> None:
        """From now on, take shards from the Hub off the disk as soon as they have been read."""
        for model in (self.a, self.b):
            model.checkpoint.drop_when_read([n for link in model.names.links for n in link.sources])


def open_pair(
    a: str,
    b: str,
    *,
    untie: bool | None = None,
    specs: Path | None = None,
    trust_remote_code: bool = False,
) -> Pair:
    """Open two models and derive the symmetries of their architecture; the narrower one is widened.

    Args:
        a, b: folders or Hub references.
        untie: write `tie_word_embeddings: false`; None decides by whether that enlarges the group.
        specs: a folder of reviewed overrides to use before those that ship with the package.

    Raises:
        IncompatibleModels: different architectures or vocabularies, or sizes that cannot be brought together.
        CheckpointError: weights that are missing, damaged or not finite.
    """
    sources = [resolve(a), resolve(b)]
    folders = [source.folder for source in sources]
    configs = [read_config(f, trust_remote_code=trust_remote_code) for f in folders]
    _require_same_architecture((a, b), configs)
    require_same_vocabulary((a, b), folders)
    with waiting("deriving the symmetries"):
        config, spec, untied = choose_heads(configs[0], untie, specs)
        first = Architecture(config, spec)
        if _shapes(configs[0]) == _shapes(configs[1]):
            second = first
        else:
            second = Architecture(*choose_heads(configs[1], untied, specs)[:2])
    models = [_open(s, own, a, untied) for s, own, a in zip(sources, configs, (first, second), strict=True)]
    if second is first:
        return Pair(models[0], models[1], config, spec, untied)
    if is_wider(spec, second.spec):
        return Pair(models[0], _widened(models[1], second, first), config, spec, untied)
    return Pair(_widened(models[0], first, second), models[1], second.config, second.spec, untied)


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    return {n: tuple(p.shape) for n, p in build_without_weights(config).named_parameters()}


def _widened(model: Model, own: Architecture, wide: Architecture) -> Model:
    weights, change = widen(model.weights, own, wide)
    what = f"{model.ref} is widened ({described(own.spec, wide.spec)}); its outputs change by {change:.0e}"
    return replace(model, weights=weights, widened=what)


def choose_heads(
    config: PretrainedConfig, untie: bool | None, specs: Path | None = None
) -> tuple[PretrainedConfig, SymmetrySpec, bool]:
    """The config to align in: with heads untied if that is asked for, or enlarges the group."""
    spec = symmetries(config, specs)
    tied = bool(spec.ties) and getattr(config, "tie_word_embeddings", False)
    if not tied or untie is False:
        return config, spec, False
    loose = copy.deepcopy(config)
    loose.tie_word_embeddings = False
    free = symmetries(loose, specs)
    if untie or free.dimensions() > spec.dimensions():
        return loose, free, True
    return config, spec, False


def _open(source: Source, own: PretrainedConfig, architecture: Architecture, untied: bool) -> Model:
    ref, stored = source.reference, Checkpoint.open(source.folder, source.shards)
    aliases = inventory(build_without_weights(own)).ties if untied else {}
    names = match_names(build_without_weights(architecture.config), stored, architecture.spec.ties, aliases)
    if names.missing:
        more = f" and {len(names.missing) - 1} more" if len(names.missing) > 1 else ""
        raise CheckpointError(f"{ref} lacks {names.missing[0]}{more}, which its architecture needs")
    checkpoint = adapted(stored, source, names.alone())
    _require_tied(ref, checkpoint, names)
    weights = NamedWeights(checkpoint, names)
    _require_shapes(ref, weights, architecture.spec)
    return Model(source, own, checkpoint, names, weights)


def _require_tied(ref: str, checkpoint: Checkpoint, names: Names) -> None:
    """What is stored twice must be the same twice: transformers unties such weights, against the config."""
    for name, first, second in names.twice():
        if not torch.equal(*(link.load(checkpoint.__getitem__)[name] for link in (first, second))):
            raise CheckpointError(
                f"{ref} holds {name} as {first.sources[0]} and as {second.sources[0]}, and they differ; "
                "if they are not tied, set tie_word_embeddings to false in its config.json"
            )


def _require_same_architecture(refs: tuple[str, str], configs: list[PretrainedConfig]) -> None:
    kinds = [(type(c).__name__, tuple(c.architectures or ())) for c in configs]
    if kinds[0] != kinds[1]:
        described = [" ".join(k[1]) or k[0] for k in kinds]
        raise IncompatibleModels(f"{refs[0]} is a {described[0]} but {refs[1]} is a {described[1]}; they do not merge")


def _require_shapes(ref: str, weights: NamedWeights, spec: SymmetrySpec) -> None:
    for name in spec.parameters:
        shape, expected = weights.stored(name).shape, spec.shape(name)
        if tuple(shape) != expected:
            raise IncompatibleModels(
                f"{name} is {list(shape)} in {ref}, but of different sizes, {list(expected)}, by its config.json"
            )
