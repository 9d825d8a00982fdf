"""Calls that ask for several things at once. Each may leave the answer as it is alone, and change it beside a mask, in
a step with a cache, among more texts, or with another.

Tracing them all would take minutes. So a small copy with random weights is asked, and a call whose answer is another
there is one that the model and what it was moved to must answer alike.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_align.runtime.kept import found_once, kept_folder
from hf_align.symmetry.derivation.spec_cache import key_of
from hf_align.tracing.asked import Ask, asks, nameless
from hf_align.tracing.documented import NOT_ASKED
from hf_align.tracing.example import Example
from hf_align.tracing.first_calls import first_calls
from hf_align.tracing.mode import Mode, extent
from hf_align.tracing.small.asked_copy import SmallCopy, has_answer, small_copy
from hf_align.tracing.watched import is_said, lists, scalars
from hf_align.tracing.ways import positions
from hf_align.witness.contexts import Context, contexts
from hf_align.witness.noted import Noted, Notes
from hf_align.witness.surroundings import surroundings

_ROUNDS = 4
"""Values of one argument that are tried together with those of others."""
_Found = tuple[dict[str, Any], list[tuple[str, list[str]]]]
"""What was noted, and calls by the names of a context and of all that is asked for."""
_LENGTH = 12
"""Tokens of the call of a small copy."""


def calls_together(model: PreTrainedModel, base: Example) -> list[Mode]:
    """The calls that ask for several things and that a small copy of a model answers otherwise.

    Args:
        base: the arguments of the first call.
    """
    looked_at, calls = _found_once(model, base)
    noted = Noted.of(looked_at)
    known = {ask.said: ask for ask in _all_asks(model, base, _untraced(model, base, noted))}
    there = {context.said: context for context in contexts(model, base, noted.sizes, noted.values)}
    return [there[context].mode(base, [known[name] for name in asked])
            for context, asked in calls
            if context in there and known.keys() >= set(asked)]  # fmt: skip


def _found_once(model: PreTrainedModel, base: Example) -> _Found:
    """As `_found`, kept for the next model of this config and code."""
    rows, length, names = extent(base)[0], min(_LENGTH, extent(base)[1]), [*base.arguments]

    def find() -> _Found:
        numbered = enumerate(first_calls(model, rows, length))
        candidate = next((n for n, example in numbered if [*example.arguments] == names), None)
        copy = None if candidate is None else small_copy(model, model.config, candidate, rows, length)
        return ({}, []) if copy is None else _found(copy)

    folder = kept_folder()
    key = None if folder is None else key_of(model.config, [rows, length, names])
    return found_once(folder / "together" / f"{key}.json" if folder is not None and key is not None else None, find)


def _found(copy: SmallCopy) -> _Found:
    """What the code of a copy looks at, and what changes its answer."""
    noted = _noted(copy)
    return asdict(noted), [*_changing(copy, noted)]


def _noted(copy: SmallCopy) -> Noted:
    """What code looks at in the calls in which more may be asked for."""
    notes = Notes(copy.model, extent(copy.example), copy.words)
    for context in contexts(copy.model, copy.example):
        if context.is_asked or context.whole is None:
            with notes.taken():
                copy.answers(context.mode(copy.example))
    for _ in range(2):  # which numbers change, and then what they are compared with
        copy.answers(Context("").mode(copy.example, [Ask("what is kept", ({},), within=notes.kept)]))
    return notes.noted


def _changing(copy: SmallCopy, noted: Noted) -> Iterator[tuple[str, list[str]]]:
    """Where something changes the answer of a copy, and what: the names of a context, and of all that is asked for.

    What does so alone was traced, unless it may stand for anything, and is asked for in no other context.
    """
    free = [*_untraced(copy.model, copy.example, noted)]
    found, untraced = _all_asks(copy.model, copy.example, free), {ask.said for ask in free}
    alone, refused = set[str](), set[str]()
    for context in contexts(copy.model, copy.example, noted.sizes, noted.values):
        for asked in _changing_in(context, [ask for ask in found if ask.said not in alone | refused], copy, refused):
            names = [ask.said for ask in asked]
            if len(names) == 1 and not context.said:
                alone |= {*names}
            if not alone & {*names} - untraced:
                yield context.said, names


def _all_asks(model: PreTrainedModel, base: Example, untraced: Iterable[Ask]) -> list[Ask]:
    """All that may be asked for, each way of it alone."""
    found = (*asks(model, base), *untraced)
    every = (replace(ask, said=ask.said if not n else f"{ask.said} (in way {n + 1})", ways=(way,))
             for ask in found for n, way in enumerate(ask.ways))  # fmt: skip
    return [*{ask.said: ask for ask in every}.values()]


def _untraced(model: PreTrainedModel, base: Example, noted: Noted) -> Iterator[Ask]:
    """Words, numbers, flags, and lists of numbers, that may stand for anything; and what surrounds a call."""
    yield from surroundings(model, base, noted)
    yield from nameless(model, base, dict.fromkeys(noted.keywords, ()))
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if name in base.arguments or NOT_ASKED.search(name):
            continue
        yield from (Ask(f"{name} = {value!r}", ({name: value},)) for value in scalars(parameter, model, base))
        if isinstance(parameter.default, bool) or is_said(parameter, bool):
            yield Ask(f"{name} = {not parameter.default}", ({name: not parameter.default},))
        yield from (Ask(f"{name} = {value!r}", ({name: value},)) for value in lists(parameter, model, base))


def _changing_in(context: Context, found: Sequence[Ask], copy: SmallCopy, refused: set[str]) -> Iterator[Sequence[Ask]]:
    """What changes the answer in one context: each thing alone, then all of the others together, where there is more
    than the first call with one value of each.

    Args:
        refused: gets what cannot be put around the first call, and so around no other.
    """

    def answers(asked: Sequence[Ask]) -> list[Tensor]:
        return copy.answers(context.mode(copy.example, asked))

    def accepted(asked: Sequence[Ask]) -> Sequence[Ask]:
        """As many as the model takes together."""
        if len(asked) < 2 or answers(asked):
            return asked
        first, second = accepted(asked[: len(asked) // 2]), accepted(asked[len(asked) // 2 :])
        return both if answers(both := [*first, *second]) else first

    plain = next(iter(answers(())), None)
    if plain is None:
        if context.tokens > (positions(copy.model.config) or context.tokens):
            yield ()  # longer than a text of the copy can be
        return
    if _is_another(context, plain, copy):
        yield ()
    idle = list[Ask]()

    def changing(asked: Sequence[Ask]) -> Iterator[Sequence[Ask]]:
        """Each of some that changes the answer, or several where none does so alone; what surrounds a call is put
        around it all at once."""
        results = answers(asked)
        if results and has_answer(results, plain):
            idle.extend(asked)
        elif len(asked) > 1:
            halves = asked[: len(asked) // 2], asked[len(asked) // 2 :]
            fewer = [several for half in halves for several in changing(half)]
            yield from fewer or ([asked] if results else [])
        elif results:
            yield asked
        elif asked[0].surrounds and not context.said:
            refused.add(asked[0].said)

    for ask in filter(context.goes_with, found):
        if not (ask.surrounds and context.said):
            yield from changing([ask])
    around = [ask for ask in found if ask.surrounds and (context.said or ask in idle)]
    if around and context.is_asked:
        yield from changing(around)
    for asked in islice(_rounds([ask for ask in idle if not ask.surrounds]), 1 if context.said else None):
        most = accepted(asked)
        if len(most) > 1 and not has_answer(answers(most), plain):
            yield most


def _is_another(context: Context, plain: Tensor, copy: SmallCopy) -> bool:
    """Whether a context alone is a call to be tried: one that is answered otherwise than the same at once, or that has
    no such counterpart and is new.

    Args:
        plain: what the copy answers there.
    """
    if context.whole is None:
        return context.is_new
    whole = copy.answers(context.whole.mode(copy.example))
    return bool(whole) and not (has_answer([plain], whole[0]) or (context.tokens and has_answer(whole, plain)))


def _rounds(found: Sequence[Ask]) -> Iterator[Sequence[Ask]]:
    """All that can be asked for at once, one value for each argument; with what turns the arguments, and without."""
    values: dict[str, list[Ask]] = defaultdict(list)
    turning = [ask for ask in found if ask.turned is not None]
    for ask in found:
        if ask.turned is None:
            values[next(iter(ask.ways[0]), ask.said)].append(ask)
    for n in range(min(_ROUNDS, max(map(len, values.values()), default=0))):
        yield [several[min(n, len(several) - 1)] for several in values.values()]
    for ask in turning:
        yield [ask, *(several[0] for name, several in values.items() if name not in ask.ways[0])]
