"""Whether mergekit is there, and the recipe as mergekit reads it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from hf_align.config import first_fault
from hf_align.errors import HfAlignError

VERSIONS = ((0, 1, 5), (0, 2, 0))
"""From the first on, below the second: its loaders and its methods are called as they are there."""


def require() -> None:
    """See that mergekit is there, in a version whose interfaces are known.

    Raises:
        HfAlignError: it is not.
    """
    try:
        version = importlib.metadata.version("mergekit")
    except importlib.metadata.PackageNotFoundError as error:
        raise HfAlignError("mergekit is not installed; pip install hf-align[mergekit]") from error
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        raise HfAlignError(
            f"mergekit {version} is not one that this version works with; pip install hf-align[mergekit], or move each "
            "model with hf-align align and give mergekit the folders"
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
        raise HfAlignError(f"the recipe is not one of mergekit's: {first_fault(error)}") from error
    except (RuntimeError, KeyError, ValueError) as error:
        raise HfAlignError(f"the recipe is not one of mergekit's: {str(error).splitlines()[0]}") from error
    if lora := [str(m) for m in config.referenced_models() if m.lora is not None]:
        raise HfAlignError(f"{lora[0]} is a model with an adapter; merge the adapter into the model first")
    return config


def models_of(config: Any) -> list[str]:
    """What a recipe calls its models, in the order in which it names them."""
    found = [entry.model for entry in config.models or ()]
    found += [source.model for piece in config.slices or () for source in piece.sources]
    base = [config.base_model] if config.base_model else []
    rest = sorted(config.referenced_models(), key=str)
    return list(dict.fromkeys(str(model) for model in (*found, *base, *rest)))


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
        raise HfAlignError(f"the recipe's dtype {named} is none; write float32, float16 or bfloat16")
    return found
