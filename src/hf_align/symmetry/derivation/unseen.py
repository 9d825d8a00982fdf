"""Weights that no traced call reads: what an unseen call may do with them must stay as it is.

Such a weight meets activations of its own sizes. So it stands still itself, and so does every space along which the
model has an axis of one of these sizes; a gauge that changes such an activation is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hf_align.errors import HfAlignError
from hf_align.symmetry.gauges.canonical import Gauge
from hf_align.symmetry.gauges.carried_biases import CarryBias
from hf_align.symmetry.gauges.common_scales import CommonScale
from hf_align.symmetry.gauges.constant_queries import ReadConstant, SeenKeys
from hf_align.symmetry.gauges.folds import FoldNorm
from hf_align.symmetry.gauges.kept_norms import FreeReader, LevelTable
from hf_align.symmetry.gauges.kernels import LevelKernels
from hf_align.symmetry.gauges.level_norms import LevelNorm
from hf_align.symmetry.gauges.linked_gains import LinkedGain
from hf_align.symmetry.gauges.moves import MoveConstant, ShortenConstant
from hf_align.symmetry.gauges.narrow_values import NarrowReader
from hf_align.symmetry.gauges.parts import OnParts
from hf_align.symmetry.gauges.row_means import CentreWriter
from hf_align.symmetry.gauges.shears import ShearAlongMean
from hf_align.symmetry.gauges.spectra import LevelSpectrum
from hf_align.symmetry.overrides.override_file import is_named
from hf_align.symmetry.pin import pin
from hf_align.symmetry.spec import AxisActions, SymmetrySpec
from hf_align.tracing.program import Evidence


def without_unseen(spec: SymmetrySpec, unused: Sequence[str] = ()) -> SymmetrySpec:
    """The spec with all pinned that a weight which no traced call reads may meet.

    Args:
        unused: patterns of names of weights that no call reads at all: they meet nothing.

    Raises:
        HfAlignError: no weight has such a name.
    """
    for pattern in unused:
        if not any(is_named(pattern, name) for name in spec.parameters):
            raise HfAlignError(f"no parameter matches {pattern}")
    unread = tuple(n for n in spec.unread if not any(is_named(pattern, n) for pattern in unused))
    spec = replace(spec, unread=unread)
    sizes = {size for name in spec.unread for size in spec.shape(name) if size > 1}
    if not sizes:
        return spec
    met = dict.fromkeys(
        space
        for axes in spec.parameters.values()
        for axis in axes
        if _size(axis) in sizes
        for segment in axis
        for factor in segment
        for space in factor.powers
    )
    found = replace(spec, gauges=_gauges_left(spec, sizes))
    why = Evidence("unread", f"{spec.unread[0]} has this size, and no traced call reads it", "", "")
    for name in met:
        if found.spaces.get(name) is not None and found.spaces[name].group is not None:
            found = pin(found, name, why)
    return found


def _size(axis: AxisActions) -> int:
    return sum(math.prod(factor.size for factor in segment) for segment in axis)


def _gauges_left(spec: SymmetrySpec, sizes: set[int]) -> tuple[Gauge, ...]:
    """The gauges that change no activation of these sizes, without those that count on one that does."""
    left = tuple(g for g in spec.gauges if not _changes_what_is_met(g, spec, sizes))
    return left if left == spec.gauges else tuple(g for g in left if not _counts_on_others(g))


def _counts_on_others(gauge: Gauge) -> bool:
    """Whether a gauge may hold only for what others have made canonical: a norm's bias that has left, and constants
    that such norms' readers keep."""
    if isinstance(gauge, (FreeReader, LevelTable)):
        return gauge.norm_bias is None
    return isinstance(
        gauge,
        (CarryBias, LevelSpectrum, MoveConstant, NarrowReader, OnParts, SeenKeys, ShearAlongMean, ShortenConstant),
    )


def _changes_what_is_met(gauge: Gauge, spec: SymmetrySpec, sizes: set[int]) -> bool:
    """Whether a gauge changes an activation, not only the weights around it: a stream's mean, what a norm gives."""
    if isinstance(gauge, CentreWriter):
        return spec.shape(gauge.parameter)[gauge.axis] in sizes
    if isinstance(gauge, (MoveConstant, ShortenConstant)):
        return spec.shape(gauge.source.parameter)[-1] in sizes
    if isinstance(gauge, NarrowReader):
        weight, axis = gauge.writer
        return gauge.centred and spec.shape(weight)[1 - axis] in sizes
    if isinstance(gauge, (CommonScale, LevelKernels, LinkedGain, OnParts, ReadConstant, SeenKeys)):
        return any(size in sizes for name in gauge.targets for size in spec.shape(name))
    if isinstance(gauge, FoldNorm) and any(spec.shape(c.weight)[c.axis] in sizes for c in gauge.others):
        return True
    norms = (CarryBias, FoldNorm, LevelNorm, LevelSpectrum, ShearAlongMean)
    return isinstance(gauge, norms) and spec.shape(gauge.gain)[-1] in sizes
