"""Traits of ops: which of them only pass a value on, and what they leave of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.tracing.program import Program, op_name

# fmt: off
PASSES = frozenset((
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "movedim", "unsqueeze",
    "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem", "dropout", "to",
    "_to_copy", "contiguous", "clone", "alias", "detach", "type_as", "narrow", "index", "index_select",
    "repeat_interleave", "repeat",
))
SUMS_OF_PLACES = frozenset((
    "mean", "sum", "cumsum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d",
))
"""Where an axis survives them, these only add up entries that lie at other places beside it."""
# fmt: on


def keeps_last(node: fx.Node) -> bool:
    """Whether an op leaves the last axis of its operand where it is, and as it is."""
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if not (isinstance(after, Tensor) and isinstance(before, Tensor) and before.shape[-1:] == after.shape[-1:]):
        return False
    if op_name(node) in ("index", "index_select"):
        at: Any = node.args[1]
        return bool(len(at) < before.dim() if isinstance(at, (list, tuple)) else at % before.dim() < before.dim() - 1)
    if op_name(node) == "permute":
        return node.args[1][-1] in (-1, before.dim() - 1)  # type: ignore[index, operator]
    if op_name(node) in ("transpose", "t", "select", "squeeze", "unsqueeze", "mean", "movedim"):
        dims = [d for a in node.args[1:3] for d in (a if isinstance(a, (list, tuple)) else [a])]
        moved = {
            int(d) % max(before.dim(), after.dim()) for d in dims if isinstance(d, int) and not isinstance(d, bool)
        }
        return bool(moved) and before.dim() - 1 not in moved
    return True


def multiplies_by_one(node: fx.Node, value: fx.Node, program: Program) -> bool:
    """Whether an op multiplies a value by one, or by a mask that hides nothing, and leaves its shape."""
    if op_name(node) != "mul" or node.kwargs or node.meta["val"].shape != value.meta["val"].shape:
        return False
    factors = [program.constants.get(a) if isinstance(a, fx.Node) else a for a in node.args if a is not value]
    return len(factors) == 1 and factors[0] is not None and bool((torch.as_tensor(factors[0]) == 1).all())


def pads_nothing(node: fx.Node) -> bool:
    """Whether an op would pad a value, but it is large enough as it is."""
    return op_name(node) == "pad" and not any(node.args[1])  # type: ignore[arg-type]


def gives_only_its_shape(node: fx.Node, user: fx.Node) -> bool:
    """Whether an op looks at a value only for the shape or the type that its result shall have."""
    return op_name(user) in ("expand_as", "view_as", "reshape_as", "type_as") and user.args[0] is not node


def used_only_by(names: Iterable[str | None], nodes: Collection[fx.Node], program: Program) -> bool:
    """Whether nothing but some nodes uses weights, however these are laid out first."""
    chosen = set(names)
    return all(user in nodes for p, name in program.parameters.items() if name in chosen for user in _users(p))


def _users(weight: fx.Node) -> Iterator[fx.Node]:
    for user in weight.users:
        expanded = op_name(user) == "expand_as" and user.args[0] is weight
        if expanded or (op_name(user) in PASSES | _FLIPS and user.all_input_nodes == [weight]):
            yield from _users(user)
        else:
            yield user


def sums_to_one(node: object) -> bool:
    """Whether a value comes out of a softmax over its last axis."""
    while isinstance(node, fx.Node) and op_name(node) in ("dropout", "to", "_to_copy", "contiguous", "expand", "clone",
                                                          "view", "_unsafe_view", "reshape", "type_as"):  # fmt: skip
        before = node.all_input_nodes[0]
        if before.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            return False
        node = before
    return isinstance(node, fx.Node) and op_name(node) == "softmax" and node.args[1] in (-1, node.meta["val"].dim() - 1)


def stored_matrix(node: fx.Node, program: Program) -> tuple[fx.Node, bool] | None:
    """The weight matrix that a value is, and whether it is transposed; None if it is anything else."""
    flipped = False
    while op_name(node) in _FLIPS | {"to", "_to_copy", "alias", "detach"}:
        flipped ^= op_name(node) in _FLIPS
        node = node.all_input_nodes[0]
    return (node, flipped) if node in program.parameters and node.meta["val"].dim() == 2 else None


_FLIPS = frozenset(("t", "numpy_T", "transpose", "permute"))


def is_centred(node: fx.Node) -> bool:
    """Whether a value has mean zero along its last axis: x - mean x, times factors that do not vary along it."""
    while op_name(node) in ("to", "_to_copy", "contiguous", "mul", "div"):
        inputs = [a for a in node.all_input_nodes if a.meta["val"].dim() and a.meta["val"].shape[-1] > 1]
        if len(inputs) != 1 or "rounding_mode" in node.kwargs or not node.meta["val"].is_floating_point():
            return False
        node = inputs[0]
    return subtracts_mean(node)


def subtracts_mean(node: fx.Node) -> bool:
    """x - mean x over the last axis, and no multiple of the mean."""
    if op_name(node) != "sub" or len(node.all_input_nodes) != 2 or node.kwargs or len(node.args) > 2:
        return False
    value, mean = node.args[0], node.args[1]
    if not isinstance(mean, fx.Node) or op_name(mean) != "mean" or not _same_value(mean.args[0], value):
        return False
    last = mean.all_input_nodes[0].meta["val"].dim() - 1
    return mean.args[1] in (-1, [-1], last, [last]) and mean.meta["val"].dim() == last + 1


def _same_value(a: object, b: object) -> bool:
    """The same node, but for casts."""
    while isinstance(a, fx.Node) and op_name(a) in ("to", "_to_copy"):
        a = a.args[0]
    while isinstance(b, fx.Node) and op_name(b) in ("to", "_to_copy"):
        b = b.args[0]
    return a is b


def is_sum(node: fx.Node) -> bool:
    """Whether an op adds two values."""
    return op_name(node) == "add" and len(node.all_input_nodes) == len(node.args) == 2 and not node.kwargs
