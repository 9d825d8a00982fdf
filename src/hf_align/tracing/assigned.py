"""Assignments to `tensor.data`, which torch shows to nobody: what a tensor holds is from then on another value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._C import TensorBase
from torch._subclasses.fake_tensor import FakeTensor

_DATA: Any = TensorBase.data


@contextmanager
def assignments_seen(put: Callable[[FakeTensor, Tensor], Tensor]) -> Iterator[None]:
    """While `fake.data = value` is seen, and `fake.data` is an op like others.

    Args:
        put: is told of each assignment, and gives the value as one that a fake tensor can hold.
    """

    def data(tensor: Tensor) -> Tensor:
        return tensor.detach() if isinstance(tensor, FakeTensor) else _DATA.__get__(tensor)

    def assign(tensor: Tensor, value: Tensor) -> None:
        _DATA.__set__(tensor, put(tensor, value) if isinstance(tensor, FakeTensor) else value)

    with patch.object(Tensor, "data", property(data, assign), create=True):
        yield
