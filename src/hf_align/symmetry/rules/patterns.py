"""Patterns of a few ops: what they leave of a value, and what they compute together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.tracing.arguments import Arguments
from hf_align.tracing.nested import leaves
from hf_align.tracing.ops import Trait, does, op_name
from hf_align.tracing.program import Program, upstream


def keeps_last(node: fx.Node) -> bool:
    """Whether an op leaves the last axis of its operand where it is, and as it is."""
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if not (isinstance(after, Tensor) and isinstance(before, Tensor) and before.shape[-1:] == after.shape[-1:]):
        return False
    if op_name(node) == "repeat_interleave" and isinstance(node.args[1], fx.Node):
        return False  # as many times as a table says, some of them none
    if op_name(node) in ("index", "index_select"):
        at: Any = node.args[1]
        return bool(len(at) < before.dim() if isinstance(at, (list, tuple)) else at % before.dim() < before.dim() - 1)
    if does(node, Trait.PADS):
        return not any(node.args[1][:2])  # type: ignore[index, arg-type]
    if op_name(node) == "permute":
        return node.args[1][-1] in (-1, before.dim() - 1)  # type: ignore[index, operator]
    if does(node, Trait.REORDERS_AXES | Trait.ADDS_UNIT_AXES) or op_name(node) in ("select", "mean", "sum"):
        dims = [d for a in node.args[1:3] for d in (a if isinstance(a, (list, tuple)) else [a])]
        moved = {
            int(d) % max(before.dim(), after.dim()) for d in dims if isinstance(d, int) and not isinstance(d, bool)
        }
        return bool(moved) and before.dim() - 1 not in moved
    return True


def multiplies_by_one(node: fx.Node, value: fx.Node, program: Program) -> bool:
    """Whether an op multiplies a value by one, or by a mask that hides nothing that is seen, and leaves its shape."""
    if program.idle.get(node) is value:
        return True
    if not does(node, Trait.MULTIPLIES) or node.kwargs or node.meta["val"].shape != value.meta["val"].shape:
        return False
    factors = [a for a in node.args if a is not value]
    return len(factors) == 1 and program.is_always(factors[0], 1)


def gives_only_its_shape(node: fx.Node, user: fx.Node) -> bool:
    """Whether an op looks at a value only for the shape or the type that its result shall have."""
    return does(user, Trait.LIKE) and user.args[0] is not node


def used_only_by(names: Iterable[str | None], nodes: Collection[fx.Node], program: Program) -> bool:
    """Whether nothing but some nodes uses weights, each in one place, however these are laid out first."""
    chosen = set(names)
    uses = [(name, *use) for p, name in program.parameters.items() if name in chosen for use in _uses(p)]
    if len({(name, user) for name, user, _ in uses}) < len(uses):
        return False  # an op takes two views of one weight
    return all(user in nodes and leaves((user.args, user.kwargs)).count(value) == 1 for _, user, value in uses)


def _uses(weight: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who uses a weight, and as which value."""
    for user in weight.users:
        alone = does(user, Trait.MOVES | Trait.REORDERS_AXES) and user.all_input_nodes == [weight]
        if alone or is_expanded_as(user, weight):
            yield from _uses(user)
        else:
            yield user, weight


def is_expanded_as(user: fx.Node, node: fx.Node) -> bool:
    """Whether an op copies a value along new axes, those of its second operand."""
    return does(user, Trait.COPIES) and does(user, Trait.LIKE) and user.args[0] is node


def sums_to_one(node: object, program: Program) -> bool:
    """Whether a value comes out of a softmax over its last axis, each row of which holds something for any text: fused
    attention makes zeros of a row in which all is hidden; others make no numbers of it."""
    while isinstance(node, fx.Node) and does(node, Trait.SAME | Trait.RESHAPES | Trait.COPIES):
        before = node.all_input_nodes[0]
        if before.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            return False
        node = before
    if not isinstance(node, fx.Node) or not is_softmax(node):
        return False
    return not does(node, Trait.ZERO_WHERE_HIDDEN) or not _may_hide_a_row(node.all_input_nodes[0], program)


def _may_hide_a_row(scores: fx.Node, program: Program) -> bool:
    """Whether the mask of fused attention, filled in or added, hides a row, or may do so for another text; so, too,
    where something else goes into the softmax."""
    fills = does(scores, Trait.FILLS)
    if not (fills or is_sum(scores)):
        return True
    mask = scores.args[1]
    if not isinstance(mask, fx.Node) or mask in program.constants:
        return _is_whole_row(program.constants.get(mask), fills)  # type: ignore[arg-type]
    return fills or not _is_finite(mask, program)


def _is_finite(value: object, program: Program) -> bool:
    """Whether a value is chosen among finite numbers, or made of weights alone."""
    number = program.constants.get(value) if isinstance(value, fx.Node) else value
    if not isinstance(value, fx.Node) or number is not None:
        return number is None or bool(torch.as_tensor(number).isfinite().all())
    if not value.meta["val"].is_floating_point() or upstream([value], program).isdisjoint(program.inputs):
        return True
    chosen = does(value, Trait.SELECTS | Trait.SAME | Trait.RESHAPES | Trait.COPIES | Trait.ADDS_UNIT_AXES)
    numbers = [a for a in value.args if isinstance(a, (float, fx.Node))]
    return chosen and all(_is_finite(a, program) for a in numbers)


def _is_whole_row(mask: object, fills: bool) -> bool:
    """Whether a row of a mask is true where it says what is filled, or -inf where it is added."""
    if not isinstance(mask, Tensor) or mask.dim() == 0:
        return False
    hidden = mask if mask.dtype == torch.bool and fills else mask == -math.inf
    return bool(hidden.all(-1).any())


def is_softmax(node: fx.Node, axis: int = -1) -> bool:
    """Whether an op is a softmax over an axis, counted from behind."""
    dim: Any = node.args[1] if does(node, Trait.SOFTMAX) else None
    return dim is not None and axis in (dim, dim - node.meta["val"].dim())


def centres(user: fx.Node, node: fx.Node, axis: int = -1) -> bool:
    """Whether a norm or a softmax subtracts the mean of a value along an axis, counted from behind."""
    if does(user, Trait.CENTRES):
        return user.args[0] is node and axis == -1 and len(user.args[1]) == 1  # type: ignore[arg-type]
    return is_softmax(user, axis)


def scales(user: fx.Node, node: fx.Node, axis: int = -1) -> bool:
    """Whether an op multiplies or divides a value by one that does not vary along an axis, counted from behind; a fill
    with zeros multiplies by zeros and ones."""
    if does(user, Trait.FILLS):
        value, other, filled = user.args
        return value is node and filled in (0, 0.0) and _is_alike_along(axis, other)
    if not does(user, Trait.MULTIPLIES | Trait.DIVIDES) or user.args[0] is user.args[1] or user.kwargs:  # or rounded
        return False
    (other,) = [a for a in user.args[:2] if a is not node]
    return not (does(user, Trait.DIVIDES) and other is user.args[0]) and _is_alike_along(axis, other)


def _is_alike_along(axis: int, value: object) -> bool:
    """Whether a number, or a value that is broadcast, does not vary along an axis, counted from behind."""
    shape = value.meta["val"].shape if isinstance(value, fx.Node) else ()
    return len(shape) < -axis or shape[axis] == 1


def stored_matrix(node: fx.Node, program: Program) -> tuple[fx.Node, bool] | None:
    """The weight matrix that a value is, and whether it is transposed; None if it is anything else."""
    flipped = False
    while does(node, Trait.REORDERS_AXES | Trait.SAME):
        flipped ^= does(node, Trait.REORDERS_AXES)
        node = node.all_input_nodes[0]
    return (node, flipped) if node in program.parameters and node.meta["val"].dim() == 2 else None


def is_centred(node: fx.Node) -> bool:
    """Whether a value has mean zero along its last axis: x - mean x, times factors that do not vary along it."""
    while does(node, Trait.SAME | Trait.MULTIPLIES | Trait.DIVIDES | Trait.FILLS):
        inputs = [a for a in node.all_input_nodes if does(node, Trait.SAME) or scales(node, a)]
        if len(inputs) != 1 or not node.meta["val"].is_floating_point():
            return False
        node = inputs[0]
    return subtracts_mean(node)


def subtracts_mean(node: fx.Node) -> bool:
    """x - mean x over the last axis, and no multiple of the mean."""
    if not does(node, Trait.SUBTRACTS) or len(node.all_input_nodes) != 2 or node.kwargs or len(node.args) > 2:
        return False
    value, mean = node.args[0], node.args[1]
    if not isinstance(mean, fx.Node) or op_name(mean) != "mean" or not _same_value(mean.args[0], value):
        return False
    last = mean.all_input_nodes[0].meta["val"].dim() - 1
    along = mean.args[1:2]  # nothing is said of an axis where the mean is over all
    return along in ((-1,), ([-1],), (last,), ([last],)) and mean.meta["val"].dim() == last + 1


def _same_value(a: object, b: object) -> bool:
    """The same node, but for casts."""
    return uncast(a) is uncast(b)


def uncast(value: object) -> object:
    """A value before it is given another dtype."""
    while isinstance(value, fx.Node) and does(value, Trait.SAME):
        value = value.args[0]
    return value


def is_sum(node: fx.Node) -> bool:
    """Whether an op adds two values."""
    return does(node, Trait.ADDS) and len(node.all_input_nodes) == len(node.args) == 2 and not node.kwargs


def pads(convolution: fx.Node) -> bool:
    """Whether a convolution also reads what is beside a value."""
    beside = Arguments(convolution).ask("padding", 0)
    if isinstance(beside, str):
        return beside != "valid"
    return any(beside) if isinstance(beside, (list, tuple)) else bool(beside)
