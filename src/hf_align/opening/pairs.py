"""Two models opened to be aligned: of one architecture, one size and one vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.hub import resolve
from hf_align.checkpoints.naming import NamedWeights
from hf_align.checkpoints.ondemand import Computed
from hf_align.checkpoints.token_ids import require_same_vocabulary, same_vocabulary
from hf_align.errors import IncompatibleModels
from hf_align.opening.agreement import require_alike
from hf_align.opening.depths import deepenings_of
from hf_align.opening.heads import loses_ties
from hf_align.opening.larger import enlarged, larger_sizes
from hf_align.opening.models import Model, open_model, with_buffers
from hf_align.opening.sizes import Sizes
from hf_align.opening.vocabularies import require_same_number_of_tokens, respelling_of
from hf_align.runtime.progress import waiting
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import read_config
from hf_align.tracing.fields import Path as Field

Respell = Callable[[Model, Model], Model]
"""A model in the vocabulary of another, and that other -> the model."""


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture, with what can be done to it.

    Attributes:
        config: of the aligned models, the wider one's; heads are untied in it where that enlarges the group.
        untied: whether those of one were.
        larger: fields of the config that are larger than those of both models.
    """

    a: Model
    b: Model
    config: PretrainedConfig
    spec: SymmetrySpec
    untied: bool
    larger: Mapping[Field, int]

    def layout(self, preferred: Model) -> Model:
        """The model whose files a result is written like: the preferred one, or the other if that was changed."""
        if not preferred.is_fitted:
            return preferred
        return self.b if preferred is self.a else self.a

    @property
    def larger_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of weights, by name in memory, where they may be larger than in both checkpoints."""
        return {name: self.spec.shape(name) for name in self.spec.parameters} if self.larger else {}

    def require_one_size(self) -> None:
        """For what takes models in the sizes in which they are stored.

        Raises:
            IncompatibleModels: one of the two was made larger.
        """
        for model in (self.a, self.b):
            if model.widened is not None:
                raise IncompatibleModels(
                    f"{model.ref} is smaller than the others; only a merge of two makes the smaller one larger"
                )


def open_pair(
    a: str,
    b: str,
    *,
    untie: bool | None = None,
    moves: bool = True,
    specs: Path | None = None,
    respell: Respell | None = None,
    widen: Mapping[str, int] | None = None,
    trust_remote_code: bool = False,
) -> Pair:
    """Open two models and derive the symmetries of their architecture; the smaller one is made larger.

    Args:
        a, b: folders or Hub references.
        respell: what is done further to B in the vocabulary of A, where it has another; without it such are refused.
        widen: fields of the config that both are made larger by, and how large they become.
        untie: write `tie_word_embeddings: false`; None decides by whether that enlarges the group.
        moves: whether anything is to be moved; heads that are tied in both stay so where nothing is.
        specs: a folder of reviewed overrides to use before those that ship with the package.

    Raises:
        IncompatibleModels: other vocabularies, models that compute differently, or sizes, that nothing brings together.
        CheckpointError: weights that are missing, damaged or not finite.
        OptionError: nothing can be widened so.
    """
    sources = [resolve(a), resolve(b)]
    folders = [source.folder for source in sources]
    configs = [read_config(f, trust_remote_code=trust_remote_code) for f in folders]
    if respell is None:
        require_same_vocabulary((a, b), folders)
    stored = [Checkpoint.open(source.folder, source.shards) for source in sources]
    configs = [with_buffers(*each) for each in zip(configs, sources, stored, strict=True)]
    respelling = None if respell is None else respelling_of(folders, configs)
    if respelling is not None:
        configs[1] = respelling.config
    elif respell is not None and not same_vocabulary(folders):
        raise IncompatibleModels(
            f"{a} and {b} have different vocabularies; --retokenize needs a tokenizer.json in both"
        )
    deepenings = deepenings_of(configs)
    deep = [config if d is None else d.config for config, d in zip(configs, deepenings, strict=True)]
    with waiting("comparing the configs"):
        alike = require_alike((a, b), deep[0], deep[1], untie)
    if respell is None:
        require_same_number_of_tokens((a, b), alike, folders)
    with waiting("deriving the symmetries"):
        sizes = Sizes.of(configs, alike, deepenings, untie if moves or untie else False, specs)
    sizes.require_one_small((a, b), respelled=respelling is not None)
    opened = zip(sources, stored, configs, sizes.stored_as, (None, respelling), strict=True)
    models = _in_one_precision([open_model(*each) for each in opened])
    if respell is not None and respelling is not None:
        models[1] = respell(models[1], models[0])
    untied = any(loses_ties(own, sizes.architectures[0].config) for own in configs)
    both, large = sizes.fitted(models, sizes.places(models)), sizes.large
    larger = larger_sizes(large.config, widen or {})
    if larger:
        both, large = enlarged(both, large, larger, specs)
    return Pair(both[0], both[1], large.config, large.spec, untied, larger)


def _in_one_precision(models: list[Model]) -> list[Model]:
    """What one of two models stores as float64 is read as float64 from both."""
    stored = [NamedWeights(m.checkpoint, m.names) for m in models]
    wide = {n for weights in stored for n in weights if weights.stored(n).dtype == torch.float64}
    if not wide:
        return models

    def doubled(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return Computed(weights, lambda name: weights[name].double() if name in wide else weights[name])

    return [replace(model, weights=doubled(model.weights)) for model in models]
