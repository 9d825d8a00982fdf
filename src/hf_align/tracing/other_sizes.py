"""Calls with pictures, sounds and states of other sizes, in which code may do something else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from types import NoneType

from transformers import PreTrainedModel

from hf_align.tracing.example import Example
from hf_align.tracing.mode import Attempt, Mode, NothingNew
from hf_align.tracing.resized import axes_by_size, numbers_in_code, numbers_noted, resized, spread, strides_of

_SIZES = 2
"""Of pictures and sounds that are larger still, because the code has numbers like theirs."""
_SIDES = 2
"""The first axis of a picture that is a side of it: its colours come before."""
_MOST_SIDE = 16
"""Larger numbers in the code are not what the side of a square of places is a multiple of."""
_MOST_NUMBERS = 2**18
"""In a picture or a sound that is made larger, if it is more than four times as large."""


def try_sizes(
    model: PreTrainedModel, base: Example, extents: Sequence[int], attempt: Attempt, names: Collection[str]
) -> bool:
    """Try pictures, sounds and states of other sizes: twice as large along all axes that are as long, and along each of
    the last two alone; what a model takes first it is given near that size as well, and beyond what the code may
    compare a number of places with.

    Near a size are half of it and three times as much; of a picture also other grids, or one stride more where no grid
    is known; of a sound or of states one vector more, which a window or a stride may not divide, and one less where
    more is cut off.

    Args:
        names: of the arguments that are made larger.

    Returns:
        Whether a model takes all larger ones that were tried, but for pictures of more colours.
    """
    takes_all = True
    if not any(base.is_free(name) and name not in base.tokens for name in names):
        return takes_all
    numbers, strides = numbers_in_code(model) | numbers_noted(model), strides_of(model)
    for size, axes in axes_by_size(base).items():
        inner = [(name, axis) for name, axis in axes if axis and name not in base.tokens]
        free = [(name, axis) for name, axis in inner if base.is_free(name) and name in names]
        beyond = {size * ((n + 1) // places + 1) for n in numbers for places in (size, *extents[:1])} - {size, 2 * size}
        more = strides[:1] if any(axis >= _SIDES for _, axis in free) else [1]
        grids = [*_of_other_grids(base, free, extents[:1], numbers)] or [size + n for n in more]
        near = [n for n in dict.fromkeys((size // 2, 3 * size, *grids)) if n not in (size, 2 * size)]
        others_tried = False
        for group in dict.fromkeys((tuple(inner), *((axis,) for axis in free[:-3:-1]))) if free else ():
            whole = group == tuple(inner)
            larger = _sized(base, group, 2 * size, sure=whole)
            answer = attempt(larger) if larger is not None else None
            is_taken = larger is not None and isinstance(answer, NothingNew | NoneType)
            takes_all &= is_taken or larger is None or all(axis < _SIDES for _, axis in group)
            if is_taken and not others_tried:
                others_tried = True
                less = [size - 1] if more == [1] and isinstance(answer, NothingNew) else []
                closer, others = (
                    [mode for other in sizes if (mode := _sized(base, group, other)) is not None]
                    for sizes in ([*near, *less], sorted(beyond.difference(near)))
                )
                for mode in (*closer, *spread(others, _SIZES)):
                    attempt(mode)
    return takes_all


def try_grids(base: Example, extents: Sequence[int], attempt: Attempt) -> None:
    """Try pictures twice as large on all sides that are as long; where a model takes that, by one place more, too."""
    for size, axes in axes_by_size(base).items():
        sides = [(name, axis) for name, axis in axes if axis >= _SIDES and base.is_free(name)]
        for other in (2 * size, *islice(_of_other_grids(base, sides, extents[:1], ()), 1)) if sides else ():
            mode = _sized(base, sides, other)
            if mode is None or not isinstance(attempt(mode), NothingNew | NoneType):
                break


def _of_other_grids(
    base: Example, axes: Sequence[tuple[str, int]], extents: Sequence[int], numbers: Collection[int]
) -> Iterator[int]:
    """Other sizes of a side of a picture of which a model makes a grid of places: so that this side of the grid is a
    multiple of a number in the code, or one more than it was; and a picture of one dot more.

    Args:
        axes: of the picture, which are as long as this side.
    """
    shapes = {base.arguments[name].shape: base.arguments[name].shape[axis] for name, axis in axes if axis >= _SIDES}
    for (*_, height, width), size in shapes.items():
        for places in (n - more for n in extents for more in (0, 1) if n > more):
            patch = math.isqrt(height * width // places)
            if patch > 1 and patch**2 * places == height * width and size % patch == 0 and size > patch:
                side = size // patch
                sides = [n * max(1, side // n) for n in sorted(numbers) if n <= _MOST_SIDE]
                yield from (patch * other for other in (side + 1, *sides[:_SIZES]) if other != side)
                yield size + 1
                return


def _sized(base: Example, axes: Sequence[tuple[str, int]], size: int, *, sure: bool = False) -> Mode | None:
    """A call of another size; None if it is too large, or a mask would have to grow."""
    counts, (first, axis) = Counter(name for name, _ in axes), axes[0]
    factor = size / base.arguments[first].shape[axis]
    sizes = ((base.arguments[name].numel(), factor**count) for name, count in counts.items())
    example = None
    if all(numbers * growth <= max(_MOST_NUMBERS, 4 * numbers) for numbers, growth in sizes):
        example = resized(base, axes, size)
    if example is None:
        return None
    shapes = (" × ".join(map(str, example.arguments[name].shape[1:])) for name in counts)
    return Mode(f"{base.said} of {' and '.join(shapes)}", example, sure=sure)
