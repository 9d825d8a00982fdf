"""A bound on what a config may ask for: it is a few lines, and may describe more than any machine holds.

What is built is counted while it is built, whatever the entries of the config are called.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_align.errors import HfAlignError, IncompatibleModels, first_line

_FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.logspace,
                        torch.eye, torch.rand, torch.randn))  # fmt: skip
_REAL = 2**28
"""Entries of one table that is computed; tables of sines have 2**24."""
_MEMORY = 4 * 2**30
"""Bytes that a config and its tables may take on their way."""


@dataclass(frozen=True)
class Budget:
    """How much a model may be.

    Attributes:
        tensors, entries: of all that is made for it, weights and tables.
        why: what the bound comes from, in words.
    """

    tensors: int
    entries: int
    why: str

    @classmethod
    def of_stored(cls, tensors: int, entries: int) -> Budget:
        """Of a model whose weights are there: in memory they may be taken apart, be tied, and have tables beside them,
        but not by orders of magnitude."""
        return cls(64 * tensors + 4096, 64 * entries + 2**31, f"its files hold {tensors} tensors of {entries} entries")


ANY = Budget(2**16, 2**44, "no model is as large as that")
"""Without weights to compare with."""


class _Counting(TorchFunctionMode):
    def __init__(self, budget: Budget, name: str) -> None:
        super().__init__()
        self._budget = budget
        self._name = name
        self._tensors = self._entries = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any) -> None:
        entries = entries_of(func, args, kwargs)
        if entries is None:
            return
        is_real = str(kwargs.get("device") or "cpu") != "meta"
        self._tensors += 1
        self._entries += entries
        if (
            self._tensors > self._budget.tensors
            or self._entries > self._budget.entries
            or (is_real and entries > _REAL)
        ):
            raise IncompatibleModels(f"{self._name}: its config.json asks for far more than that: {self._budget.why}")


def entries_of(factory: Any, args: Any, kwargs: Any) -> int | None:
    """How many entries a call of a factory asks for; None of one that fails, as its caller will hear."""
    try:
        made: Tensor = factory(*args, **{**kwargs, "device": "meta"})
    except (RuntimeError, TypeError):
        return None
    return made.numel()


@contextmanager
def within(budget: Budget, name: str) -> Iterator[None]:
    """Refuse, in the block, to make more than a budget.

    Args:
        name: what the user calls the model.

    Raises:
        IncompatibleModels: more was asked for, or nothing that can be made.
    """
    try:
        with _Counting(budget, name), bounded_memory():
            yield
    except HfAlignError:
        raise
    except MemoryError as error:
        raise IncompatibleModels(f"{name}: its config.json asks for far more than that: {budget.why}") from error
    except Exception as error:  # what a class says of numbers that it does not take may be anything
        raise IncompatibleModels(f"{name}: no model can be built from its config.json ({first_line(error)})") from error


@contextmanager
def bounded_memory() -> Iterator[None]:
    """A MemoryError, in the block, in place of a machine that swaps; where the system can say how much is taken."""
    try:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = taken + _MEMORY
    if (soft != resource.RLIM_INFINITY and soft <= most) or torch.cuda.is_available():  # which maps what it likes
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
