"""What is put around a call of a model, and taken away behind it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_align.tracing.fields import parts

_DEVICES = ("cpu", "cuda")


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """The model with all its numbers in float64, and a config that says so, as a model has that was loaded in it;
    `doubled` does the same to what it is given."""
    made = dict[int, Tensor]()  # of what several modules have, one
    before = list[tuple[dict[str, Any], dict[str, Any]]]()
    said = [(part, part.dtype) for part in parts(model.config) if hasattr(part, "dtype")]  # type: ignore[arg-type]
    try:
        for part, _ in said:
            part.dtype = torch.float64
        for held in (held for m in model.modules() for held in (m._parameters, m._buffers)):
            before.append((held, {**held}))
            for name, value in before[-1][1].items():
                if value is not None and value.is_floating_point():
                    held[name] = made.setdefault(id(value), value.double())  # type: ignore[assignment]
        yield
    finally:
        for changed, values in before:
            changed.update(values)
        for part, dtype in said:
            part.dtype = dtype


def doubled(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with all their numbers in float64."""
    return {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in arguments.items()}  # fmt: skip


@contextmanager
def trained(model: nn.Module) -> Iterator[None]:
    """Weights that get gradients."""
    weights = [w for w in model.parameters() if w.is_floating_point() and not w.requires_grad]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for weight in weights:
            weight.requires_grad_(False)


@contextmanager
def autocast() -> Iterator[None]:
    """Under an autocast that rounds nothing, since it casts to float32: it is asked for, not for what it does."""
    with ExitStack() as stack:
        for device in _DEVICES:
            stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
            stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
            torch.set_autocast_dtype(device, torch.float32)
            torch.set_autocast_enabled(device, True)
        stack.callback(torch.clear_autocast_cache)
        yield


class OnCuda(TorchFunctionMode):
    """While tensors say that they are on a GPU, and what is made there is made here."""

    _SAID: Mapping[Any, Any] = {
        Tensor.device.__get__: torch.device("cuda", 0),
        Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
        Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._SAID:
            return self._SAID[func]
        return func(*map(_here, args), **{name: _here(value) for name, value in (kwargs or {}).items()})


def _here(value: Any) -> Any:
    """A device that stands for another one."""
    is_device = isinstance(value, (torch.device, str)) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_device else value


@contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """What is made without a dtype gets this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def other_threads() -> Iterator[None]:
    """With one thread, or with two where there is one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def in_folder(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model as if it had been loaded from a folder of some name."""
    before = model.name_or_path, model.config._name_or_path
    try:
        model.name_or_path = model.config._name_or_path = name
        yield
    finally:
        model.name_or_path, model.config._name_or_path = before


@contextmanager
def hooked(model: nn.Module) -> Iterator[None]:
    """With hooks on all modules that do nothing."""
    with ExitStack() as stack:
        for module in [*model.modules()]:
            stack.callback(module.register_forward_pre_hook(lambda *_: None).remove)
            stack.callback(module.register_forward_hook(lambda *_: None).remove)
        yield


@contextmanager
def with_number(model: nn.Module, state: str) -> Iterator[None]:
    """With a number that a module keeps, `path.name=value`, as after other calls; whoever called takes it back."""
    path, _, value = state.partition("=")
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, int(value))
    yield


@contextmanager
def with_variable(model: nn.Module, setting: str) -> Iterator[None]:
    """With a variable of the environment, `NAME=value`."""
    name, _, value = setting.partition("=")
    with patch.dict(os.environ, {name: value}):
        yield


@contextmanager
def answered(model: nn.Module, name: str, holders: Sequence[ModuleType], files: Collection[str]) -> Iterator[None]:
    """While the modelling code gets the opposite of what a function says; nothing else does, for torch asks itself.

    Args:
        holders: the modules in which the function is found.
        files: the names of the Python modules in which that code stands.
    """
    plain = getattr(holders[0], name)

    def otherwise(*arguments: Any, **more: Any) -> Any:
        said = plain(*arguments, **more)
        is_own = sys._getframe(1).f_globals.get("__name__") in files
        return not said if is_own and isinstance(said, bool) else said

    with ExitStack() as stack:
        for holder in holders:
            stack.enter_context(patch.object(holder, name, otherwise))
        yield
