"""Calls that may fail, on a device that would not survive it.

An index out of range is an exception on the CPU. On a GPU it is an assertion, after which the process can use the GPU
no more (CUDA C++ Programming Guide, "Assertion"). So what is only tried, as arguments that a model may not take and
data that may not fit it, asks the CPU first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_align.runtime.devices import CPU


def first_at_home(device: torch.device) -> AbstractContextManager[object]:
    """In the block, an op on a device raises what it would raise on the CPU where its whole numbers do not fit."""
    return nullcontext() if device.type == "cpu" else _FirstAtHome()  # type: ignore[no-untyped-call]


class _FirstAtHome(TorchDispatchMode):
    """Runs each op that takes whole numbers on the CPU first. Real numbers need not be brought there to see whether
    whole ones fit; only where something is wrong they are, for it may be that they are missed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_there = any(t.device.type not in ("cpu", "meta") for t in tensors)
        if is_there and "device" not in kwargs and any(map(_is_whole, tensors)):
            _see_that_it_runs(func, args, kwargs)
        return func(*args, **kwargs)


def _see_that_it_runs(func: Any, args: Any, kwargs: Any) -> None:
    try:
        func(*tree_map(_stand_in, args), **tree_map(_stand_in, kwargs))
    except NotImplementedError:  # it runs on this device alone
        return
    except (IndexError, RuntimeError):
        func(*tree_map(_at_home, args), **tree_map(_at_home, kwargs))


def _stand_in(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return torch.zeros(value.shape, dtype=value.dtype)
    return _at_home(value)


def _at_home(value: Any) -> Any:
    return value.to(CPU, copy=True) if isinstance(value, Tensor) else value


def _is_whole(tensor: Tensor) -> bool:
    return tensor.dtype is not torch.bool and not tensor.is_floating_point() and not tensor.is_complex()
