"""How many steps of a recurrent op are written out one by one.

All steps of such an op run one cell, so that a few of them read and make all that any do. Where only bases are asked
for, a long text then costs no more than a short one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WRITTEN_OUT: ContextVar[int | None] = ContextVar("steps that are written out", default=None)
_FEW = 16


def steps_written_out() -> int | None:
    """How many are, before all others are told by them; None if all are, as a call needs them whose values count."""
    return _WRITTEN_OUT.get()


@contextmanager
def in_few_steps() -> Iterator[None]:
    """Write out few steps of the recurrent ops of calls that are traced meanwhile: the programs have their bases, and
    not their values."""
    token = _WRITTEN_OUT.set(_FEW)
    try:
        yield
    finally:
        _WRITTEN_OUT.reset(token)
