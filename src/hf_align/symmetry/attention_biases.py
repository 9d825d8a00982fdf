"""Key and value biases: constants that attention does not see, or only passes on.

Every entry of a bias is followed as a label: the graph's own reshapes, splits and transposes are run on the numbers of
the entries, so that any way of fusing and interleaving queries, keys and values is understood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.execute import call_wide
from hf_align.symmetry.canonical import DropKeyBias, Gauge, MoveValueBias, Runs
from hf_align.symmetry.interpreter import Interpretation, Reading
from hf_align.symmetry.passing import PASSES, read_once, sums_to_one
from hf_align.symmetry.softmax_shift import reaches_softmax
from hf_align.trace import op_name

_NOBODY = -1
_PRODUCTS = {"matmul": 0, "bmm": 0, "baddbmm": 1}
"""Where the left factor stands among the operands."""


@dataclass(frozen=True)
class _Fate:
    """What becomes of some entries of a bias: lost as keys, read by an output projection as values, or seen."""

    labels: Tensor
    is_key: bool = False
    output: Reading | None = None
    read: Tensor | None = None


def attention_biases(found: Interpretation) -> Iterator[Gauge]:
    """The gauges of key and value biases."""
    for reading in found.readings.values():
        if reading.bias is None or not read_once(reading, found.program):
            continue
        shape = reading.node.meta["val"].shape
        labels = torch.arange(shape[-1]).expand(shape)
        yield from _gauges(reading.bias, shape[-1], list(_fates(reading.node, labels, found)))


def _gauges(bias: str, size: int, fates: list[_Fate]) -> Iterator[Gauge]:
    met = torch.stack([torch.isin(torch.arange(size), f.labels) for f in fates]) if fates else torch.zeros(0, size)
    alone = met.sum(0) == 1
    keys = torch.zeros(size, dtype=torch.bool)
    for fate, entries in zip(fates, met, strict=True):
        if fate.is_key:
            keys |= entries.bool() & alone
        elif fate.output is not None and fate.read is not None and bool(alone[entries.bool()].all()):
            output = fate.output
            assert output.bias is not None
            read = _runs(fate.read)
            yield MoveValueBias(bias, _runs(entries.nonzero()[:, 0]), read, output.weight, output.in_axis, output.bias)
    if keys.any():
        yield DropKeyBias(bias, _runs(keys.nonzero()[:, 0]))


def _runs(entries: Tensor) -> Runs:
    """Consecutive numbers as [start, stop)."""
    runs: list[tuple[int, int]] = []
    for entry in entries.tolist():
        if runs and runs[-1][1] == entry:
            runs[-1] = (runs[-1][0], entry + 1)
        else:
            runs.append((entry, entry + 1))
    return tuple(runs)


def _fates(node: fx.Node, labels: Tensor, found: Interpretation) -> Iterator[_Fate]:
    """What becomes of a constant added to a value, for each way that it takes."""
    if not (labels >= 0).any():
        return
    for user in node.users:
        if _only_moves(user, node, found):
            moved = _move(user, node, labels, found)
            for after, part in moved:
                yield from _fates(after, part, found)
        elif _is_right_factor(node, user):
            yield _key_or_value(user, labels, found)
        else:
            yield _Fate(_present(labels))


def _is_right_factor(node: fx.Node, user: fx.Node) -> bool:
    """Whether an op multiplies another value by this one, and does nothing else with it."""
    at = _PRODUCTS.get(op_name(user))
    return at is not None and [i for i, a in enumerate(user.args) if a is node] == [at + 1]


def _present(labels: Tensor) -> Tensor:
    return labels[labels >= 0].unique()


def _only_moves(user: fx.Node, node: fx.Node, found: Interpretation) -> bool:
    """Whether an op rearranges the entries of this operand, by fixed numbers, beside nothing or other activations."""
    name = op_name(user)
    if name in ("cat", "stack", "slice_scatter", "copy"):
        return True
    return name in PASSES and all(a is node or a in found.program.constants for a in user.all_input_nodes)


def _move(user: fx.Node, node: fx.Node, labels: Tensor, found: Interpretation) -> Iterator[tuple[fx.Node, Tensor]]:
    """The labels of what an op makes of its operand; entries of other operands are nobody's."""

    def lookup(other: fx.Node) -> Any:
        if other is node:
            return labels
        value = found.program.constants.get(other)
        if value is not None and not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return torch.full(other.meta["val"].shape, _NOBODY)

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


def _key_or_value(product: fx.Node, labels: Tensor, found: Interpretation) -> _Fate:
    """A key if the same for every position (the last axis), a value if the same for every row that is summed."""
    present = _present(labels)
    if bool((labels == labels[..., :1]).all()) and reaches_softmax(product, found.program):
        return _Fate(present, is_key=True)
    if not bool((labels == labels[..., :1, :]).all()) or not sums_to_one(product.args[_PRODUCTS[op_name(product)]]):
        return _Fate(present)
    mixed = labels[..., :1, :].expand(product.meta["val"].shape)
    outputs = list(_readers(product, mixed, found))
    if len(outputs) != 1 or outputs[0] is None:
        return _Fate(present)
    output, read = outputs[0]
    rows = read.reshape(-1, read.shape[-1])
    usable = output.bias is not None and read_once(output, found.program)
    if not usable or not bool((rows == rows[:1]).all()) or bool((rows[0] < 0).any()):
        return _Fate(present)
    return _Fate(present, output=output, read=rows[0])


def _readers(node: fx.Node, labels: Tensor, found: Interpretation) -> Iterator[tuple[Reading, Tensor] | None]:
    """The linear readers of a value with labels, behind ops that only move entries; None for any other consumer."""
    for user in node.users:
        reading = found.readings.get(user)
        if reading is not None and reading.input is node:
            yield reading, labels
        elif _only_moves(user, node, found):
            for after, part in _move(user, node, labels, found):
                yield from _readers(after, part, found)
        else:
            yield None
