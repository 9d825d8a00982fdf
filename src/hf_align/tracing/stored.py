"""What checkpoints hold beside weights: masks, tables and counters, which the modelling code may read as it reads a
config. They are noted in the config, and a model that is built from it has them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

NOTED = "stored_buffers"
"""The field of a config that names them."""
_TENSORS: dict[str, Tensor] = {}
"""By what a config notes of them, so that it stays plain JSON."""


def with_stored(config: PretrainedConfig, buffers: Mapping[str, Tensor]) -> PretrainedConfig:
    """A config that notes some buffers, by their names in memory."""
    if not buffers:
        return config
    noted = copy.deepcopy(config)
    setattr(noted, NOTED, {name: _noted(tensor) for name, tensor in buffers.items()})
    return noted


def noted_buffers(config: PretrainedConfig) -> dict[str, str]:
    """Name in memory -> what tells one value from others."""
    found: dict[str, str] = getattr(config, NOTED, {})
    return found


def load_stored(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Give a model the buffers that its config notes; a copy in other sizes keeps those that it has computed."""
    noted = noted_buffers(config)
    for path, module in model.named_modules() if noted else ():
        for key, buffer in module._buffers.items():
            tensor = _TENSORS.get(noted.get(f"{path}.{key}" if path else key, ""))
            if buffer is not None and tensor is not None and tensor.shape == buffer.shape:
                module._buffers[key] = tensor.to(buffer.dtype, copy=True)


def _noted(tensor: Tensor) -> str:
    """Dtype, shape, and a digest of the entries."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    key = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    _TENSORS.setdefault(key, tensor)
    return key
