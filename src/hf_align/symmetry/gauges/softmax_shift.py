"""Where a constant added along the last axis is lost: softmax(x + c1) = softmax(x), through scales and masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.rules.patterns import gives_only_its_shape, is_softmax, scales
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program, upstream

MASKED = -1e3
"""A score from which on down an exponential is nothing beside the others of its row."""


def reaches_softmax(node: fx.Node, program: Program, axes: int = 1) -> bool:
    """Whether a constant along the last axis, or along so many of them, is lost in a softmax on every way."""
    users = [u for u in node.users if not gives_only_its_shape(node, u)]
    return bool(users) and all(_is_lost(user, node, program, axes) for user in users)


def _is_lost(user: fx.Node, node: fx.Node, program: Program, axes: int) -> bool:
    if does(user, Trait.SOFTMAX):
        return axes == 1 and is_softmax(user)
    result = user.meta.get("val")  # what the model returns has none
    if not isinstance(result, Tensor):
        return False
    if does(user, Trait.RESHAPES) and user.args[0] is node:
        after = _last_axes(math.prod(node.meta["val"].shape[-axes:]), result.shape)
        return after is not None and reaches_softmax(user, program, after)
    if result.shape[-axes:] != node.meta["val"].shape[-axes:]:
        return False
    if does(user, Trait.MULTIPLIES | Trait.DIVIDES):
        stays = axes == 1 and (scales(user, node) or _is_hidden_later(user, node, program))
    elif does(user, Trait.SELECTS | Trait.LARGER):
        stays = _is_hidden(user, node, program)
    else:
        stays = does(user, Trait.ADDS | Trait.SUBTRACTS) or (does(user, Trait.SAME) and user.args[0] is node)
    return stays and reaches_softmax(user, program, axes)


def _last_axes(entries: int, shape: torch.Size) -> int | None:
    """How many of the last axes have so many entries together."""
    return next((n for n in range(1, len(shape) + 1) if math.prod(shape[-n:]) == entries), None)


def _other(user: fx.Node, node: fx.Node) -> Any:
    return user.args[1] if user.args[0] is node else user.args[0]


def _is_hidden_later(user: fx.Node, node: fx.Node, program: Program) -> bool:
    """x·m with m of zeros and ones, where what is added next leaves nothing of the entries that are zero."""
    mask = program.constants.get(_other(user, node))
    if not does(user, Trait.MULTIPLIES) or not isinstance(mask, Tensor) or not bool(((mask == 0) | (mask == 1)).all()):
        return False
    added = [program.constants.get(_other(u, user)) for u in user.users if does(u, Trait.ADDS)]
    return len(added) == len(user.users) and all(
        isinstance(a, Tensor) and bool(((mask == 1) | (a <= MASKED)).all()) for a in added
    )


def _is_hidden(user: fx.Node, node: fx.Node, program: Program) -> bool:
    """Some entries replaced by a score of which nothing stays, and which ones no weight decides."""
    operands = [a for a in user.args if a is not node]
    if does(user, Trait.SELECTS):
        condition = user.args[1 if does(user, Trait.FILLS) else 0]
        operands.remove(condition)
        if condition is node or _depends_on_weights(condition, program):
            return False
    values = [program.constants.get(a) if isinstance(a, fx.Node) else a for a in operands]
    return len(values) == 1 and values[0] is not None and bool((torch.as_tensor(values[0]) <= MASKED).all())


def _depends_on_weights(node: object, program: Program) -> bool:
    return isinstance(node, fx.Node) and not upstream([node], program).isdisjoint(program.parameters)
