"""Alternatives for one call of a model, tried until one runs: as they are, and with what they turn out to lack."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Hashable, Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_align.tracing.build import quiet
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
    seems to lack much. Where a call fails before it looks at the first one, no other is tried unless it then lacks
    something."""
    failed = list[tuple[Mode, Exception]]()
    for guess in guesses:
        error = attempt(guess)
        if error is None:
            return guess
        failed.append((guess, error))
        if len(failed) == 1 and _is_unread(model, guess, error):
            for mode in _lacking(model, failed):
                other = attempt(mode)
                if other is None:
                    return mode
                if not _alike(error, other):
                    break
            else:
                return None
    return first_that_runs(model, _lacking(model, failed), attempt)


def _lacking(model: PreTrainedModel, failed: Iterable[tuple[Mode, Exception]]) -> Iterator[Mode]:
    """Calls that failed, with what they may lack."""
    return (mode for mend in (mended, with_missing) for guess, error in failed for mode in mend(model, guess, error))


def _is_unread(model: PreTrainedModel, guess: Mode, error: Exception) -> bool:
    """Whether a call fails before anything asks more of what was guessed than whether it is there: it ends in the same
    error with an object in its place that can do nothing."""
    nothing = {name: object() for name, _ in guess.adds}
    try:
        with torch.no_grad(), quiet():
            model(**guess.example.arguments | nothing)
    except Exception as other:  # whatever a model says of an object that it does not know
        return _alike(error, other)
    return False


def _alike(first: Exception, second: Exception) -> bool:
    """Whether two calls ended in one line, with the same words."""
    (here, said), (there, other) = ((traceback.extract_tb(e.__traceback__)[-1:], str(e)) for e in (first, second))
    places = [(frame.filename, frame.lineno) for frame in (*here, *there)]
    return len({*places}) == 1 and said == other
