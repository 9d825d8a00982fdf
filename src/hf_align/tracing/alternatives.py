"""Alternatives for one call of a model, tried until one runs: as they are, and with what they turn out to lack."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator

from torch import Tensor
from transformers import PreTrainedModel

from hf_align.tracing.mending import mended, with_missing
from hf_align.tracing.mode import Attempt, Mode, NothingNew

_ATTEMPTS = 60
"""Calls that are tried at most before one is given up; most fail at their first line."""
_FEW = 3
"""Alternatives after which one is tried of what they may lack."""


def first_that_answers(alternatives: Iterable[Mode], attempt: Attempt) -> None:
    """Try alternatives until one is answered."""
    for alternative in alternatives:
        error = attempt(alternative)
        if error is None or isinstance(error, NothingNew):
            return


def first_that_runs(model: PreTrainedModel, alternatives: Iterable[Mode], attempt: Attempt) -> Mode | None:
    """Try alternatives until one is a mode, each also with what it turns out to lack; that one, if there is any.

    What an alternative may lack has to wait, and so has what else an error suggests that a change left as it was: one
    of these follows every few alternatives, and the rest comes last.
    """
    tried, seen, later = 0, set[Hashable](), list[Iterator[Mode]]()
    for alternative in _in_turn(alternatives, later):
        waiting = [(iter([alternative]), "")]
        while waiting:
            if tried == _ATTEMPTS:
                return None
            changed, before = waiting[-1]
            mode = next(changed, None)
            if mode is None:
                waiting.pop()
                continue
            if not _unlike(mode, seen) and mode is not alternative:
                continue
            tried += 1
            error = attempt(mode)
            if error is None:
                return mode
            later.append(with_missing(model, mode, error))
            if str(error) == before:
                later += [changed, mended(model, mode, error)]
                waiting.pop()
            else:
                waiting.append((mended(model, mode, error), str(error)))
    return None


def _in_turn(first: Iterable[Mode], later: list[Iterator[Mode]]) -> Iterator[Mode]:
    """What comes first, one of what comes later after every few of it, and then the rest."""
    for number, mode in enumerate(first):
        yield mode
        if number % _FEW == 0:
            yield from itertools.islice(_emptied(later), 1)
    yield from _emptied(later)


def _emptied(groups: list[Iterator[Mode]]) -> Iterator[Mode]:
    """What is in a list of groups, and what is added to it meanwhile."""
    while groups:
        mode = next(groups[0], None)
        if mode is None:
            groups.pop(0)
        else:
            yield mode


def _unlike(mode: Mode, seen: set[Hashable]) -> bool:
    """Whether no call with arguments of these sizes was seen; now one is."""
    given = mode.example.arguments
    sizes = frozenset((n, (v.shape, v.dtype) if isinstance(v, Tensor) else repr(v)) for n, v in given.items())
    known = sizes in seen
    seen.add(sizes)
    return not known


def first_guess_that_runs(model: PreTrainedModel, guesses: Iterable[Mode], attempt: Attempt) -> Mode | None:
    """Try guesses until one is a mode: all as they are before any with what it turns out to lack, for a wrong one
    seems to lack much."""
    failed = list[tuple[Mode, Exception]]()
    for guess in guesses:
        error = attempt(guess)
        if error is None:
            return guess
        failed.append((guess, error))
    lacking = (mode for mend in (mended, with_missing) for guess, error in failed for mode in mend(model, guess, error))
    return first_that_runs(model, lacking, attempt)
