"""Momentum: rotations go on the way they have come.

Where the rotation of a stream and those of the heads around it wait for each other, each sweep goes a small part of the
way. So a sweep begins beyond where the one before it ended, and where that makes the objective fall, again from the
best without (Mitchell, Ye & De Sterck, arXiv 1810.05846: alternating least squares, with restarts).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import nearest
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import PRIMAL, Element, Matrix

_MOMENTUM = 1.0
"""How far beyond, in parts of the last step."""


class Momentum:
    """Where a descent was before it went beyond what a sweep had found.

    Args:
        spaces: those that go on.
        elements: where the descent is; they are changed in place.
    """

    def __init__(self, models: Balanced, spaces: Collection[str], elements: dict[str, Element]) -> None:
        self._models, self._spaces, self._elements = models, spaces, elements
        self._kept, self._ahead = dict(elements), dict[str, Element]()

    def takes_back(self, fell: bool) -> bool:
        """Go back to where it was if a sweep that began beyond has made the objective fall; whether it did."""
        has_overshot = fell and bool(self._ahead)
        if has_overshot:
            self._elements.update(self._kept)
            self._ahead = {}
        return has_overshot

    def keep(self) -> None:
        """Remember where it is."""
        self._kept = dict(self._elements)

    def go_beyond(self) -> None:
        """Go on the way that it has come since it was kept, and remember where it is now."""
        before, now = self._kept, dict(self._elements)
        further = partial(beyond, self._models, self._spaces, before, now)
        self._ahead = self._models.processes.by_the_first(further)
        self.keep()
        self._elements.update(self._ahead)


def beyond(models: Balanced, spaces: Iterable[str], before: Elements, now: Elements) -> dict[str, Element]:
    """The rotations of some spaces that lie beyond where a sweep has brought them.

    Args:
        before: the elements when that sweep began.
        now: those when it ended.
    """
    found = dict[str, Element]()
    for space in spaces:
        old, new = before.get(space), now.get(space)
        if old is not new and isinstance(old, Matrix) and isinstance(new, Matrix) and new.keeps_lengths:
            step = new.matrix - old.matrix
            found[space] = nearest(models.spec.group(space), {PRIMAL: new.matrix + _MOMENTUM * step}, models.device)
    return found
