"""Dtypes by their names in safetensors and in torch, for what is done without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


Raw: TypeAlias = NDArray[np.uint8]
"""Entries as they are stored, in their order, [bytes]."""


@dataclass(frozen=True)
class Dtype:
    """What the entries of a stored tensor are.

    Attributes:
        code: its name in safetensors.
        name: in torch, and in options.
        bits: numpy's dtype of as many bytes: its own where it has one, else of integers.
    """

    code: str
    name: str
    bits: np.dtype[np.generic]
    is_floating_point: bool

    def __str__(self) -> str:
        return self.name

    @property
    def itemsize(self) -> int:
        """Bytes of an entry."""
        return self.bits.itemsize

    @property
    def in_torch(self) -> torch.dtype:
        """As torch has it."""
        import torch  # here, for headers are read and plain merges are made without it

        found: torch.dtype = getattr(torch, self.name)
        return found

    @classmethod
    def of(cls, dtype: torch.dtype) -> Dtype:
        """That of tensors of torch."""
        return BY_NAME[str(dtype).removeprefix("torch.")]


def _dtype(code: str, name: str, bits: str | None = None) -> Dtype:
    return Dtype(code, name, np.dtype(bits or name), "float" in name)


F64, F32, F16 = _dtype("F64", "float64"), _dtype("F32", "float32"), _dtype("F16", "float16")
BF16 = _dtype("BF16", "bfloat16", "uint16")
_INTEGERS = [
    _dtype(f"{kind[0].upper()}{size}", f"{kind}{size}") for kind in ("int", "uint") for size in (8, 16, 32, 64)
]
BY_CODE = {dtype.code: dtype for dtype in (F64, F32, F16, BF16, *_INTEGERS, _dtype("BOOL", "bool"))}
BY_NAME = {dtype.name: dtype for dtype in BY_CODE.values()}


def bytes_of(shape: tuple[int, ...], dtype: Dtype) -> int:
    """The size of a dense tensor."""
    return math.prod(shape) * dtype.itemsize
