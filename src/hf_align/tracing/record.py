"""The graph of a call: recorded once, or twice where it writes to memory that was born real.

A pass that asked whether something is no number is recorded with both answers: code that mends it computes something
else there, which no graph of the first pass shows.
"""

from __future__ import annotations

import dis
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution

from hf_align.tracing.ops import read_families
from hf_align.tracing.reasons import HELPERS, needs_numbers
from hf_align.tracing.recorder import Recorder
from hf_align.tracing.state import left_as_found

_MIXED: WeakKeyDictionary[type, frozenset[Hashable]] = WeakKeyDictionary()
"""The ops, each in its line of code, that gave birth to what the last call of a class wrote to: a first guess of those
of its next call, which holds if they are the same."""
_RAISES = dis.opmap["RAISE_VARARGS"]
"""What `raise` and `assert` are to the interpreter."""


class SwallowedQuestionError(Exception):
    """The code asked for the value of something that has none, and went on without: another way than it runs."""

    def __init__(self, question: Exception) -> None:
        super().__init__(str(question))
        self.question = question


@contextmanager
def _unvalidated() -> Iterator[None]:
    """While distributions do not look whether their arguments are allowed: they would only refuse them."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def record(
    model: nn.Module,
    arguments: Mapping[str, Tensor],
    weights: Collection[str],
    free: Sequence[str],
    *,
    generic: bool = False,
    ends: Mapping[str, int] | None = None,
    stay: bool = False,
    skips: bool = False,
) -> fx.GraphModule:
    """The graph of `model(**arguments)`: placeholders are the free arguments, by name, attributes the weights, by name.

    Args:
        arguments: by name.
        weights: the parameters and buffers that have no value.
        free: the arguments that have no value.
        generic: whether code that chooses its way by it may be told that no entry of a free argument which is a real
            number equals a constant: where models look for padding, they are given none. Code that goes on in one way
            is written down with the comparison.
        ends: by the name of a free argument of token ids, the one that the last of each row has, and no other.
        stay: whether what is sorted stays in place (`parted.py`): it is tried where code asks how many rows go where.
        skips: whether such code is told no more than that there are some, which is tried where it then sorts nothing.

    Raises:
        Exception: whatever the forward pass raises, also where it asks for the value of what has none.
    """
    read_families()  # imports are no part of the pass
    guessed = mixed = _MIXED.get(type(model), frozenset())
    while True:
        recorder = Recorder(mixed, generic, ends or {}, stay=stay, skips=skips)
        try:
            with left_as_found(model), _unvalidated():
                graph = recorder.run(model, arguments, weights, free)
        except Exception as error:
            if recorder.parts.asked_at is not None and not stay:
                return record(model, arguments, weights, free, generic=generic, ends=ends, stay=True)
            if recorder.parts.open_question is not None and not skips:
                return record(model, arguments, weights, free, generic=generic, ends=ends, stay=True, skips=True)
            if recorder.mixed == mixed and not guessed:
                if recorder.lists.places:  # what is as long as a list may not go together with the rest
                    raise needs_numbers(min(recorder.lists.places)) from error
                raise
        else:
            if recorder.mixed == mixed == (recorder.written if guessed else mixed):
                if recorder.asked is not None:  # the model went on without an answer, on a way that no run takes
                    raise SwallowedQuestionError(recorder.asked)
                _MIXED[type(model)] = mixed
                if recorder.unequal:
                    with suppress(Exception):  # whatever it raises that finds no number to choose its way by
                        return record(model, arguments, weights, free, ends=ends, stay=stay, skips=skips)
                if recorder.supposed is not None:
                    other = Recorder(mixed, generic, ends or {}, broken=True, stay=stay, skips=skips)
                    _refuse_repairs(graph, other, recorder.supposed, (model, arguments, weights, free))
                return graph
        guessed, mixed = frozenset(), frozenset() if guessed else frozenset(recorder.mixed)


def _refuse_repairs(graph: fx.GraphModule, other: Recorder, asked_at: str, call: tuple[Any, ...]) -> None:
    """Refuse code that goes on in another way where an entry is no number; most asks only to give up, or to say so."""
    try:
        with left_as_found(call[0]):
            repaired = other.run(*call)
    except Exception as error:
        if other.asked is None and _is_raised_by_the_code(error):
            return
        raise needs_numbers(asked_at) from error
    if str(repaired.graph) != str(graph.graph) or not all(map(_same, *map(_attributes, (graph, repaired)))):
        raise needs_numbers(asked_at)


def _is_raised_by_the_code(error: Exception) -> bool:
    """Whether a line of modelling code raises or asserts it, and no op that has no values here."""
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    return code.co_code[last.tb_lasti] == _RAISES and not code.co_filename.startswith(HELPERS)


def _attributes(graph: fx.GraphModule) -> list[Tensor]:
    """What a graph reads that is no argument."""
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "get_attr"]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two constants are equal; weights have no values."""
    return one.is_meta or (one.dtype == other.dtype and torch.equal(one, other))
