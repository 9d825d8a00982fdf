"""While ops come to a recorder one by one, as code calls them: torch computes none of them together with others, looks
for no types that no recorder asks for, and casts no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dispatch.python import no_python_dispatcher

_HANDLE: Any = torch._library.utils.handle_dispatch_mode


@contextmanager
def as_called(recorder: Any, seen: Callable[..., Any]) -> Iterator[None]:
    """All calls of the block.

    Args:
        seen: what `recorder` makes of an op with its arguments.
    """
    stay = patch.object(nn.Module, "_apply", lambda module, *_, **__: module)  # a cast of weights is none of ours
    straight = patch.object(torch._library.utils, "handle_dispatch_mode", partial(_handed_on, recorder, seen))
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # attention and layers for which torch has an op that is one step
    try:
        with stay, straight:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _handed_on(recorder: Any, seen: Callable[..., Any], mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """An op that goes to a mode: torch would first look through all operands for their types."""
    if mode is not recorder:
        return _HANDLE(mode, func, *args, **kwargs)
    with no_python_dispatcher():  # what an op is made of concerns nobody here
        return seen(func, args, kwargs)
