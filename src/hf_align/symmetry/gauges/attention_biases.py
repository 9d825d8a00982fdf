"""Key and value biases: constants that attention does not see, or only passes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Constant, DropKeyBias, Gauge, MoveValueBias, Runs
from hf_align.symmetry.gauges.labels import Use, follow, numbered, present, runs
from hf_align.symmetry.interpreter import Interpretation, Reading
from hf_align.symmetry.passing import summands, sums_to_one, used_only_by
from hf_align.symmetry.softmax_shift import reaches_softmax
from hf_align.tracing.trace import op_name

_PRODUCTS = {"matmul": 0, "bmm": 0, "baddbmm": 1}
"""Where the left factor stands among the operands."""


Named = tuple[str, int, str]
"""The weight of an output projection, the axis that it reads along, and the bias added to what it writes."""


@dataclass(frozen=True)
class _Fate:
    """What becomes of some entries of a bias: lost as keys, read by an output projection as values, or seen.

    Attributes:
        read: for values, the entry behind each input of the projection, as runs.
        readers: the nodes of the projection, each with the one that adds the bias.
    """

    labels: Tensor
    is_key: bool = False
    output: Named | None = None
    read: Runs = ()
    readers: frozenset[tuple[fx.Node, fx.Node]] = frozenset()

    @property
    def kind(self) -> Hashable:
        """What two calls must agree on."""
        return self.is_key, self.output, self.read, None if self.is_key else runs(self.labels)


def attention_biases(found: Interpretation, kept: Collection[Constant]) -> Iterator[Gauge]:
    """The gauges of key and value biases: those that hold wherever the weight and the bias are used.

    Args:
        kept: the constants that readers without bias keep of their norm's.
    """
    groups: dict[tuple[str, Constant], list[Reading]] = defaultdict(list)
    for reading in found.readings.values():
        constant = Constant(reading.bias) if reading.bias is not None else Constant(reading.weight, reading.in_axis)
        if reading.bias is not None or constant in kept:
            groups[reading.weight, constant].append(reading)
    for (weight, constant), readings in groups.items():
        starts = {r.node: numbered(r) for r in readings}
        if used_only_by((weight, constant.parameter), starts, found.program):
            fates = [_fate(use, found) for use in follow(starts, found)]
            yield from _gauges(constant, readings[0].node.meta["val"].shape[readings[0].out_axis], fates, found)


def _gauges(constant: Constant, size: int, fates: list[_Fate], found: Interpretation) -> Iterator[Gauge]:
    """Gauges for the entries whose fates are all of one kind."""
    keys = torch.zeros(size, dtype=torch.bool)
    for kind in dict.fromkeys(f.kind for f in fates):
        alike = [f for f in fates if f.kind == kind]
        met, others = (_met((f for f in fates if (f.kind == kind) is same), size) for same in (True, False))
        output, readers = alike[0].output, frozenset[tuple[fx.Node, fx.Node]]().union(*(f.readers for f in alike))
        if alike[0].is_key:
            keys |= met & ~others
        elif output is not None and not bool((met & others).any()):
            weight, axis, bias = output
            nodes = [frozenset(side) for side in zip(*readers, strict=True)]
            each_once = all(len(side) == len(readers) for side in nodes)
            if each_once and all(
                used_only_by((n,), at, found.program) for n, at in zip((weight, bias), nodes, strict=True)
            ):
                yield MoveValueBias(constant, runs(met.nonzero()[:, 0]), alike[0].read, weight, axis, bias)
    if keys.any():
        yield DropKeyBias(constant, runs(keys.nonzero()[:, 0]))


def _met(fates: Iterable[_Fate], size: int) -> Tensor:
    """Which entries any of these fates is of, [size] bool."""
    met = torch.zeros(size, dtype=torch.bool)
    for fate in fates:
        met[fate.labels] = True
    return met


def _fate(use: Use, found: Interpretation) -> _Fate:
    """What becomes of a constant added to a value, where it is used."""
    if _is_right_factor(use.value, use.user):
        return _key_or_value(use.user, use.labels, found)
    return _Fate(present(use.labels))


def _is_right_factor(node: fx.Node, user: fx.Node) -> bool:
    """Whether an op multiplies another value by this one, and does nothing else with it."""
    at = _PRODUCTS.get(op_name(user))
    return at is not None and [i for i, a in enumerate(user.args) if a is node] == [at + 1]


def _key_or_value(product: fx.Node, labels: Tensor, found: Interpretation) -> _Fate:
    """A key if the same for every position (the last axis), a value if the same for every row that is summed."""
    entries = present(labels)
    if bool((labels == labels[..., :1]).all()) and reaches_softmax(product, found.program):
        return _Fate(entries, is_key=True)
    if (
        product.kwargs
        or not bool((labels == labels[..., :1, :]).all())
        or not sums_to_one(product.args[_PRODUCTS[op_name(product)]])
    ):
        return _Fate(entries)
    mixed = labels[..., :1, :].expand(product.meta["val"].shape)
    uses = list(follow({product: mixed}, found))
    readings = [r for use in uses if (r := found.readings.get(use.user)) is not None and r.input is use.value
                and r.out_axis == -1]  # fmt: skip
    added = [_added_bias(r, found) for r in readings]
    named = {(r.weight, r.in_axis, a.bias if a else None) for r, a in zip(readings, added, strict=True)}
    rows = torch.cat([use.labels.reshape(-1, use.labels.shape[-1]) for use in uses]) if len(named) == 1 else None
    if rows is None or len(readings) < len(uses) or not bool((rows == rows[:1]).all()) or bool((rows[0] < 0).any()):
        return _Fate(entries)
    weight, axis, bias = named.pop()
    if bias is None:
        return _Fate(entries)
    pairs = frozenset((r.node, a.node) for r, a in zip(readings, added, strict=True) if a is not None)
    return _Fate(entries, output=(weight, axis, bias), read=runs(rows[0]), readers=pairs)


def _added_bias(reading: Reading, found: Interpretation) -> Reading | None:
    """The linear map whose bias is added to what another writes: itself, or the first that meets it in a sum."""
    size = reading.node.meta["val"].shape[-1]
    maps = [reading, *(found.readings.get(part) for part in summands(reading.node))]
    biased = [m for m in maps if m is not None and m.bias is not None and m.out_axis == -1]
    return next((m for m in biased if m.node.meta["val"].shape[-1] == size), None)
