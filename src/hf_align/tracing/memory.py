"""Writes to memory, written down as new values of everything that shows it.

A view is taken from another value, and that perhaps from a third, down to the value that owns the memory. What is
written to a view is a new value, which is put back into the place that it was taken from, level by level; every other
view of the memory is then taken from the new values. torch's own functionalization works in this way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from hf_align.tracing.ops import Trait, does

_aten = torch.ops.aten
_SCATTERS = {
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
    _aten.diagonal.default: _aten.diagonal_scatter.default,
    _aten.narrow.default: _aten.slice_scatter.default,
}
"""For ops that show a part of a value, those that put a new one in its place."""
_KEEPS_ORDER = Trait.RESHAPES | Trait.ADDS_UNIT_AXES
_TAKEN = "taken"
"""The key under which a node keeps what it is a view of."""

Write = Callable[[Any, Any, Any], fx.Node]
"""A new node, from an op and its arguments."""


@dataclass(frozen=True)
class View:
    """How a value is taken from another one, whose memory it shows.

    Attributes:
        by: a node with the op and its arguments, the first left aside.
    """

    by: fx.Node
    whole: fx.Node


def remember_view(node: fx.Node) -> None:
    """Note of a node whose value lies in the memory of its first argument that it is a view of it."""
    op: Any = node.target
    if not op._schema.is_mutable and op._schema.returns[0].alias_info is not None and isinstance(node.args[0], fx.Node):
        node.meta[_TAKEN] = View(node, node.args[0])


def owner(value: fx.Node) -> fx.Node:
    """What a view is taken from in the end."""
    return _levels(value)[-1]


def can_be_put_back(value: fx.Node) -> bool:
    """Whether a new value of a view can be put into what it was taken from, at every level."""
    views = (v.meta[_TAKEN].by for v in _levels(value)[:-1])
    return all(by.target in _SCATTERS or does(by, Trait.SAME | Trait.REORDERS_AXES | _KEEPS_ORDER) for by in views)


def written_anew(value: fx.Node, new: fx.Node, others: Iterable[fx.Node], write: Write) -> dict[fx.Node, fx.Node]:
    """The new values of a view, of all that it is taken from, and of other views of this memory, by the old ones."""
    found = {value: new}
    levels = _levels(value)
    for view, whole in itertools.pairwise(levels):
        found[whole] = _put_back(view.meta[_TAKEN].by, whole, found[view], write)
    for view, whole in itertools.pairwise(levels):
        found[view].meta[_TAKEN] = replace(view.meta[_TAKEN], whole=found[whole])
    for other in others:
        for view, whole in reversed([*itertools.pairwise(_levels(other))]):
            if view not in found:
                by = view.meta[_TAKEN].by
                found[view] = _like(view, write(by.target, (found[whole], *by.args[1:]), by.kwargs))
                found[view].meta[_TAKEN] = View(by, found[whole])
    return found


def _levels(value: fx.Node) -> list[fx.Node]:
    """A value, what it is a view of, and so on."""
    found = [value]
    while _TAKEN in found[-1].meta:
        found.append(found[-1].meta[_TAKEN].whole)
    return found


def _put_back(by: fx.Node, whole: fx.Node, new: fx.Node, write: Write) -> fx.Node:
    """The value that a view was taken from, with a new one in its place."""
    if by.target in _SCATTERS:
        return _like(whole, write(_SCATTERS[by.target], (whole, new, *_place(by, whole)), by.kwargs))
    if does(by, Trait.SAME):
        return _like(whole, write(_aten.alias.default, (new,), {}))
    if does(by, _KEEPS_ORDER):
        return _like(whole, write(_aten.reshape.default, (new, list(whole.meta["val"].shape)), {}))
    return _like(whole, write(_aten.permute.default, (new, _order_back(by, whole)), {}))


def _place(by: fx.Node, whole: fx.Node) -> tuple[Any, ...]:
    """Where in a value a part of it is."""
    if by.target is not _aten.narrow.default:
        return by.args[1:]
    operands: Any = by.args
    _, axis, start, length = operands
    start = start % whole.meta["val"].shape[axis] if start < 0 else start
    return axis, start, start + length


def _order_back(by: fx.Node, whole: fx.Node) -> list[int]:
    """The axes of a view, in the order that they have in the value that it was taken from."""
    op: Any = by.target
    numbered = torch.empty(tuple(range(whole.meta["val"].dim())), device="meta")  # each axis has its number for a size
    axes = op(numbered, *by.args[1:], **by.kwargs).shape
    return [axes.index(i) for i in range(len(axes))]


def _like(old: fx.Node, node: fx.Node) -> fx.Node:
    node.meta["val"] = old.meta["val"]
    return node


def with_reshapes(recorded: fx.GraphModule) -> fx.GraphModule:
    """Views as reshapes: what is contiguous where it comes from one op need not be where that is written out."""
    for node in recorded.graph.find_nodes(op="call_function", target=_aten.view.default):
        node.target = _aten.reshape.default
    recorded.recompile()
    return recorded


def beside_constants(recorded: fx.GraphModule, weights: Collection[str]) -> fx.GraphModule:
    """Weights that are on no device as views of one zero: an op that meets constants, too, wants all on one device."""
    for name, weight in [*recorded.named_parameters(), *recorded.named_buffers()]:
        if name in weights and weight.is_meta:
            path, _, last = name.rpartition(".")
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            is_parameter = isinstance(weight, nn.Parameter)
            setattr(recorded.get_submodule(path), last, nn.Parameter(zeros, False) if is_parameter else zeros)
    return recorded
