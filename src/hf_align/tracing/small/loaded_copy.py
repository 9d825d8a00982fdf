"""Whether a class computes with what the files of its models hold.

Code that a model brings along may load weights in a way of its own, and change them, or the model, as it does so. Then
the model that is derived from a config and moved by its files is not the one that is run. So a small copy with random
weights is saved, and loaded as a user loads it.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_align.errors import IncompatibleModels
from hf_align.tracing.build import quiet
from hf_align.tracing.reasons import reason
from hf_align.tracing.small.asked_copy import SmallCopy


def require_as_stored(small: SmallCopy) -> None:
    """See that loading the files of a small copy gives its weights, and its answers where its class has a
    `from_pretrained` of its own.

    Classes of transformers are loaded by transformers alone, and are not tried. Old code that transformers loads may
    find tables empty that it filled when it was built, which is no matter of weights.

    Raises:
        IncompatibleModels: it gives others, or fails in that `from_pretrained`.
    """
    kind = type(small.model)
    if kind.__module__.startswith("transformers."):
        return
    stored, loads_itself = small.stored, _home(kind, "from_pretrained") is not PreTrainedModel
    try:
        loaded = _loaded(small.model, stored)
        answers = small.answers_of_another(loaded) if loads_itself else []
    except Exception as error:  # whatever the code of a class raises
        if not loads_itself:
            return
        raise IncompatibleModels(
            f"{kind.__name__} has a from_pretrained of its own, which could not be tried on a small copy "
            f"({reason(error)}); leave loading to transformers, or merge with --match none"
        ) from error
    found = loaded.state_dict()
    for name, weight in stored.items():
        if name in found and not torch.equal(found[name], weight):
            raise IncompatibleModels(
                f"{kind.__name__} changes {name} as it is loaded: it computes with other weights than its files hold; "
                "have its code leave them as they are, or merge with --match none"
            )
    if loads_itself and not small.is_plain(answers):
        raise IncompatibleModels(
            f"{kind.__name__} answers otherwise as from_pretrained loads it than as its config builds it; have its "
            "code build it alike in both, or merge with --match none"
        )


def _home(kind: type, name: str) -> type:
    """The class that a method of another stands in."""
    return next(base for base in kind.__mro__ if name in vars(base))


def _loaded(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model as it is loaded from files that hold some weights."""
    config = copy.deepcopy(model.config)
    config.dtype = torch.float32
    weights = {name: weight.contiguous() for name, weight in stored.items()}
    with tempfile.TemporaryDirectory(prefix="hf-align-") as folder, quiet(), redirect_stderr(io.StringIO()):
        config.save_pretrained(folder)
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        return type(model).from_pretrained(folder, config=config).eval()
