"""Rows of a weight whose mean nothing sees: queries and keys that are normalised head by head, or all heads at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape, Slices
from hf_align.symmetry.gauges.index_provenance import every_entry, follow, present, reaches, slices_of
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
        nodes = [r.node for r in alike]
        if whole or len(axes) != 2 or len(places) > 1 or not used_only_by((weight, bias), nodes, found.program):
            continue
        rows = _lost_rows(alike, found) if reaches(nodes, centres) else []
        if rows:
            lost = tuple(slices_of(row) for row in rows)
            yield CentreRows(weight, 1 - in_axis, lost)
            if bias is not None:
                yield CentreRows(bias, 0, lost)


def _lost_rows(uses: Sequence[LinearUse], found: Interpretation) -> list[Tensor]:
    """The outputs of a weight that lose their mean together, and are seen nowhere else. Those of several tokens, or
    uses, or beside something else, have no mean of their own to lose."""
    size = uses[0].node.meta["val"].shape[uses[0].out_axis]
    rows, others = list[Tensor](), list[Tensor]()
    for use in follow(_numbered_by_token(uses), found):
        entries = use.labels.reshape(-1, use.labels.shape[-1] if use.labels.dim() else 1)
        alone = torch.zeros(len(entries), dtype=torch.bool)
        if centres(use.user, use.value):
            alone = (entries >= 0).all(1) & (entries // size == entries[:, :1] // size).all(1)
            rows += torch.unique((entries[alone] % size).sort(-1).values, dim=0)
        others.append(present(entries[~alone]) % size)
    lost = [torch.tensor(row) for row in dict.fromkeys(tuple(row.tolist()) for row in rows)]
    met = torch.zeros(size, dtype=torch.long)
    for seen in [*others, *others, *lost]:
        met[seen] += 1
    return [row for row in lost if len(row.unique()) == len(row) > 1 and bool((met[row] == 1).all())]


def _numbered_by_token(uses: Collection[LinearUse]) -> dict[fx.Node, Tensor]:
    """The outputs of all uses of a weight by number, one token after the other."""
    labels, before = dict[fx.Node, Tensor](), 0
    for use in uses:
        labels[use.node] = before + every_entry(use.node, use.out_axis)
        before += use.node.meta["val"].numel()
    return labels
