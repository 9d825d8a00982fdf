"""Calls in which the code that a model brings along takes a branch that no other call takes.

Such a branch is a way in which the model may be used and that nothing has seen: what leads there may be a size, a
number of texts, a value in a mask, a method that was called before. It need not be known. A condition that went one way
in all calls is turned in some of them; if the model then runs, what it computes is a mode like any other. (Peng et al.,
"X-Force: Force-Executing Binary Programs for Security Applications", USENIX Security 2014, section 3.) A branch that
only fails cannot be taken in this state of the model, and is none.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hf_align.tracing.branches.rewritten import Place
from hf_align.tracing.branches.taken import Turn
from hf_align.tracing.mode import Mode
from hf_align.tracing.program import Program
from hf_align.tracing.resized import spread

logger = logging.getLogger(__name__)
_CALLS = 4
"""Calls in which a condition is turned: what a branch does may show in some only."""
_DEEP = 6
"""Conditions that are turned in one call at most."""
_MOST = 1000
"""Calls with turned conditions at most."""
Answered = tuple[Mode, Program]


def explore(called: Iterable[Answered], attempt: Callable[[Mode], Program | None]) -> None:
    """Turn each condition that went one way in all calls, and those that are met behind it.

    Args:
        called: the calls that a model has answered, with the ways that its code went (`Program.taken`).
        attempt: tries a call with turned conditions: what it computes, None if it does not run.
    """
    seen, tried = _Seen(), 0
    queue = [place for mode, program in called for place in seen.note(mode, program)]
    while queue:
        place = queue.pop(0)
        for turn in seen.turns(place):
            for mode in spread(seen.met[place], _CALLS):
                if len(mode.turned_at) == _DEEP or place in {other.place for other in mode.turned_at}:
                    continue
                if tried == _MOST:
                    logger.warning("%s has more branches than are tried", Path(place.file).name)
                    return
                tried += 1
                other = _turned(mode, turn)
                program = attempt(other)
                queue += seen.note(other, program) if program is not None else ()


class _Seen:
    """The conditions that were met.

    Attributes:
        met: the calls in which each was met.
    """

    def __init__(self) -> None:
        self.met = defaultdict[Place, list[Mode]](list)
        self._ways = defaultdict[Place, defaultdict[str, set[bool]]](lambda: defaultdict(set))

    def note(self, mode: Mode, program: Program) -> Iterable[Place]:
        """The conditions that are met for the first time, or for the first time by some module."""
        first = [place for place, site in program.taken if site not in self._ways[place]]
        for (place, site), held in program.taken.items():
            self._ways[place][site] |= held
        for place in dict.fromkeys(place for place, _ in program.taken):
            self.met[place].append(mode)
        return dict.fromkeys(first)

    def turns(self, place: Place) -> Iterator[Turn]:
        """For all modules at once, where all went one way; else for those that went the same way."""
        ways = self._ways[place]
        for way in (True, False):
            sites = frozenset(site for site, held in ways.items() if held == {way})
            if sites:
                yield Turn(place, None if len(sites) == len(ways) else sites)


def _turned(mode: Mode, turn: Turn) -> Mode:
    said = f"line {turn.place.line} of {Path(turn.place.file).name}"
    name = f"{mode.name} and {said}" if mode.turned_at else f"{mode.name}, the other way at {said}"
    return replace(mode, name=name, turned_at=(*mode.turned_at, turn))
