"""Sizes of tensors that note what code compares them with, divides them by, looks them up among, or cuts at: at another
number of tokens or texts it may do something else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_align.tracing.own_code import LIBRARIES
from hf_align.tracing.watched import constants_of, looked_up

_SIZES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.stride)  # type: ignore[attr-defined]
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_DIVIDING = ("mod", "floordiv", "truediv", "divmod")
_LEAST = 5
"""Smaller numbers in code are tried as sizes anyway, or are numbers of axes."""
Note = Callable[[int, int], None]
"""Takes a size, and a number that it may be."""


class Size(int):
    """A size, or what is added to one.

    Attributes:
        added: to the size.
        note: is told of the size without that, and of what it is compared with.
    """

    added: int
    note: Note

    @classmethod
    def of(cls, value: int, note: Note, added: int = 0) -> Size:
        size = cls(value)
        size.note, size.added = note, added
        return size

    def compared(self, number: int) -> None:
        """Note what it is compared with."""
        self.note(int(self) - self.added, number - self.added)

    def __hash__(self) -> int:
        frame = sys._getframe(1)
        for key in () if _is_tool(frame) else (*looked_up(frame), *_numbers_of(frame)):
            if type(key) is int:
                self.compared(key)
        return hash(int(self))

    def __rshift__(self, places: int) -> int:
        if type(places) is int and 0 <= places < self.bit_length() + 16:
            self.note(int(self) - self.added, 1 << places)
        return int(self) >> places

    def _plus(self, other: Any, sign: int) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        added = 0 if isinstance(other, Size) else self.added + sign * other
        return Size.of(int(self) + sign * int(other), self.note, added)

    def __add__(self, other: Any) -> Any:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._plus(other, -1)

    def __mul__(self, other: Any) -> Any:
        is_whole = isinstance(other, int) and not self.added
        return Size.of(int(self) * int(other), self.note) if is_whole else int.__mul__(self, other)

    __rmul__ = __mul__


def _noting(name: str) -> Callable[[Size, Any], Any]:
    plain = getattr(int, f"__{name}__")

    def operate(self: Size, other: Any) -> Any:
        number = int(other) if type(other) is int or (type(other) is float and other.is_integer()) else None
        if number is not None and number != int(self) and not _is_tool(sys._getframe(1)):
            self.compared(number) if name in _COMPARING else self.note(int(self) - self.added, number)
        return plain(self, other)

    return operate


for _name in (*_COMPARING, *_DIVIDING):
    setattr(Size, f"__{_name}__", _noting(_name))


def _is_tool(frame: FrameType) -> bool:
    return f"{frame.f_globals.get('__name__')}.".startswith(LIBRARIES)


def _numbers_of(frame: FrameType) -> Iterator[object]:
    """The whole numbers that stand in a function: a table that is written where it is asked has them for keys."""
    for value in constants_of(frame.f_code):
        numbers = value if isinstance(value, tuple) else (value,)
        yield from (number for number in numbers if type(number) is int and number >= _LEAST)


def frame_of_code() -> FrameType | None:
    """Where the code is that calls an op."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_tool(frame) or frame.f_globals["__name__"].startswith(__package__ or "")):
        frame = frame.f_back
    return frame


class Measuring(TorchFunctionMode):
    """While sizes of tensors are numbers that note what they are compared with, and numbers are noted that tensors of
    whole numbers are compared with.

    Args:
        size: is told of sizes, as `Size.note`.
        value: is told of tensors, and of what they are compared with.
    """

    def __init__(self, size: Note, value: Callable[[Tensor, int], None]) -> None:
        super().__init__()
        self._size, self._value = size, value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in _COMPARING and len(args) > 1:
            self._compared(*args[:2])
        elif name in ("getitem", "setitem"):
            self._cut(args[0].shape, args[1] if isinstance(args[1], tuple) else (args[1],))
        elif name == "split" and len(args) > 1:
            dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", 0)
            self._cut([args[0].shape[dim]], [slice(args[1])])
        if func not in _SIZES:
            return found
        return Size.of(found, self._size) if isinstance(found, int) else type(found)(self._each(found))

    def _compared(self, value: Any, number: Any) -> None:
        if isinstance(value, Tensor) and value.dtype == torch.long and isinstance(number, int):
            self._value(value, int(number))

    def _cut(self, shape: Sequence[int], where: Sequence[Any]) -> None:
        """Note the ends of pieces that begin or end beyond what there is."""
        indices = [index for index in where if index is not None]
        left = next((n for n, index in enumerate(indices) if index is Ellipsis), len(indices))
        behind = indices[left + 1 :]
        for size, index in (*zip(shape, indices[:left], strict=False),
                            *zip(shape[len(shape) - len(behind) :], behind, strict=False)):  # fmt: skip
            for end in (index.start, index.stop) if isinstance(index, slice) else ():
                if type(end) is int and abs(end) > size:
                    self._size(size, abs(end))

    def _each(self, sizes: Iterable[int]) -> list[Size]:
        return [Size.of(size, self._size) for size in sizes]
