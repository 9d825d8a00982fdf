"""Rows of a weight whose mean nothing sees: queries and keys that are normalised head by head, or all heads at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import CentreRows
from hf_align.symmetry.gauges.labels import move, numbered, only_moves, present, runs
from hf_align.symmetry.interpreter import Interpretation
from hf_align.symmetry.passing import read_once
from hf_align.symmetry.spaces import Kind
from hf_align.tracing.trace import op_name


def centred_rows(found: Interpretation) -> Iterator[CentreRows]:
    """W + Σ_r 1_r v_rᵀ for the rows r of outputs that only ever lose their mean together."""
    for reading in found.readings.values():
        out_axis = 1 - reading.in_axis
        axes = found.weights[reading.weight].axes
        whole = axes[out_axis].root.space.kind is Kind.ATOM
        if whole or len(axes) != 2 or not read_once(reading, found.program):
            continue
        rows = _lost_rows(reading.node, found)
        if rows:
            lost = tuple(runs(row) for row in rows)
            yield CentreRows(reading.weight, out_axis, lost)
            if reading.bias is not None:
                yield CentreRows(reading.bias, 0, lost)


def _lost_rows(node: fx.Node, found: Interpretation) -> list[Tensor]:
    rows: dict[tuple[int, ...], None] = {}
    seen: list[Tensor] = []
    for labels, is_blind in _ends(node, numbered(node), found):
        if is_blind:
            rows.update((tuple(row), None) for row in labels.reshape(-1, labels.shape[-1]).sort(-1).values.tolist())
        else:
            seen.append(present(labels))
    met = torch.zeros(node.meta["val"].shape[-1], dtype=torch.long)
    for entries in [*seen, *seen, *(torch.tensor(r) for r in rows if r[0] >= 0)]:
        met[entries] += 1
    lost = [torch.tensor(r) for r in rows if r[0] >= 0 and len(set(r)) == len(r) > 1]
    return [row for row in lost if bool((met[row] == 1).all())]


def _ends(node: fx.Node, labels: Tensor, found: Interpretation) -> Iterator[tuple[Tensor, bool]]:
    """Where entries end up together, and whether their common mean is lost there."""
    if not (labels >= 0).any():
        return
    for user in node.users:
        if only_moves(user, node, found):
            for after, part in move(user, node, labels, found):
                yield from _ends(after, part, found)
        else:
            yield labels, _is_blind(user, node)


def _is_blind(user: fx.Node, node: fx.Node) -> bool:
    """Whether an op subtracts the mean over the last axis."""
    if op_name(user) == "layer_norm":
        return user.args[0] is node and len(user.args[1]) == 1  # type: ignore[arg-type]
    return op_name(user) == "softmax" and user.args[1] in (-1, node.meta["val"].dim() - 1)
