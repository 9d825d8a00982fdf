"""Which steps of a descent are worth a visit: those around which something has moved since the last one.

A step that stayed where it was although its surroundings had moved will mostly stay again: an assignment is settled
long before the rotations around it are. So it rests until what is around it has moved far, or the others have come to
an end; then it is looked at once more where what has moved meanwhile could show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hf_align.matching.memory import Step, spaces_of, weights_of
from hf_align.matching.recurrent import meets_itself
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import Element
from hf_align.symmetry.spec import SymmetrySpec

_STILL = 1e-9
"""An element that changes by a smaller part of its square has not moved: the objective changes by less."""
_FAR = 1e-2
"""The same around a step that rests, if it is visited without waiting for the others."""
_AT_REST = 1e-4
"""The same around a step that rests, which gains by a second-order term at most: the few units whose two best partners
are as near as that, and by as little each."""


class Visits:
    """The visits of steps, and what stood around each when it was solved."""

    def __init__(self, spec: SymmetrySpec, steps: Sequence[Step]) -> None:
        self._around = _surroundings(spec, steps)
        solving = Counter(space for step in steps for space in spaces_of(step))
        self._own = {step: [space for space in spaces_of(step) if solving[space] == 1] for step in steps}
        self._seen: dict[Step, dict[str, Element | None]] = {}
        self._left: dict[Step, dict[str, Element | None]] = {}
        self._resting: set[Step] = set()
        self._woken: set[Step] | None = None
        self._changes: dict[tuple[int, int], tuple[Element | None, Element | None, float]] = {}

    @property
    def is_confirmed(self) -> bool:
        """Whether all steps whose rest was ended last stayed where they were."""
        return self._woken is not None and not self._woken

    def is_due(self, step: Step, elements: Elements) -> bool:
        """Whether a step has not been solved yet, something around it has moved (far, if it rests), or it is no longer
        where its visit left it."""
        around = self._moved_around(step, elements, _FAR if step in self._resting else _STILL)
        return around or self._was_moved(step, elements)

    def is_current(self, step: Step, elements: Elements) -> bool:
        """Whether what the last visit told of a step still holds."""
        return not (self._moved_around(step, elements, _STILL) or self._was_moved(step, elements))

    def solved(self, step: Step, elements: Elements, found: Elements) -> None:
        """Take note of a visit.

        Args:
            elements: as they were when the step was solved.
            found: those of the step.
        """
        self._changes.clear()
        again = step in self._seen
        self._seen[step] = {space: elements.get(space) for space in self._around[step]}
        self._left[step] = {space: found.get(space, elements.get(space)) for space in self._own[step]}
        stayed = not any(moved(elements.get(space), element, _STILL) for space, element in found.items())
        (self._resting.add if again and stayed else self._resting.discard)(step)
        if self._woken is not None and step in self._woken:
            self._woken = self._woken - {step} if stayed else None

    def wake(self, elements: Elements) -> bool:
        """End the rest of steps around which what has moved could show; whether there are any."""
        self._woken = {step for step in self._resting if self._moved_around(step, elements, _AT_REST)}
        self._resting -= self._woken
        return bool(self._woken)

    def _was_moved(self, step: Step, elements: Elements) -> bool:
        return any(self._change(left, elements.get(space)) > _STILL for space, left in self._left[step].items())

    def _moved_around(self, step: Step, elements: Elements, least: float) -> bool:
        seen = self._seen.get(step)
        return seen is None or any(self._change(b, elements.get(space)) > least for space, b in seen.items())

    def _change(self, before: Element | None, after: Element | None) -> float:
        """As `change`, which all steps that meet in a space ask of the same two elements."""
        pair = id(before), id(after)
        if pair not in self._changes:
            self._changes[pair] = before, after, change(before, after)  # held: their ids are no others'
        return self._changes[pair][-1]


def moved(before: Element | None, after: Element | None, least: float = _STILL) -> bool:
    """Whether an element has changed by more than a part of its square."""
    return change(before, after) > least


def change(before: Element | None, after: Element | None) -> float:
    """By which part of its square an element has changed; infinite where its order has, or its kind."""
    if before is after:
        return 0.0
    if before is None or after is None or before.tensors().keys() != after.tensors().keys():
        return math.inf
    return max(map(_difference, before.tensors().values(), after.tensors().values()))


def _difference(x: Tensor, y: Tensor) -> float:
    if not x.is_floating_point():
        return 0.0 if torch.equal(x, y) else math.inf
    changed, size = (float(torch.linalg.vector_norm(t)) ** 2 for t in (x - y, y))
    return changed / size if size else (math.inf if changed else 0.0)


def _surroundings(spec: SymmetrySpec, steps: Sequence[Step]) -> Mapping[Step, Collection[str]]:
    """The spaces that decide which elements of a step are best: those that it meets in a weight, and its own if it
    meets itself."""
    weights = {step: weights_of(spec, step) for step in steps}

    def around(step: Step) -> Iterable[Step]:
        for other in steps:
            if other != step and weights[step] & weights[other]:
                yield other
        if any(meets_itself(spec, space) for space in spaces_of(step)):
            yield step

    return {step: frozenset(space for other in around(step) for space in spaces_of(other)) for step in steps}
