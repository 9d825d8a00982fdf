"""Gains: diag(w) goes into what reads its target, or into what writes its source, where it can."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from hf_align.symmetry.gauges.find import Folding, writer_of
from hf_align.symmetry.gauges.folds import Carried, all_carriers, carriers
from hf_align.symmetry.interpreter.bounds import FIXED, METRIC, ONES, ONES_UP_TO_SIGN, PERMUTATION, Bound
from hf_align.symmetry.interpreter.call import tie
from hf_align.symmetry.interpreter.spaces import Axis, Kind, SpaceMismatchError, lower, unify
from hf_align.symmetry.interpreter.values import Gain, Interpretation, Value
from hf_align.symmetry.rules.gains import link_of_gain
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Evidence, evidence

_TURNS = tuple(METRIC.meet(ones) for ones in (ONES, ONES_UP_TO_SIGN))
"""What norms that centre leave of a stream: which sign the mean has may be seen, too."""


def resolve_gains(found: Interpretation) -> list[Folding]:
    """Fold diag(w) into the readers of its target, or into what writes its source; tie its two sides where neither is.

    Folded, the gain is one and the target carries the element of the source, whatever that is. A target that is
    pinned down by anything but linear readers (it re-enters a residual stream, it is the source itself because the
    head is tied) leaves only what commutes with every diagonal: monomial maps. So does a gain that is added somewhere,
    too.
    """
    folded = []
    uses: dict[str, list[Gain]] = defaultdict(list)
    for gain in (*found.gains, *found.linked_gains):
        uses[gain.parameter].append(gain)
    for parameter, gains in uses.items():
        target, only_gain = gains[0].target.root, _is_only_gain(parameter, found)
        _keep_factors(gains, found, only_gain=only_gain)
        alike = len({(g.target.root.space, g.target.root.is_dual, g.offset, link_of_gain(g)) for g in gains}) == 1
        apart = only_gain and alike and not any(target.space is g.source.root.space for g in gains)
        plain = only_gain and all(_is_factor(g) for g in gains)
        writer = writer_of(gains, found) if plain and not any(g.offset or g.through for g in gains) else None
        if apart and _is_free(target, gains, found):
            folded.append(Folding(tuple(gains), tuple(carriers(target, found))))
        elif writer is not None:
            folded.append(Folding(tuple(gains), (), writer))
        elif apart and (writers := _writers(gains, found)):
            folded.append(Folding(tuple(gains), writers))
        else:
            for gain in gains:
                try:
                    unify(gain.target, tie(gain.weight, gain.source, found, gain.node))
                except SpaceMismatchError as mismatch:
                    for axis in (gain.target, gain.weight, gain.source):
                        lower(axis, FIXED, Evidence(str(mismatch), "", "", ""))
    for gain in (g for folding in folded for g in folding.gains):
        unify(gain.target, gain.source)
        for atom in gain.weight.atoms:  # several where a gain is stored as a table of them
            atom.root.space.bound = Bound(fixed=True)
    return folded


def _keep_factors(gains: Sequence[Gain], found: Interpretation, *, only_gain: bool) -> None:
    """Let no factor reach a weight that is a gain with a number added, and something else, or with another number: what
    is a factor of one is none of the other."""
    offsets = {gain.offset for gain in gains}
    if any(offsets) and not (only_gain and len(offsets) == 1):
        for gain in gains:
            lower(gain.weight, PERMUTATION, evidence(gain.node, "a number added in one place"))


def between_streams(found: Interpretation) -> tuple[Gain, ...]:
    """The gains of norms between two streams that could turn, each for itself, if there were no gain; to be asked for
    before any gain is resolved."""
    return tuple(
        gain
        for gain in found.gains
        if does(gain.node, Trait.CENTRES)
        and gain.source.root.space is not gain.target.root.space
        and all(a.root.space.kind is Kind.ATOM and a.root.space.bound in _TURNS for a in (gain.source, gain.target))
        and _is_only_gain(gain.parameter, found)
    )


def _is_only_gain(parameter: str, found: Interpretation) -> bool:
    """Whether a weight is nowhere anything but a gain."""
    shown = {n for n, v in found.values.items() if isinstance(v, Value) and v.parameter == parameter}
    read: list[fx.Node] = []
    for user in {u for n in shown for u in n.users} - shown:
        fx.node.map_arg((user.args, user.kwargs), lambda n: read.append(n) if n in shown else None)
    return len(read) == sum(g.parameter == parameter for g in (*found.gains, *found.linked_gains))


def _is_factor(gain: Gain) -> bool:
    """Whether nothing but the factor is between source and target (no norm)."""
    return does(gain.node, Trait.MULTIPLIES | Trait.STORED_STATISTICS)


def _writers(gains: Sequence[Gain], found: Interpretation) -> tuple[Carried, ...]:
    """The weights that write the source of some gains, each to be multiplied by these, if any matrix may act on the
    source and no weight reads it."""
    source = gains[0].source.root
    multiplied = all(does(g.node, Trait.MULTIPLIES) and g.source.root == source for g in gains)
    if not multiplied or not _is_free(source, gains, found):
        return ()
    along = tuple(carriers(source, found))
    return tuple(replace(c, power=-1) for c in along) if all(c.power == 1 for c in along) else ()


def _is_free(axis: Axis, gains: Sequence[Gain], found: Interpretation) -> bool:
    """Whether any matrix may act on a space that no other gain writes or multiplies, and all weights along it are known
    as its carriers. Who reads a single entry is not known: views drop such axes, and make others."""
    space = axis.space
    if space.kind is not Kind.ATOM or not space.bound.free or axis.size == 1:
        return False
    every = (*found.gains, *found.linked_gains)
    others = (axis for g in every if g not in gains for axis in (g.target, g.source, g.weight))
    if any(atom.root.space is space for axis in others for atom in axis.atoms):
        return False
    return all_carriers(axis, found) is not None
