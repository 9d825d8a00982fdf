"""An architecture as a function of its weights: what losses, features and learned matching are computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.runtime.devices import for_solving
from hf_align.tracing.build import build_to_run, quiet
from hf_align.tracing.returned import held

_ROWS, _TOKENS = 16, 2048
"""Examples, and tokens of them, that run at once where nothing else is said."""
_BLOCK, _BLOCKS = 256, 8
"""The least width of the blocks that a symmetric product is computed in, and how many there are at most."""
Batch = dict[str, Tensor]
"""Arguments of `forward`, [examples, ...]."""
Loss = Callable[[Any, Batch], Tensor]
"""From what a model answers, and the batch that it was given, to a scalar."""
Weights = Mapping[str, Tensor]
"""By name in memory, tied ones once."""
Build = Callable[[PretrainedConfig], PreTrainedModel]
"""A config's model in evaluation mode, with weights that take no memory."""


class Gram:
    """A sum of products xᵀ y over rows that come in parts, [n, m]."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._is_half = False

    def add(self, x: Tensor, y: Tensor) -> None:
        """More rows: x [rows, n], y [rows, m]; of all parts x is y, or of none."""
        if self._total is None:
            self._total, self._is_half = x.new_zeros(x.shape[1], y.shape[1]), x is y
        if self._is_half:
            add_half(self._total, x)
        else:
            self._total.addmm_(x.T, y)

    @property
    def total(self) -> Tensor:
        """The sum of at least one part, where it can be solved in float64."""
        assert self._total is not None
        if self._is_half:
            for start, end in _blocks(len(self._total)):
                self._total[:start, start:end] = self._total[start:end, :start].T
        return self._total.to(for_solving(self._total.device))


def add_half(total: Tensor, x: Tensor) -> None:
    """Add xᵀx to a matrix [n, n] in blocks on its diagonal and below."""
    for start, end in _blocks(len(total)):
        total[start:end, :end].addmm_(x[:, start:end].T, x[:, :end])


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    width = max(_BLOCK, -(-size // _BLOCKS))
    return ((start, min(start + width, size)) for start in range(0, size, width))


class Network:
    """The modelling code of a config, with no weights of its own.

    Args:
        config: the architecture.
        device: where buffers that the model computes for itself live; weights and inputs must be there too.
        dtype: that it computes in.
        build: how the model is built.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        build: Build = build_to_run,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self._build = build

    def must_hold(self, what: str) -> None:
        """Refuse `what` if weights are not held in memory, where outputs can be differentiated by them.

        Raises:
            CannotRun: they are not.
        """

    @cached_property
    def trained(self) -> frozenset[str]:
        """The weights that gradients train, tied ones once: all but running means and the like."""
        return frozenset(n for n, _ in self._module.named_parameters())

    def placed(self, weights: Weights) -> Weights:
        """Weights as this runs with them: where it is, in its dtype where they are floating point."""
        return {n: in_dtype(t.to(self.device), self.dtype) for n, t in weights.items()}

    def names(self, weights: Weights) -> Mapping[int, str]:
        """Identity -> name of the weights that ops may meet while this runs."""
        return {id(t): n for n, t in weights.items()}

    def module(self, weights: Weights) -> nn.Module:
        """The model with these weights in it, for what calls it in its own way."""
        model = self._build(self.config)
        real = {
            id(p): nn.Parameter(weights[n], requires_grad=False) for n, p in model.named_parameters() if n in weights
        }
        for path, module in model.named_modules():
            for key, parameter in module._parameters.items():  # also where one that is tied is not called by its name
                if id(parameter) in real:
                    module._parameters[key] = real[id(parameter)]
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    name = name_within(path, key)
                    # a run may write to its own copy, not to what is saved
                    module._buffers[key] = weights[name].clone() if name in weights else buffer.to(self.device)
        model.tie_weights()
        return model

    def gram(self) -> Gram:
        """An empty sum of products."""
        return Gram()

    @cached_property
    def _module(self) -> nn.Module:
        return runnable(self._build(self.config), self.device)

    def __call__(self, weights: Weights, batch: Batch) -> Any:
        """The model's output with placed weights; differentiable by them. What it writes to buffers is taken back."""
        buffers = [t for n, t in weights.items() if n not in self.trained]
        before = [(t, t._version, t.detach().clone()) for t in buffers]
        try:
            with quiet():
                return torch.func.functional_call(self._module, dict(weights), (), batch)
        finally:
            with torch.no_grad():
                for buffer, version, copy in before:
                    if buffer._version != version:
                        buffer.copy_(copy)

    def loss(self, weights: Weights, batch: Batch) -> Tensor:
        """The model's own loss, averaged over the labels of a batch."""
        loss: Tensor = self(weights, batch).loss
        return loss


def name_within(path: str, key: str) -> str:
    """What a tensor of a module is called in the whole model."""
    return f"{path}.{key}" if path else key


def runnable(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A model with no weights; the buffers that it computes for itself are on the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    return model


def floating(output: Any) -> list[Tensor]:
    """All floating point tensors that a model returns."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [v for v in leaves if _is_real(v)] or [v for v in held(output) if _is_real(v)]


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def predictions(output: Any) -> Tensor:
    """What a model is judged by: its logits, or its first floating point output if it has none."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else floating(output)[0]


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating point numbers in a dtype; whole numbers as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def joined(parts: Sequence[Batch]) -> Batch:
    """Several batches as one."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def batches(data: Batch, rows: int | None = None) -> Iterator[Batch]:
    """Data in order, `rows` examples at a time; by default few enough that logits of a large vocabulary fit."""
    if rows is None:
        tokens = max((t.shape[1] for t in data.values() if t.dim() > 1 and not t.is_floating_point()), default=1)
        rows = max(1, min(_ROWS, _TOKENS // tokens))
    for start in range(0, len(next(iter(data.values()))), rows):
        yield {name: tensor[start : start + rows] for name, tensor in data.items()}
