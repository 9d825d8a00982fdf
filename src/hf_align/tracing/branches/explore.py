"""Calls in which the code that a model brings along takes a branch that no other call takes.

Such a branch is a way in which the model may be used and that nothing has seen: what leads there may be a size, a
number of texts, a value in a mask, a method that was called before. It need not be known. A condition that went one way
in all calls is turned in one of them; if the model then runs, what it computes is a mode like any other. (Peng et al.,
"X-Force: Force-Executing Binary Programs for Security Applications", USENIX Security 2014, section 3.) A branch that
only fails cannot be taken in this state of the model, and is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from hf_align.tracing.branches.rewritten import Place
from hf_align.tracing.mode import Mode
from hf_align.tracing.program import Program

_TRIED = 4
"""Calls in which a branch is turned at most, until the model runs with it."""
_DEEP = 3
"""Branches that are turned in one call at most."""
_MOST = 200
"""Calls with turned branches at most."""
Answered = tuple[Mode, Program]


def explore(called: Iterable[Answered], attempt: Callable[[Mode], Program | None]) -> None:
    """Turn each condition that went one way in all calls, and those that are met behind it.

    Args:
        called: the calls that a model has answered, with the ways that its code went (`Program.taken`).
        attempt: tries a call with turned branches: what it computes, None if it does not run.
    """
    ways, met = defaultdict[Place, set[bool]](set), defaultdict[Place, list[Mode]](list)

    def note(mode: Mode, program: Program) -> list[Place]:
        """The conditions that are met for the first time."""
        first = [place for place in program.taken if place not in met]
        for place, held in program.taken.items():
            ways[place] |= held
            met[place].append(mode)
        return first

    queue = [place for mode, program in called for place in note(mode, program)]
    tried = 0
    while queue and tried < _MOST:
        place = queue.pop(0)
        for mode in met[place][:_TRIED] if len(ways[place]) == 1 else ():
            if len(mode.turned_at) == _DEEP or place in mode.turned_at:
                continue
            tried += 1
            other = _turned(mode, place)
            program = attempt(other)
            if program is not None:
                queue += note(other, program)
                break


def _turned(mode: Mode, place: Place) -> Mode:
    said = f"line {place.line} of {Path(place.file).name}"
    name = f"{mode.name} and {said}" if mode.turned_at else f"{mode.name}, the other way at {said}"
    return replace(mode, name=name, turned_at=(*mode.turned_at, place))
