"""One call of the library at a time: while it traces, torch is patched for the whole process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LOCK = threading.RLock()


def alone(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let other threads wait: two that take back a patch in another order than they made it leave it for good, and
    modules that are built after that have no values."""

    @functools.wraps(call)
    def locked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _LOCK:
            return call(*args, **kwargs)

    return locked
