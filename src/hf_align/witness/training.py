"""A model in training mode, but for what that is meant to change: nothing is dropped, and statistics are those that are
stored. Whatever else its code does while it is trained is a function of its weights as any other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import Signature, isfunction, signature
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_OFF = {"training": False, "train": False, "dropout_p": 0.0}
"""What functions are told where nothing is trained."""


class DrawsAtRandom(Exception):
    """What a model does in training mode is another thing each time."""


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """In training mode, without dropout and without statistics of the batch.

    Raises:
        DrawsAtRandom: it draws numbers all the same, for noise or to leave out layers.
    """
    turned = [module for module in model.modules() if not module.training and not _trains_by_itself(module)]
    before, theirs = torch.default_generator.get_state(), (random.getstate(), np.random.get_state())
    try:
        for module in turned:
            module.training = True
        with _NothingDropped():
            yield
        drawn = (random.getstate(), np.random.get_state())
    finally:
        for module in turned:
            module.training = False
        random.setstate(theirs[0])
        np.random.set_state(theirs[1])
    if not torch.default_generator.get_state().equal(before) or repr(drawn) != repr(theirs):
        raise DrawsAtRandom


def _trains_by_itself(module: nn.Module) -> bool:
    """Whether training mode means something to a module of torch, or statistics are kept, of which it takes others."""
    kept = (buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set)
    if any(buffer is not None and buffer.is_floating_point() for buffer in kept):
        return True
    return _is_of_torch(type(module).forward) and any(
        "training" in method.__code__.co_names
        for kind in type(module).__mro__
        if kind is not nn.Module
        for method in vars(kind).values()
        if isfunction(method) and _is_of_torch(method)
    )


def _is_of_torch(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith("torch.")


class _NothingDropped(TorchFunctionMode):
    """While functions of torch are told that nothing is trained."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        known = _signature(func) if getattr(func, "__module__", "") == "torch.nn.functional" else None
        if known is not None:
            kwargs = dict(known.bind(*args, **kwargs).arguments)
            args = ()
        return func(*args, **{name: _OFF.get(name, value) for name, value in kwargs.items()})


@cache
def _signature(func: Callable[..., Any]) -> Signature | None:
    """Of a function with an argument that is told whether something is trained."""
    try:
        found = signature(func)
    except (TypeError, ValueError):
        return None
    simple = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found.parameters.values())
    return found if simple and _OFF.keys() & found.parameters.keys() else None
