"""Rows of a weight whose mean nothing sees: queries and keys that are normalised head by head, or all heads at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape, Slices
from hf_align.symmetry.gauges.index_provenance import follow, numbered, present, reaches, slices_of
from hf_align.symmetry.interpreter.spaces import Kind
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import centres, used_only_by


@dataclass(frozen=True)
class CentreWriter(Gauge):
    """w - mean(w) along the axis that it writes: every LayerNorm downstream subtracts the mean anyway."""

    parameter: str
    axis: int

    said = "centred, as every norm downstream does"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.parameter,)

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.parameter)[self.axis]}

    def fix(self, name: str, get: Get) -> Tensor:
        weight = get(name)
        return weight - weight.mean(self.axis, keepdim=True)


@dataclass(frozen=True)
class CentreRows(CentreWriter):
    """w - mean(w) over some entries of the axis that it writes, for each row of them that a norm centres by itself."""

    rows: tuple[Slices, ...]

    def entries(self) -> Iterator[Tensor]:
        """The entries of each row."""
        for row in self.rows:
            yield torch.cat([torch.arange(start, stop) for start, stop in row])

    def fix(self, name: str, get: Get) -> Tensor:
        weight = get(name).clone()
        for row in self.entries():
            part = weight.index_select(self.axis, row)
            weight.index_copy_(self.axis, row, part - part.mean(self.axis, keepdim=True))
        return weight


def centred_rows(found: Interpretation) -> Iterator[CentreRows]:
    """W + Σ_r 1_r v_rᵀ for the rows r of outputs that only ever lose their mean together."""
    uses: dict[str, list[LinearUse]] = defaultdict(list)
    for reading in found.linear_uses.values():
        uses[reading.weight].append(reading)
    for weight, alike in uses.items():
        places = {(r.in_axis, r.bias) for r in alike}
        axes, (in_axis, bias) = found.weights[weight].axes, next(iter(places))
        whole = axes[1 - in_axis].root.space.kind is Kind.ATOM
        nodes = {r.node: numbered(r) for r in alike}
        if whole or len(axes) != 2 or len(places) > 1 or not used_only_by((weight, bias), nodes, found.program):
            continue
        rows = _lost_rows(nodes, found) if reaches(nodes, centres) else []
        if rows:
            lost = tuple(slices_of(row) for row in rows)
            yield CentreRows(weight, 1 - in_axis, lost)
            if bias is not None:
                yield CentreRows(bias, 0, lost)


def _lost_rows(starts: Mapping[fx.Node, Tensor], found: Interpretation) -> list[Tensor]:
    rows: dict[tuple[int, ...], None] = {}
    others: list[Tensor] = []
    for use in follow(starts, found):
        labels = use.labels
        if centres(use.user, use.value):
            rows.update((tuple(row), None) for row in labels.reshape(-1, labels.shape[-1]).sort(-1).values.tolist())
        else:
            others.append(labels)
    if not rows:
        return []
    seen = [present(labels) for labels in others]
    met = torch.zeros(next(iter(starts)).meta["val"].shape[-1], dtype=torch.long)
    for entries in [*seen, *seen, *(torch.tensor(r) for r in rows if r[0] >= 0)]:
        met[entries] += 1
    lost = [torch.tensor(r) for r in rows if r[0] >= 0 and len(set(r)) == len(r) > 1]
    return [row for row in lost if bool((met[row] == 1).all())]
