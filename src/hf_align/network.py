"""An architecture as a function of its weights: what losses, features and learned matching are computed with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_align.trace import build_without_weights, quiet

Batch = dict[str, Tensor]
"""Arguments of `forward`, [examples, ...]."""


class Network:
    """The modelling code of a config, with no weights of its own.

    Args:
        config: the architecture.
        device: where buffers that the model computes for itself live; weights and inputs must be there too.
    """

    def __init__(self, config: PretrainedConfig, device: str | torch.device = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)

    @cached_property
    def _module(self) -> nn.Module:
        model = build_without_weights(self.config).eval()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.device)
        return model

    def __call__(self, weights: Mapping[str, Tensor], batch: Batch) -> Any:
        """The model's output with these weights (by name in memory, tied ones once); differentiable by them."""
        with quiet():
            return torch.func.functional_call(self._module, dict(weights), (), batch)

    def placed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights where the network is, in float32 where they are floating point."""
        return {n: in_float32(t.to(self.device)) for n, t in weights.items()}

    def loss(self, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The model's own loss, averaged over the labels of a batch."""
        loss: Tensor = self(weights, batch).loss
        return loss


def predictions(output: Any) -> Tensor:
    """What a model is judged by: its logits, or its first floating point output if it has none."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return next(v for v in output.values() if isinstance(v, Tensor) and v.is_floating_point())


def in_float32(tensor: Tensor) -> Tensor:
    """Floating point numbers in single precision; whole numbers as they are."""
    return tensor.float() if tensor.is_floating_point() else tensor


def batches(data: Batch, rows: int = 32) -> Iterator[Batch]:
    """Data in order, `rows` examples at a time."""
    for start in range(0, len(next(iter(data.values()))), rows):
        yield {name: tensor[start : start + rows] for name, tensor in data.items()}
