"""Entries of a value followed as labels: the graph's own reshapes, splits and transposes, run on numbers.

So any way of fusing and interleaving what one weight writes is understood.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Runs
from hf_align.symmetry.interpreter import Interpretation
from hf_align.symmetry.passing import PASSES
from hf_align.tracing.execute import call_wide
from hf_align.tracing.trace import op_name

NOBODY = -1


def numbered(node: fx.Node) -> Tensor:
    """The entries along the last axis of a value, in its shape."""
    shape = node.meta["val"].shape
    return torch.arange(shape[-1]).expand(shape)


def present(labels: Tensor) -> Tensor:
    """The entries that occur."""
    return labels[labels >= 0].unique()


def runs(entries: Tensor) -> Runs:
    """Consecutive numbers as [start, stop)."""
    found: list[tuple[int, int]] = []
    for entry in entries.tolist():
        if found and found[-1][1] == entry:
            found[-1] = (found[-1][0], entry + 1)
        else:
            found.append((entry, entry + 1))
    return tuple(found)


def only_moves(user: fx.Node, node: fx.Node, found: Interpretation) -> bool:
    """Whether an op rearranges the entries of this operand, by fixed numbers, beside nothing or other activations."""
    name = op_name(user)
    if name in ("cat", "stack", "slice_scatter", "copy"):
        return True
    return name in PASSES and all(a is node or a in found.program.constants for a in user.all_input_nodes)


def move(user: fx.Node, node: fx.Node, labels: Tensor, found: Interpretation) -> Iterator[tuple[fx.Node, Tensor]]:
    """The labels of what an op makes of its operand; entries of other operands are nobody's."""

    def lookup(other: fx.Node) -> Any:
        if other is node:
            return labels
        value = found.program.constants.get(other)
        if value is not None and not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return torch.full(other.meta["val"].shape, NOBODY)

    if op_name(user) in ("to", "_to_copy", "dropout", "type_as", "detach"):
        yield user, labels
        return
    args, kwargs = fx.node.map_arg((user.args, user.kwargs), lookup)
    result = call_wide(user, args, kwargs)
    if isinstance(result, Tensor):
        yield user, result
        return
    for child in user.users:
        which = child.args[1]
        assert isinstance(which, int)
        yield child, result[which]
