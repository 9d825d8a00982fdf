"""Means over the places that a mask shows, written out: Σ m x / Σ m, as of pooling that leaves padding out.

What x has added to it at all places, the mean has, too, and each of its vectors is a mean of those of x. Where no place
is shown, 0 / 0 is no number; but a divisor that is kept from being zero would be another one there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Generator, Tensor, fx

from hf_align.tracing.execute import call_wide
from hf_align.tracing.ops import NO_TRAITS, Trait, does

_LONGEST = 5
"""Ops of a masked mean, with casts between them."""


def is_in_masked_mean(user: fx.Node, node: fx.Node) -> bool:
    """Whether an op is part of a masked mean of what a value is part of: m x, the sum of it, or the quotient."""
    way = _masked_mean(user)
    return (node, user) in pairwise(way)


def _masked_mean(op: fx.Node) -> tuple[fx.Node, ...]:
    """A value and the ops that take a masked mean of it, the op among them; none if nothing does, or sees more."""
    quotient, steps = op, 1
    while not does(quotient, Trait.DIVIDES) and len(quotient.users) == 1 and steps < _LONGEST:
        (quotient,), steps = quotient.users, steps + 1
    if not does(quotient, Trait.DIVIDES):
        return ()
    ops = [quotient]
    while not does(ops[0], Trait.MULTIPLIES):
        before = ops[0].args[0] if does(ops[0], Trait.DIVIDES | Trait.SAME | Trait.TOTALS) else None
        shown = before.meta["val"] if isinstance(before, fx.Node) else None
        if not isinstance(before, fx.Node) or not isinstance(shown, Tensor) or not shown.is_floating_point():
            return ()
        ops.insert(0, before)
    product, totals = ops[0], [op for op in ops if does(op, Trait.TOTALS)]
    exact = not any(op.kwargs for op in (product, quotient, *totals))  # as of rounding
    if len(totals) != 1 or not exact or any(does(op, Trait.DIVIDES) for op in ops[:-1]):
        return ()
    for value, mask in (product.args[:2], product.args[1::-1]):
        if isinstance(value, fx.Node) and _counts(quotient.args[1], mask, totals[0]):
            return (value, *ops)
    return ()


def _counts(divisor: object, mask: object, total: fx.Node) -> bool:
    """Whether a value is the total of a mask: both are linear in what they come from, so that random numbers tell."""
    shown, counted = [*_back(mask, NO_TRAITS)], [*_back(divisor, Trait.TOTALS)]
    source = next((node for node in shown if node in counted), None)
    if source is None:
        return False
    numbers = torch.rand(source.meta["val"].shape, generator=Generator().manual_seed(0), dtype=torch.float64)
    factors = _forth(shown[: shown.index(source)], numbers).expand(total.args[0].meta["val"].shape)  # type: ignore[union-attr]
    sums, count = call_wide(total, (factors, *total.args[1:]), {}), _forth(counted[: counted.index(source)], numbers)
    alike = torch.broadcast_shapes(sums.shape, count.shape) == sums.shape
    return alike and torch.allclose(count.expand(sums.shape), sums)


def _back(node: object, more: Trait) -> Iterator[fx.Node]:
    """A value and those that it shows the entries of, the last one first; or totals, if these traits say so."""
    while isinstance(node, fx.Node):
        yield node
        before = node.all_input_nodes
        if not does(node, Trait.SAME | Trait.MOVES | more) or before != [node.args[0]]:
            return
        shown = before[0].meta["val"]
        if not isinstance(shown, Tensor):  # one of several results
            return
        if not torch.can_cast(shown.dtype, node.meta["val"].dtype):  # as of numbers to true and false
            return
        (node,) = before


def _forth(ops: list[fx.Node], value: Tensor) -> Tensor:
    """What such ops, the last one first, make of a value."""
    for op in reversed(ops):
        if not does(op, Trait.SAME):
            value = call_wide(op, (value, *op.args[1:]), op.kwargs)
    return value
