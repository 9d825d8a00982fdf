"""Calls in which the code that a model brings along takes a branch that no other call takes.

Such a branch is a way in which the model may be used and that nothing has seen: what leads there may be a size, a
number of texts, a value in a mask, a method that was called before. It need not be known. A condition that went one way
in all calls is turned in some of them; if the model then runs, what it computes is a mode like any other. (Peng et al.,
"X-Force: Force-Executing Binary Programs for Security Applications", USENIX Security 2014, section 3.) A branch that
only fails cannot be taken in this state of the model. Where neither an error that the code raises itself, nor what the
condition asks for, tells that no other state takes it, the model is refused.
"""

from __future__ import annotations

import linecache
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hf_align.errors import IncompatibleModels
from hf_align.tracing.branches.rewritten import Place, Taken
from hf_align.tracing.branches.taken import NOTED, Turn
from hf_align.tracing.documented import NOT_ASKED
from hf_align.tracing.mode import Mode
from hf_align.tracing.program import Program
from hf_align.tracing.resized import LONGEST, spread

_CALLS = 4
"""Calls in which a condition is turned, and the largest: what a branch does may show in some only."""
_DEEP = 6
"""Conditions that are turned in one call at most."""
_MOST, _MOST_CONDITIONS = 500, 2000
"""Calls with turned conditions at most; as many more are made only to turn each condition once."""
_INSTEAD = "write the model without it, or merge with --match none"
_NUMBER, _WORD = re.compile(r"\d+"), re.compile(r"\w+")
_IS_TRIED = re.compile(f"{NOT_ASKED.pattern}|^input_ids$|^inputs_embeds$").search
Answered = tuple[Mode, Program]


class Failed(NamedTuple):
    """A call that does not run.

    Attributes:
        taken: the ways that its code went.
        is_settled: whether it is known why: the code itself refuses it, or it does nothing that is new.
    """

    taken: Taken
    is_settled: bool


def explore(
    seen: Conditions, called: Iterable[Answered], run: Callable[[Mode], Program | Failed]
) -> Iterator[Answered]:
    """Turn each condition that went one way in all calls, and those that are met behind it.

    Of the calls in which one is turned, the first and the largest that run are modes, and those whose code goes a way
    that it has not gone before.

    Args:
        seen: where all conditions are noted that are met.
        called: the calls that a model has answered, with the ways that its code went (`Program.taken`).
        run: what a call computes, or how it fails.

    Raises:
        IncompatibleModels: there are more branches than can be tried.
    """
    tried = 0
    for mode, program in called:
        seen.note(mode, program)
    queue, rest = seen.places(), list[tuple[Turn, list[Mode]]]()
    while queue or rest:
        is_first = bool(queue)  # each is turned in one call before any is turned in others
        work = [(t, seen.calls(t.place)) for t in seen.turns(queue.pop(0))] if is_first else [rest.pop(0)]
        for turn, calls in work:
            for number, mode in enumerate(calls):
                if tried >= _MOST and not is_first:
                    queue, rest = [], []
                    break
                if tried >= _MOST_CONDITIONS:
                    raise IncompatibleModels(f"{Path(turn.place.file).name} has more branches than are tried")
                tried += 1
                other = _turned(mode, turn)
                computed = run(other)
                if not isinstance(computed, Program):
                    queue += seen.meet(other, computed.taken)
                    seen.failed(turn.place, computed)
                    continue
                known = seen.places()
                is_new = seen.note(other, computed)
                queue += [place for place in seen.places() if place not in known]
                if is_first or is_new or mode is calls[-1]:
                    yield other, computed
                if is_first:
                    rest.append((turn, calls[number + 1 :]))
                    break


class Conditions:
    """The conditions that were met, and in which calls."""

    def __init__(self) -> None:
        self._met = defaultdict[Place, list[Mode]](list)
        self._ways = defaultdict[Place, defaultdict[str, set[bool]]](lambda: defaultdict(set))
        self._failed, self._settled = set[Place](), set[Place]()

    def note(self, mode: Mode, program: Program) -> bool:
        """Note a call; whether some condition was met or went a way for the first time, but for those it turns."""
        turned, is_new = {turn.place for turn in mode.turned_at}, False
        taken = {at: held for at, held in program.taken.items() if at[0].kind != "assertion"}
        for (place, site), held in taken.items():
            is_new |= place not in turned and not held <= self._ways[place][site]
            self._ways[place][site] |= held
        for place in dict.fromkeys(place for place, _ in taken):
            self._met[place].append(mode)
        return is_new

    def meet(self, mode: Mode, taken: Taken) -> list[Place]:
        """Note the conditions that only a call has met which does not run: another way may."""
        first = [place for place, _ in taken if place not in self._met and place.kind not in NOTED]
        for (place, site), held in taken.items():
            if place in first:
                self._ways[place][site] |= held
                self._met[place] = [mode]
        return [*dict.fromkeys(first)]

    def failed(self, place: Place, failed: Failed) -> None:
        """Note a call that does not run where a condition is turned."""
        self._failed.add(place)
        if failed.is_settled:
            self._settled.add(place)

    def require_both_ways(self) -> None:
        """See that each condition went both ways in some calls, but for those that others decide, and those where the
        code itself refuses to go the other way.

        Raises:
            IncompatibleModels: one did not.
        """
        for place in self._of_one_way():
            ways = set[bool]().union(*self._ways[place].values())
            if place.leaves_open(ways):
                raise IncompatibleModels(_untried(place))

    def left_to_arguments(self) -> tuple[str, ...]:
        """The lines that went one way in all calls and may go the other with an argument that none of them had, but for
        those that ask for more results, or for what stands in place of the tokens."""
        asked = dict.fromkeys(_where(place) for place in self._of_one_way() if place.is_decided_before)
        return tuple(f"{where}: `{line}`" for where, line in asked if not any(map(_IS_TRIED, _WORD.findall(line))))

    def _of_one_way(self) -> Iterator[Place]:
        """The conditions that went one way in all calls, and fail the other way for no reason that the code gives."""
        for place in self._met:
            is_tried = place.kind != "reached" and place not in self._failed
            one_way = len(set[bool]().union(*self._ways[place].values())) < 2
            if one_way and not is_tried and place not in self._settled:
                yield place

    def places(self) -> list[Place]:
        return [*self._met]

    def calls(self, place: Place) -> list[Mode]:
        """Some that met a condition, the largest last; such as turn others only where it stands behind one of them, and
        of the longest texts, which take gigabytes, only where no others met it."""
        plain = [mode for mode in self._met[place] if not mode.turned_at]
        plain = [mode for mode in plain if mode.extent[1] <= LONGEST] or plain
        calls = [mode for mode in plain or self._met[place] if len(mode.turned_at) < _DEEP]
        largest = sorted(calls, key=lambda mode: math.prod(mode.extent))[-1:]
        return [*(mode for mode in spread(calls, _CALLS) if mode not in largest), *largest]

    def turns(self, place: Place) -> Iterator[Turn]:
        """For all modules at once, where all went one way; else for those that went one way where another layer, and no
        other part of a model, went the other."""
        ways = self._ways[place]
        if place.kind == "reached":
            return
        if len(set[bool]().union(*ways.values())) == 1:
            yield Turn(place, None)
            return
        parts = defaultdict[str, set[bool]](set)
        for site, held in ways.items():
            parts[_NUMBER.sub("#", site)] |= held
        for way in (True, False):
            sites = [s for s, held in ways.items() if held == {way} and len(parts[_NUMBER.sub("#", s)]) == 2]
            if sites:
                yield Turn(place, frozenset(sites))


def _where(place: Place) -> tuple[str, str]:
    """A file with a line, and what stands there."""
    return f"{Path(place.file).name}:{place.line}", linecache.getline(place.file, place.line).strip()


def _untried(place: Place) -> str:
    said, line = _where(place)
    if place.kind == "reached":
        return f"{said}: no call that was tried gets past `{line}`, so what follows is unknown; {_INSTEAD}"
    return (f"{said}: `{line}` goes the same way in every call that was tried, and fails when it is made to go "
            f"the other way; {_INSTEAD}")  # fmt: skip


def _turned(mode: Mode, turn: Turn) -> Mode:
    said = f"line {turn.place.line} of {Path(turn.place.file).name}"
    name = f"{mode.name} and {said}" if mode.turned_at else f"{mode.name}, the other way at {said}"
    return replace(mode, name=name, turned_at=(*mode.turned_at, turn))
