"""What a small copy answers where conditions of a model's own code are turned."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hf_align.tracing.branches.rewritten import Taken
from hf_align.tracing.branches.taken import branching
from hf_align.tracing.mode import Mode
from hf_align.tracing.small.asked_copy import SmallCopy, has_answer
from hf_align.tracing.steps import stepped

_LARGE = 64.0
"""Weights that are so much larger bring what is computed to limits that code may set."""


def answers_turned(copy: SmallCopy, mode: Mode, times: float = 1.0) -> tuple[list[Tensor] | Exception, Taken]:
    """What a small copy answers to a call, or why it does not, and the ways that its code goes."""
    answers: list[Tensor] | Exception = []
    taken = Taken()
    try:
        with branching(copy.model, mode.turned_at) as taken, stepped(copy.model, mode):
            answers = copy.answers_of(mode, times)
    except Exception as error:  # models refuse arguments in as many ways as there are models
        answers = error
    return answers, taken


def is_changed(copy: SmallCopy, mode: Mode) -> bool:
    """Whether a small copy answers otherwise than where no condition is turned, be it with large weights: some
    branches keep what is computed below a limit."""
    plain = replace(mode, turned_at=())
    ways = ((answers_turned(copy, way, times)[0] for way in (mode, plain)) for times in (1.0, _LARGE))
    runs = ([way for way in both if isinstance(way, list)] for both in ways)
    return any(len(both) == 2 and bool(both[1]) and not has_answer(both[0], both[1][0]) for both in runs)
