"""One call of the library at a time, whatever surrounds it: while it traces, torch is patched for the whole process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LOCK = threading.RLock()
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def alone(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let other threads wait: two that take back a patch in another order than they made it leave it for good, and
    modules are no longer cast or moved."""

    @functools.wraps(call)
    def locked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _LOCK, _in_full_precision(), torch.random.fork_rng(devices=[]):  # loaders draw, and some modules
            return call(*args, **kwargs)

    return locked


@contextmanager
def _in_full_precision() -> Iterator[None]:
    """On the CPU, and without rounding: a caller's autocast would round every run, which the witness would take for a
    change of the function, and what is made in half precision or on another device would be of no use here."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if dtype.itemsize < torch.float32.itemsize:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield
