"""Weights that no traced call reads: what an unseen call may do with them must stay as it is.

Such a weight meets activations of its own sizes, or several smaller ones side by side, as of the pixels of a square, or
those of all layers: one number for each head of each layer. So it stands still itself, and so does every space along
which the model has an axis of one of these sizes; a gauge that changes such an activation is left out. Where no code of
the model so much as names the weight, it meets nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from hf_align.errors import HfAlignError
from hf_align.symmetry.gauges.canonical import Gauge
from hf_align.symmetry.overrides.override_file import is_named
from hf_align.symmetry.pin import pin
from hf_align.symmetry.spec import SymmetrySpec, size_of
from hf_align.tracing.named import never_named
from hf_align.tracing.program import Evidence

_SIDE_BY_SIDE = 16
"""Activations that a weight takes as one, at most: pixels of a square of four by four."""


def without_unseen(
    spec: SymmetrySpec, unused: Sequence[str] = (), model: PreTrainedModel | None = None
) -> SymmetrySpec:
    """The spec with all pinned that a weight which no traced call reads may meet.

    Args:
        unused: patterns of names of weights that no call reads at all: they meet nothing.
        model: whose code is searched for what it names.

    Raises:
        HfAlignError: no weight has such a name.
    """
    for pattern in unused:
        if not any(is_named(pattern, name) for name in spec.parameters):
            raise HfAlignError(f"no parameter matches {pattern}")
    spec = _without_named(spec, unused)
    meeting = _meeting(spec, model)
    whole = {size for name in meeting for size in spec.shape(name) if size > 1}
    if not whole:
        return spec
    sizes = {size // count for size in whole for count in range(1, _SIDE_BY_SIDE + 1) if size % count == 0} - {1}
    met = dict.fromkeys(
        space
        for axes in spec.parameters.values()
        for axis in axes
        if size_of(axis) in sizes
        for segment in axis
        for factor in segment
        for space in factor.powers
    ) | dict.fromkeys(_of_all_layers(spec, whole))
    found = replace(spec, gauges=_gauges_left(spec, sizes))
    why = Evidence("unread", f"{meeting[0]} has this size, and no traced call reads it", "", "")
    for name in met:
        if found.spaces.get(name) is not None and found.spaces[name].group is not None:
            found = pin(found, name, why)
    return found


def _of_all_layers(spec: SymmetrySpec, sizes: Collection[int]) -> list[str]:
    """The spaces of one size and kind of group that together have one of some sizes."""
    kinds = {name: (space.size, type(space.group)) for name, space in spec.spaces.items()}
    count = Counter(kinds.values())
    return [name for name, kind in kinds.items() if kind[0] * count[kind] in sizes]


def unseen(spec: SymmetrySpec, unused: Sequence[str] = (), model: PreTrainedModel | None = None) -> list[str]:
    """The weights that no traced call reads but another may.

    Args:
        unused, model: as for `without_unseen`.
    """
    return _meeting(_without_named(spec, unused), model)


def _without_named(spec: SymmetrySpec, unused: Sequence[str]) -> SymmetrySpec:
    """The spec without the unread weights that are said to be read by no call at all."""
    return replace(spec, unread=tuple(n for n in spec.unread if not any(is_named(pattern, n) for pattern in unused)))


def _meeting(spec: SymmetrySpec, model: PreTrainedModel | None) -> list[str]:
    alone = () if model is None else never_named(model, spec.unread)
    return [name for name in spec.unread if name not in alone]


def _gauges_left(spec: SymmetrySpec, sizes: set[int]) -> tuple[Gauge, ...]:
    """The gauges that change no activation of these sizes, without those that count on one that does."""
    left = tuple(g for g in spec.gauges if sizes.isdisjoint(g.seen_sizes(spec.shape)))
    return left if left == spec.gauges else tuple(g for g in left if not g.counts_on_others)
