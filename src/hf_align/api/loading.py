"""Live models out of folders and repositories."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_align.checkpoints.companions import code_not_run, model_code
from hf_align.checkpoints.hub import resolve
from hf_align.errors import CheckpointError, HfAlignError, OptionError, first_line
from hf_align.tracing.build import model_class, read_config

logger = logging.getLogger(__name__)


def loaded(reference: str) -> PreTrainedModel:
    """A model with all of its weights, none of which is drawn at random, as transformers does where one is lacking.

    Args:
        reference: a folder, or `org/name` or `org/name@revision`.

    Raises:
        HfAlignError: there is no such model.
        CheckpointError: weights are missing or damaged.
        OptionError: it is an adapter.
    """
    source = resolve(reference)
    if source.adapter is not None:
        raise OptionError(
            f"{reference} is an adapter, which only output_dir and the command line read: merge it into its base first "
            "(merge_and_unload of peft)"
        )
    try:
        config = read_config(source.folder)
    except HfAlignError as error:
        if "--trust-remote-code" not in str(error):
            raise
        how = "load it with from_pretrained(..., trust_remote_code=True) and give the live model"
        raise HfAlignError(f"{reference} brings its own code: {how}") from error
    if model_code(source.folder):
        logger.warning(code_not_run(reference, config.model_type))
    at: dict[str, Any] = {} if source.repository is None else {"revision": source.commit}
    try:
        model, told = class_of(config).from_pretrained(
            source.repository or source.folder, dtype="auto", output_loading_info=True, **at
        )
    except (HfAlignError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a checkpoint may be damaged in any way
        raise CheckpointError(f"{reference} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(told["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{reference} lacks {missing[0]}{more}, which {type(model).__name__} needs")
    found: PreTrainedModel = model.eval()
    return found


def class_of(config: Any) -> Any:
    """The class that a config is built by."""
    return getattr(model_class(config), "__self__", None)
