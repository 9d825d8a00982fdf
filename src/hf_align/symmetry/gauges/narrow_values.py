"""Values with more entries than dimensions: x = A n, A with more outputs than inputs.

What reads x is free outside of the range of A. If the mean of x is lost wherever else it goes, A may write any, for a
reader W that becomes W (I + 1 uᵀ)⁻¹ sees of (I + 1 uᵀ) x what it saw of x.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape
from hf_align.symmetry.gauges.index_provenance import LosesMean
from hf_align.symmetry.gauges.kept_norms import vector_uses
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import used_only_by

_NEARLY_LOST = 1e-8
"""Of what B shows most of, squared: the inverse of less would blow rounding up."""


@dataclass(frozen=True)
class NarrowReader(Gauge):
    """W A B⁺ replaces each W that reads x = A n, and B replaces A, for x has more entries than n has dimensions.

    B = ΠA, A less the mean of its columns, where nothing but W sees the mean of x; else B = A. Of all weights that read
    the same of B n, this is the smallest. All stay as they are where B loses more of n than A does, or nearly so.

    Attributes:
        writer: A, and the axis along which it reads n.
        readers: each W, and the axis along which it reads x.
        centred: whether the mean of x is lost.
        reads_no_mean: whether A has lost its own along n, whose mean is zero.
    """

    writer: tuple[str, int]
    readers: tuple[tuple[str, int], ...]
    centred: bool
    reads_no_mean: bool

    said = "without what it never sees of a value with more entries than dimensions"

    @property
    def targets(self) -> tuple[str, ...]:
        readers = tuple(weight for weight, _ in self.readers)
        return (self.writer[0], *readers) if self.centred else readers

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        weight, axis = self.writer
        return {shape(weight)[1 - axis]} if self.centred else ()

    def fix(self, name: str, get: Get) -> Tensor:
        weight, axis = self.writer
        written = get(weight).movedim(axis, -1).double()
        shown = written - written.mean(0) if self.centred else written
        seen = shown.mT @ shown
        if self.reads_no_mean:
            seen = seen + seen.diagonal().mean() / len(seen)
        shares = torch.linalg.eigvalsh(seen.detach())
        if not bool(shares[0] > _NEARLY_LOST * shares[-1]):
            return get(name)
        if name == weight:
            return shown.movedim(-1, axis).to(get(name).dtype)
        axis = dict(self.readers)[name]
        inverse = torch.linalg.solve(seen, shown.mT)
        return (get(name).movedim(axis, -1).double() @ written @ inverse).movedim(-1, axis).to(get(name).dtype)


def narrow_readers(
    found: Interpretation,
    zero: Collection[str],
    centred: Collection[str],
    loses_mean: LosesMean,
) -> Iterator[NarrowReader]:
    """The gauges of what reads such values, and nothing else.

    Args:
        zero: biases that have gone elsewhere.
        centred: weights whose input has mean zero, and that have lost their own along it.
    """
    writers: dict[str, list[LinearUse]] = defaultdict(list)
    readers: dict[str, set[fx.Node]] = defaultdict(set)
    for use in found.linear_uses.values():
        writers[use.weight].append(use)
        readers[use.weight].add(use.node)
    for weight, alike in writers.items():
        first, nodes = alike[0], {use.node for use in alike}
        axes = found.weights[weight].axes
        if len(axes) != 2 or len({(use.in_axis, use.bias) for use in alike}) > 1 or not (
            first.bias in (None, *zero) and used_only_by((weight, first.bias), nodes, found.program)
        ):  # fmt: skip
            continue
        if axes[first.in_axis].size - (weight in centred) >= axes[1 - first.in_axis].size:
            continue
        uses = [use for node in nodes for use in vector_uses(node, found)]
        read = {use.reading for use in uses if use.reading is not None}
        axis_of = {(r.weight, r.in_axis) for r in read}
        alone = {r.weight: {x.node for x in read if x.weight == r.weight} for r in read}
        if weight in alone or not all(
            readers[name] == at and used_only_by((name,), at, found.program) for name, at in alone.items()
        ):
            continue
        lost = all(loses_mean(use.user, use.value) for use in uses if use.reading is None)
        if axis_of:
            yield NarrowReader((weight, first.in_axis), tuple(sorted(axis_of)), lost, weight in centred)
