"""Whether the head of a model is aligned apart from the embedding that it is tied to."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import HfAlignError, IncompatibleModels
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.fingerprint import Call, CannotRecord
from hf_align.tracing.first_calls import first_calls
from hf_align.tracing.small.shrink import shallow


def choose_heads(
    config: PretrainedConfig, untie: bool | None, specs: Path | None = None
) -> tuple[PretrainedConfig, SymmetrySpec]:
    """The config to align in, and its spec: with heads untied if that is asked for, or enlarges the group.

    Raises:
        HfAlignError: it is asked for, and the architecture computes something else with heads that are not tied.
    """
    spec = symmetries(config, specs)
    if spec.ties and is_tied(config) and untie is not False:
        if _can_be_untied(config):
            loose = untied(config)
            free = symmetries(loose, specs)
            if untie or free.dimensions() > spec.dimensions():
                return loose, free
        elif untie:
            raise HfAlignError(f"{config.model_type} computes something else with a head that is not tied")
    return config, spec


def tied_alike(
    refs: tuple[str, str], configs: tuple[PretrainedConfig, PretrainedConfig], untie: bool | None
) -> tuple[PretrainedConfig, PretrainedConfig]:
    """The configs of two models, untied where only one of them is.

    Raises:
        IncompatibleModels: only one is, and it must stay so.
    """
    tied = [is_tied(config) for config in configs]
    if tied[0] == tied[1] or not (loses_ties(configs[0], configs[1]) or loses_ties(configs[1], configs[0])):
        return configs
    ref, config = (refs[0], configs[0]) if tied[0] else (refs[1], configs[1])
    if untie is False or not _can_be_untied(config):
        raise IncompatibleModels(
            f"{refs[0]} and {refs[1]} do not merge with a tied head: tie_word_embeddings is true in {ref} alone"
        )
    first, second = (untied(c) if is_tied(c) else c for c in configs)
    return first, second


def is_tied(config: PretrainedConfig) -> bool:
    """Whether the config asks for a head that is the embedding."""
    return bool(getattr(config, "tie_word_embeddings", False))


def untied(config: PretrainedConfig) -> PretrainedConfig:
    """The config with a head of its own."""
    loose = copy.deepcopy(config)
    loose.tie_word_embeddings = False
    return loose


def loses_ties(before: PretrainedConfig, after: PretrainedConfig) -> bool:
    """Whether weights are tied by one config that are not by another."""
    if is_tied(before) == is_tied(after):
        return False
    first, second = (inventory(build_without_weights(c)).ties for c in (before, after))
    return bool(first.keys() - second.keys())


def _tied_and_loose(config: PretrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Models of a config as it is and as it is read once it was written untied."""
    loose = type(config).from_dict({**config.to_dict(), "tie_word_embeddings": False})
    loose.architectures = config.architectures
    return build_without_weights(config), build_without_weights(loose)


def _can_be_untied(config: PretrainedConfig) -> bool:
    """Whether a config that is written untied is read so, and computes the same with equal weights.

    Some classes tie again what they read, and some scale what a tied head reads. Two layers show it, unless the config
    of a model needs all of them.
    """
    try:
        models = _tied_and_loose(shallow(config))
    except Exception:  # configs refuse sizes in as many ways as there are configs
        models = _tied_and_loose(config)
    ties, left = (inventory(model).ties for model in models)
    if ties.keys() <= left.keys():
        return False
    for example in first_calls(models[0], 2, 7):
        try:
            before, after = (Call(example).fingerprint(m, ties) for m in models)
        except CannotRecord:
            continue
        return before == after
    return True  # what cannot be recorded is traced, and run, as it is
