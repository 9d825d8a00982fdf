"""Numbers that say how much of an axis a call takes, as how many dimensions of an embedding: where two of them cut an
axis in two places, any other may cut it in another."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Any

from torch import Tensor, fx, nn

from hf_align.tracing.example import Example
from hf_align.tracing.mode import Mode
from hf_align.tracing.nested import leaves
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program
from hf_align.tracing.watched import is_unsaid, may_be, runs

BY_ARGUMENT = "cut by an argument"
"""Under which the node of a cut notes that an argument of the call says where."""
_TRIED = ((2, 3, 5, 7), (4, 9, 6, 8, 5, 7, 3))
"""How many entries of something a call may take: two numbers, each with others for models that refuse it, as those do
whose axis it does not divide."""
_SIZES = 8
"""Sizes of weights that a vector may have."""


def amounts(parameter: inspect.Parameter, call: Callable[..., Any], base: Example) -> Iterator[int]:
    """Numbers for an argument that may be one.

    Args:
        call: runs the model.
    """
    if may_be(parameter, int) or is_unsaid(parameter):
        yield from taken(parameter.name, call, base, parameter.default)


def taken(name: str, call: Callable[..., Any], base: Example, default: Any = None) -> Iterator[int]:
    """Two numbers that a model takes for an argument, if there are any.

    Args:
        call: runs the model.
    """
    tried = {default}
    for numbers in _TRIED:
        others = [number for number in numbers if number not in tried]
        found = next((n for n in others if runs(call, **base.arguments, **{name: n})), others[0])
        tried.add(found)
        yield found


def widths(model: nn.Module) -> list[int]:
    """How many entries a vector may have that holds a number for each unit: the smallest sizes of weights."""
    sizes = sorted({size for weight in model.parameters() for size in weight.shape} - {1})
    return sizes[:_SIZES]


def note_cuts_by_arguments(found: Sequence[tuple[Mode, Program]]) -> None:
    """Note which cuts lie elsewhere in one call than in another that differs from it in a number alone, in all calls
    that have them."""
    numbers, cuts = [_numbers(mode) for mode, _ in found], [_cuts(program) for _, program in found]
    bounds = [[_bounds(cut, program) for cut in nodes] if told else []
              for told, nodes, (_, program) in zip(numbers, cuts, found, strict=True)]  # fmt: skip
    elsewhere: dict[int, set[int]] = defaultdict(set)
    for one, other in combinations(range(len(found)), 2):
        first, second = numbers[one], numbers[other]
        alone = sum(first[name] != second[name] for name in first.keys() & second.keys()) == 1
        if alone and len(cuts[one]) == len(cuts[other]):
            pairs = zip(bounds[one], bounds[other], strict=True)
            elsewhere[len(cuts[one])].update(i for i, (x, y) in enumerate(pairs) if _lie_elsewhere(x, y))
    for nodes in cuts:
        for place in elsewhere[len(nodes)]:
            nodes[place].meta[BY_ARGUMENT] = True


def _numbers(mode: Mode) -> Mapping[str, float]:
    return {name: value for name, value in mode.example.words.items() if type(value) in (int, float)}


def _cuts(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if does(node, Trait.MOVES)]


def _bounds(cut: fx.Node, program: Program) -> list[Any]:
    """Where an op cuts: numbers, or what is known of tensors of numbers; of one that only reshapes, both shapes."""
    if does(cut, Trait.RESHAPES):
        return [tuple(node.meta["val"].shape) for node in (cut.all_input_nodes[0], cut)]
    said = leaves((cut.args[1:], cut.kwargs))
    return [program.constants.get(each) if isinstance(each, fx.Node) else each for each in said]


def _lie_elsewhere(ones: list[Any], others: list[Any]) -> bool:
    if ones and isinstance(ones[0], tuple):
        return ones[0] == others[0] and ones != others
    return any(_differ(here, there) for here, there in zip_longest(ones, others))


def _differ(here: Any, there: Any) -> bool:
    if isinstance(here, Tensor) and isinstance(there, Tensor):
        return here.shape != there.shape or bool((here != there).any())
    return type(here) is type(there) is int and here != there
