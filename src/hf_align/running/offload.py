"""Models that do not fit into memory, run all the same: accelerate reads the weights of a module when it runs, and lets
go of them behind it.

The weights come from a mapping that makes them as they are asked for, straight from the safetensors files: nothing is
copied to a folder first. Statistics, which for wide models are as large as the models, are summed in files.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import get_max_memory
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.checkpoints.ondemand import Computed, OnDemand
from hf_align.errors import CannotRun
from hf_align.running.network import Batch, Build, Gram, Network, Weights, in_dtype, name_within, runnable
from hf_align.runtime.devices import CPU
from hf_align.tracing.build import build_to_run, build_without_weights, inventory, quiet

_COPIES = 4
"""Of a model in float32, at most, while two are compared as they are and aligned."""


def network_for(
    config: PretrainedConfig,
    device: torch.device,
    offload: bool | None = None,
    *,
    copies: int = _COPIES,
    dtype: torch.dtype = torch.float32,
    build: Build = build_to_run,
) -> Network:
    """What runs an architecture: with weights in memory, or read as they are needed.

    Args:
        offload: as asked; None decides by whether the models fit into the device's memory.
        copies: of a model that are held at most.
        dtype, build: as `Network` takes them.
    """
    if offload is None:
        parameters = build_without_weights(config).parameters()
        offload = copies * dtype.itemsize * sum(p.numel() for p in parameters) > room(device)
    return (OffloadedNetwork if offload else Network)(config, device, dtype, build)


def room(device: torch.device) -> int:
    """Bytes that are free on a device, those that torch keeps for later tensors among them."""
    if device != CPU:
        getattr(torch.get_device_module(device), "empty_cache", lambda: None)()
    free = get_max_memory()
    return int(free["cpu"] if device.type == "cpu" else free.get(device.index or 0, free["cpu"]))


class Streamed(OnDemand):
    """Weights on a device, made anew each time they are asked for; and the model that runs with them.

    Args:
        model: with no weights.
        dtype: of those that are floating point.

    Attributes:
        module: with no weights but those of the modules that are running.
        running: those, by identity -> name.
    """

    def __init__(self, weights: Weights, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(weights)
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self.running: dict[int, str] = {}
        model = runnable(model, device)
        ties = inventory(model).ties
        _made_plain(model)
        names = {name: ties.get(name, name) for name, _ in model.named_parameters(remove_duplicate=False)}
        for path, module in model.named_modules():
            for key in [k for k in module._buffers if name_within(path, k) in weights]:
                module._buffers[key] = self[name_within(path, key)]
        with quiet():
            self.module: nn.Module = dispatch_model(
                model,
                {"": "disk"},
                main_device=device,
                state_dict=Computed(names, lambda name: self[names[name]]),
                offload_index={},  # in place of a folder: the mapping has every weight
            )
        for path, module in model.named_modules():
            own = {key: names[name_within(path, key)] for key, p in module._parameters.items() if p is not None}
            if own:
                add_hook_to_module(module, _Naming(own, self.running), append=True)

    def __getitem__(self, name: str) -> Tensor:
        return in_dtype(self._weights[name].to(self._device), self._dtype)


def _made_plain(model: nn.Module) -> None:
    """Parameters on no device in place of fake ones, which cannot be set again."""
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                module._parameters[key] = plain.setdefault(id(parameter), nn.Parameter(empty, requires_grad=False))


class _Naming(ModelHook):  # type: ignore[misc]
    """Behind the hook that loads a module's weights: says which they are while it runs."""

    def __init__(self, own: Mapping[str, str], running: dict[int, str]) -> None:
        self._own = own
        self._running = running
        self._known: list[int] = []

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._known = [id(module._parameters[key]) for key in self._own]
        self._running.update(zip(self._known, self._own.values(), strict=True))
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for known in self._known:
            self._running.pop(known, None)
        return output


class OffloadedNetwork(Network):
    """The modelling code of a config, for weights that are never held whole; not to be differentiated."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._folder = tempfile.TemporaryDirectory(prefix="hf-align-")
        self._files = (Path(self._folder.name) / str(number) for number in itertools.count())

    def must_hold(self, what: str) -> None:
        raise CannotRun(f"{what}, where they do not fit or --offload is given")

    def placed(self, weights: Weights) -> Weights:
        return Streamed(weights, self._build(self.config), self.device, self.dtype)

    def names(self, weights: Weights) -> Mapping[int, str]:
        assert isinstance(weights, Streamed)
        return weights.running

    def module(self, weights: Weights) -> nn.Module:
        assert isinstance(weights, Streamed)
        return weights.module

    def gram(self) -> Gram:
        return _GramOnDisk(next(self._files))

    def __call__(self, weights: Weights, batch: Batch) -> Any:
        with quiet(), torch.no_grad():
            return self.module(weights)(**batch)


class _GramOnDisk(Gram):
    """A sum in a file, in memory only while it grows or is asked for."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._shape: tuple[int, int] | None = None
        self._dtype = torch.float64

    def add(self, x: Tensor, y: Tensor) -> None:
        self._shape, self._dtype = (x.shape[1], y.shape[1]), x.dtype
        if x.device.type == "cpu":
            self._mapped().addmm_(x.T, y)  # with no copy of the sum's size
        else:
            self._mapped().add_((x.T @ y).cpu())

    @property
    def total(self) -> Tensor:
        return self._mapped().clone()

    def _mapped(self) -> Tensor:
        assert self._shape is not None
        rows, columns = self._shape
        flat = torch.from_file(str(self._file), shared=True, size=rows * columns, dtype=self._dtype)
        return flat.view(rows, columns)
