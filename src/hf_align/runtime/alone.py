"""One call of the library at a time, whatever surrounds it: while it traces, torch is patched for the whole process."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from traceback import walk_stack
from typing import Any, ParamSpec, TypeVar

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
        drawn = torch.random.fork_rng(devices=[])  # by loaders, and by some modules
        with _LOCK, _in_full_precision(), _with_full_products(), drawn:
            return call(*args, **kwargs)

    return locked


def warn_the_caller(message: str) -> None:
    """Warn at the line outside of this package from which it was called, whatever lies between."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe()))
    inside = takewhile(lambda name: name.startswith("hf_align."), names)
    warnings.warn(message, stacklevel=1 + sum(1 for _ in inside))


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


@contextmanager
def _with_full_products() -> Iterator[None]:
    """Products of float32 in float32. On GPUs convolutions round their factors to 10 bits unless told not to, and
    `torch.set_float32_matmul_precision` lets others do so: far more than the witness takes for rounding."""
    backends: Any = torch.backends
    kinds = [getattr(of, kind) for of in (backends.cudnn, backends.mkldnn) for kind in ("conv", "rnn")]
    kinds += [backends.cuda.matmul, backends.mkldnn.matmul]
    before = [(kind, kind.fp32_precision) for kind in kinds]
    # torch has two ways to say it, and will not be asked in one what was said in the other
    asked, allowed = torch.get_float32_matmul_precision, partial(getattr, backends.cudnn, "allow_tf32")
    products, convolutions = _said(asked), _said(allowed)
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            backends.cudnn.allow_tf32 = convolutions
        for kind, precision in before:
            kind.fp32_precision = precision


def _said(ask: Callable[[], _T]) -> _T | None:
    try:
        return ask()
    except RuntimeError:
        return None
