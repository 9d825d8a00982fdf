"""Constants of which the linear map that reads them loses a part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch

from hf_align.symmetry.gauges.canonical import Slices
from hf_align.symmetry.gauges.constant_sources import sources
from hf_align.symmetry.gauges.constants import passed_on
from hf_align.symmetry.gauges.index_provenance import NOBODY, follow, present, row_of, slices_of
from hf_align.symmetry.gauges.moves import Constant, ShortenConstant
from hf_align.symmetry.interpreter.values import Interpretation


def shortened_constants(
    found: Interpretation, kept: Collection[Constant], gone: Collection[str], centred: Collection[tuple[str, int]]
) -> Iterator[ShortenConstant]:
    """The gauges of constants of which a linear map that reads them loses a part.

    Args:
        kept, gone: as for `moved_constants`.
        centred: weights, and the axes along which they have lost their mean.
    """
    for source, starts in sources(found, kept, gone):
        readers: set[tuple[str, int, Slices | None]] = set()
        read, beside = set[int](), set[int]()
        for use in follow(starts, found, partial(passed_on, found.program)):
            if (reading := found.reading_by_matrix(use.user, use.value)) is not None:
                readers.add((reading.weight, reading.in_axis, row_of(reading, use.labels, found)))
                read |= set(present(use.labels).tolist())
            else:
                beside |= set(present(use.labels).tolist())
        if len(readers) != 1 or read & beside:
            continue
        ((weight, axis, row),) = readers
        outputs = found.weights[weight].axes[1 - axis].size
        whole = row is not None and all(start != NOBODY for start, _ in row)
        if row is not None and whole and (weight, 1 - axis) in centred and len(read) >= outputs:
            yield ShortenConstant(source, slices_of(torch.tensor(sorted(read))), weight, axis, row)
