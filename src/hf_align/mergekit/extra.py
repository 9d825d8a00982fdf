"""Whether mergekit is there, and the recipe as mergekit reads it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from hf_align.errors import HfAlignError
from hf_align.mergekit.config import NAMING, first_fault

_GATES = ("hidden", "cheap_embed", "random", "uniform_random")
"""How mergekit-moe makes routers."""
VERSIONS = ((0, 1, 5), (0, 2, 0))
"""From the first on, below the second: its loaders and its methods are called as they are there."""


def version() -> str:
    """The version of mergekit.

    Raises:
        HfAlignError: it is not installed.
    """
    try:
        return importlib.metadata.version("mergekit")
    except importlib.metadata.PackageNotFoundError as error:
        raise HfAlignError("mergekit is not installed; pip install 'hf-align[mergekit]'") from error


def is_known() -> bool:
    """Whether mergekit is of a version whose interfaces are known, and has them."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version())[:3])
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        return False
    try:
        from mergekit.io.tasks import LoaderCache
        from mergekit.merge_methods import merge_tensors
    except ImportError:
        return False
    return isinstance(getattr(LoaderCache(), "loaders", None), dict) and callable(merge_tensors)


def require_known() -> None:
    """See that mergekit's methods can be called.

    Raises:
        HfAlignError: mergekit is not there, or its interfaces are not those that are known.
    """
    if not is_known():
        raise HfAlignError(
            f"the methods of mergekit {version()} are not called as those of 0.1.5; pip install 'hf-align[mergekit]', "
            "or give a recipe to hf-align mergekit"
        )


def parse(recipe: Mapping[str, Any]) -> Any:
    """The recipe as mergekit reads it.

    Raises:
        HfAlignError: mergekit refuses it.
    """
    from mergekit import merge_methods
    from mergekit.config import MergeConfiguration

    try:
        config = MergeConfiguration.model_validate(recipe)
        merge_methods.get(config.merge_method)
    except ValidationError as error:
        raise HfAlignError(f"the recipe is rejected by mergekit: {first_fault(error)}") from error
    except (RuntimeError, KeyError, ValueError) as error:
        raise HfAlignError(f"the recipe is rejected by mergekit: {str(error).splitlines()[0]}") from error
    return config


def unread(recipe: Mapping[str, Any]) -> list[str]:
    """Keys and parameters of a recipe that mergekit passes over in silence, misspelled or of another method."""
    from mergekit import merge_methods
    from mergekit.config import InputModelDefinition, InputSliceDefinition, MergeConfiguration, OutputSliceDefinition

    method = merge_methods.get(str(recipe["merge_method"]))
    known = {parameter.name for parameter in method.spec.parameters}
    slices = recipe.get("slices") or []
    levels: list[tuple[type[BaseModel], Sequence[Mapping[str, Any]]]] = [
        (MergeConfiguration, [recipe]),
        (InputModelDefinition, recipe.get("models") or []),
        (OutputSliceDefinition, slices),
        (InputSliceDefinition, [source for each in slices for source in each["sources"]]),
    ]
    found = [key for kind, entries in levels for entry in entries for key in entry if key not in kind.model_fields]
    asked = [entry.get("parameters") or {} for _, entries in levels for entry in entries]
    found += [f"parameters: {name}" for parameters in asked for name in parameters if name not in known]
    return list(dict.fromkeys(found))


def require_experts(recipe: Mapping[str, Any]) -> None:
    """See that mergekit-moe takes the recipe.

    Raises:
        HfAlignError: it does not, or the prompts do not tell experts apart.
    """
    from mergekit.moe.config import MoEMergeConfig

    try:
        config = MoEMergeConfig.model_validate(recipe)
    except (ValidationError, RuntimeError) as error:
        why = first_fault(error) if isinstance(error, ValidationError) else str(error)
        raise HfAlignError(f"the recipe is rejected by mergekit-moe: {why}") from error
    if not 1 <= config.experts_per_token <= len(config.experts):
        count, wanted = len(config.experts), config.experts_per_token
        raise HfAlignError(f"the recipe has {count} experts; experts_per_token is {wanted}")
    if config.gate_mode not in _GATES:
        raise HfAlignError(f"gate_mode is {config.gate_mode!r}; it must be one of {', '.join(map(repr, _GATES))}")
    if config.gate_mode != "random" and not all(expert.positive_prompts for expert in config.experts):
        raise HfAlignError(f"every expert needs positive_prompts for gate_mode {config.gate_mode}")


def models_of(recipe: Any) -> list[str]:
    """What a recipe calls its models, in the order in which it names them, and the base model last.

    It is read as it is written, which is the same in every version of mergekit.
    """
    return list(dict.fromkeys(name for key in NAMING for name in _named(recipe, key)))


def _named(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get(key), str):
            yield value[key]
        for inner in value.values():
            yield from _named(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _named(inner, key)


def dtype_of(config: Any, *keys: str) -> torch.dtype | None:
    """The first of these dtypes that a recipe sets.

    Raises:
        HfAlignError: it is not the name of one.
    """
    named = next((value for key in keys if (value := getattr(config, key))), None)
    if named is None:
        return None
    found = getattr(torch, named.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise HfAlignError(f"the recipe's dtype {named} is not a dtype; write float32, float16 or bfloat16")
    return found
