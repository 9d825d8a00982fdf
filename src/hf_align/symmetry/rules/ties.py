"""Whether entries of a value may tie: of those the first is the largest, so that a choice among them shows their order.

No list of ops is asked. What the ops since the last product of matrices make of random numbers of several sizes is
looked at: behind a limit, a rounding or a comparison, some are equal. A product that only hands the axis on hands on
what is equal along it, too, such as copies; there the ops before it are looked at with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Generator, Tensor, fx

from hf_align.symmetry.interpreter.bounds import FIXED
from hf_align.symmetry.interpreter.call import Call
from hf_align.symmetry.interpreter.spaces import Axis, Space
from hf_align.symmetry.interpreter.values import Interpretation, values_of
from hf_align.symmetry.rules.trials import drawn_all, is_stored, run, since_products
from hf_align.symmetry.rules.vanishing import vanishing
from hf_align.tracing.execute import run_node
from hf_align.tracing.ops import Trait, does

_SIZES = (0.01, 1.0, 30.0, 1000.0, 10_000.0)
"""Of the numbers: limits lie within them, unless they only keep numbers from overflowing."""
_DRAWS = 2
_HIDDEN = 1e30
"""As large are numbers in the place of what is not to be chosen: which of these is the first is nobody's concern."""


def keep_order_of_ties(call: Call, axis: Axis, dim: int) -> None:
    """Pin an axis of what an op chooses from if entries along it may tie."""
    moving = {atom.space for atom in axis.atoms if not atom.space.bound.fixed}
    if moving and may_tie(call.argument(0), dim, moving, call.found):
        call.lower(axis, FIXED, "ties")


def may_tie(value: fx.Node, dim: int, spaces: set[Space], found: Interpretation) -> bool:
    """Whether entries along an axis of these spaces may be equal for some text; so, too, where it cannot be tried."""
    program = found.program
    ops, sources = since_products(value, program, lambda product: _hands_on(product, spaces, found))
    try:
        drawn = _numbers(sources, found)
        return any(_has_ties(run(ops, numbers, program, _unlimited)[value], dim) for numbers in drawn)
    except Exception:  # whatever an op finds wrong with random numbers
        return True


def _numbers(sources: Collection[fx.Node], found: Interpretation) -> Iterator[dict[fx.Node, Tensor]]:
    """What a value may begin with: random numbers of several sizes, those of a text of one word, and zeros where
    products vanish."""
    program, rng = found.program, Generator().manual_seed(0)
    for size in _SIZES * _DRAWS:
        yield drawn_all(sources, program, size, rng)
    plain = drawn_all(sources, program, 1.0, rng)
    stored = {atom.space for weight in found.weights.values() for axis in weight.axes for atom in axis.atoms}
    yield {node: _in_one_word(node, numbers, stored, found) for node, numbers in plain.items()}
    zeros = {node: value for node in plain if (value := vanishing(node, found)) is not None}
    if zeros:
        yield plain | zeros


def _hands_on(product: fx.Node, spaces: set[Space], found: Interpretation) -> bool:
    """Whether spaces lie along what a product is given, and along none of its weights: it has not made them."""

    def lies_along(operand: fx.Node) -> bool:
        axes = [axis for value in values_of(found.values.get(operand)) for axis in value.axes]
        return any(atom.space in spaces for axis in axes for atom in axis.atoms)

    given = [operand for operand in product.all_input_nodes if lies_along(operand)]
    return bool(given) and not any(is_stored(operand, found.program) for operand in given)


def _in_one_word(source: fx.Node, drawn: Tensor, stored: Collection[Space], found: Interpretation) -> Tensor:
    """The same vectors in all places, as in a text of one word: what is zero in one is then zero in the mean of all.
    Places lie along what no weight has."""
    for value in values_of(found.values.get(source)):
        kept = [any(atom.space in stored for atom in axis.atoms) for axis in value.axes]
        if any(kept) and len(kept) == drawn.dim():
            return drawn[tuple(slice(None if has else 1) for has in kept)].expand(drawn.shape)
    return drawn


def _unlimited(node: fx.Node, lookup: Callable[[fx.Node], Any]) -> Any:
    """An op that keeps the order of what it is given, even where it comes so near a limit that rounding hides it."""
    if does(node, Trait.SATURATES):
        x = lookup(node.all_input_nodes[0])
        is_zero_at_zero = not bool(run_node(node, lambda _: x.new_zeros(())))
        return x if is_zero_at_zero else x + (x.square() + 1).sqrt()
    if does(node, Trait.SOFTMAX):
        return lookup(node.all_input_nodes[0]).log_softmax(node.args[1])
    if does(node, Trait.FILLS) and not _is_compared(node.args[1]):
        value, mask, _ = node.args
        return lookup(value).masked_fill(lookup(mask), -torch.inf)  # type: ignore[arg-type]
    return run_node(node, lookup)


def _is_compared(mask: object) -> bool:
    """Whether a mask says which entries are larger or smaller than something; others are taken for what hides entries
    that are not to be chosen, as those of groups that were not."""
    if not isinstance(mask, fx.Node) or does(mask, Trait.COMPARES):
        return isinstance(mask, fx.Node)
    before = mask.all_input_nodes
    is_logic = len(before) == 1 or all(node.meta["val"].dtype == torch.bool for node in before)
    return is_logic and any(map(_is_compared, before))


def _has_ties(value: Tensor, axis: int) -> bool:
    ordered = value.double().sort(axis).values
    first, second = (ordered.narrow(axis, start, ordered.shape[axis] - 1) for start in (0, 1))
    return bool(((first == second) & (first.abs() < _HIDDEN)).any() | ordered.isnan().all())
