"""Key and value biases: constants that attention does not see, or only passes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import DropKeyBias, Gauge, MoveValueBias
from hf_align.symmetry.gauges.labels import move, numbered, only_moves, present, runs
from hf_align.symmetry.interpreter import Interpretation, Reading
from hf_align.symmetry.passing import read_once, sums_to_one
from hf_align.symmetry.softmax_shift import reaches_softmax
from hf_align.tracing.trace import op_name

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
        size = reading.node.meta["val"].shape[-1]
        yield from _gauges(reading.bias, size, list(_fates(reading.node, numbered(reading.node), found)))


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
            read = runs(fate.read)
            yield MoveValueBias(bias, runs(entries.nonzero()[:, 0]), read, output.weight, output.in_axis, output.bias)
    if keys.any():
        yield DropKeyBias(bias, runs(keys.nonzero()[:, 0]))


def _fates(node: fx.Node, labels: Tensor, found: Interpretation) -> Iterator[_Fate]:
    """What becomes of a constant added to a value, for each way that it takes."""
    if not (labels >= 0).any():
        return
    for user in node.users:
        if only_moves(user, node, found):
            moved = move(user, node, labels, found)
            for after, part in moved:
                yield from _fates(after, part, found)
        elif _is_right_factor(node, user):
            yield _key_or_value(user, labels, found)
        else:
            yield _Fate(present(labels))


def _is_right_factor(node: fx.Node, user: fx.Node) -> bool:
    """Whether an op multiplies another value by this one, and does nothing else with it."""
    at = _PRODUCTS.get(op_name(user))
    return at is not None and [i for i, a in enumerate(user.args) if a is node] == [at + 1]


def _key_or_value(product: fx.Node, labels: Tensor, found: Interpretation) -> _Fate:
    """A key if the same for every position (the last axis), a value if the same for every row that is summed."""
    entries = present(labels)
    if bool((labels == labels[..., :1]).all()) and reaches_softmax(product, found.program):
        return _Fate(entries, is_key=True)
    if not bool((labels == labels[..., :1, :]).all()) or not sums_to_one(product.args[_PRODUCTS[op_name(product)]]):
        return _Fate(entries)
    mixed = labels[..., :1, :].expand(product.meta["val"].shape)
    outputs = list(_readers(product, mixed, found))
    if len(outputs) != 1 or outputs[0] is None:
        return _Fate(entries)
    output, read = outputs[0]
    rows = read.reshape(-1, read.shape[-1])
    usable = output.bias is not None and read_once(output, found.program)
    if not usable or not bool((rows == rows[:1]).all()) or bool((rows[0] < 0).any()):
        return _Fate(entries)
    return _Fate(entries, output=output, read=rows[0])


def _readers(node: fx.Node, labels: Tensor, found: Interpretation) -> Iterator[tuple[Reading, Tensor] | None]:
    """The linear readers of a value with labels, behind ops that only move entries; None for any other consumer."""
    for user in node.users:
        reading = found.readings.get(user)
        if reading is not None and reading.input is node:
            yield reading, labels
        elif only_moves(user, node, found):
            for after, part in move(user, node, labels, found):
                yield from _readers(after, part, found)
        else:
            yield None
