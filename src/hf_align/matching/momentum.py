"""Momentum: rotations go on the way they have come.

Where the rotation of a stream and those of the heads around it wait for each other, each sweep goes a small part of the
way. So a sweep begins beyond where the one before it ended, and where that makes the objective fall, again from the
best without (Mitchell, Ye & De Sterck, arXiv 1810.05846: alternating least squares, with restarts).
"""

from __future__ import annotations

from collections.abc import Iterable

from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import nearest
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import PRIMAL, Element, Matrix

_MOMENTUM = 1.0
"""How far beyond, in parts of the last step."""


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
