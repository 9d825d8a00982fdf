"""Numbers that say how much of an axis a call takes, as how many dimensions of an embedding: where two of them cut an
axis in two places, any other may cut it in another."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, zip_longest

from torch import fx

from hf_align.tracing.mode import Mode
from hf_align.tracing.nested import leaves
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program
from hf_align.tracing.watched import is_unsaid, may_be

BY_ARGUMENT = "cut by an argument"
"""Under which the node of a cut notes that an argument of the call says where."""
_TRIED = (2, 4)


def amounts(parameter: inspect.Parameter) -> Iterator[int]:
    """Numbers for an argument that may be one."""
    if may_be(parameter, int) or is_unsaid(parameter):
        yield from (number for number in _TRIED if number != parameter.default)


def note_cuts_by_arguments(found: Sequence[tuple[Mode, Program]]) -> None:
    """Note which cuts lie elsewhere in one call than in another that differs from it in a number alone."""
    numbers = [_numbers(mode) for mode, _ in found]
    for (first, one), (second, other) in combinations(zip(numbers, found, strict=True), 2):
        changed = [name for name in first.keys() & second.keys() if first[name] != second[name]]
        if len(changed) == 1:
            _note(_cuts(one[1]), _cuts(other[1]), first[changed[0]], second[changed[0]])


def _numbers(mode: Mode) -> Mapping[str, int]:
    return {name: value for name, value in mode.example.arguments.items() if type(value) is int}


def _cuts(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if does(node, Trait.MOVES)]


def _note(ones: Sequence[fx.Node], others: Sequence[fx.Node], here: int, there: int) -> None:
    if len(ones) != len(others):
        return
    for one, other in zip(ones, others, strict=True):
        bounds = zip_longest(leaves((one.args[1:], one.kwargs)), leaves((other.args[1:], other.kwargs)))
        if (here, there) in bounds:
            one.meta[BY_ARGUMENT] = other.meta[BY_ARGUMENT] = True
