"""Degrees: if some weights are multiplied by powers of one number, what becomes of every value behind them?

The powers are followed entry by entry through all that is linear, bilinear, a power or a length, or only moves entries.
So whoever supposes that a factor may go from some weights into others, or that nothing sees it, learns here whether the
outputs stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.index_provenance import moved, only_moves
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.links import exponent_of, exponent_of_any
from hf_align.symmetry.rules.patterns import gives_only_its_shape
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.execute import call_wide
from hf_align.tracing.ops import Trait, does, factors_of

_LARGEST = 2**16
"""Of powers that are drawn."""
_SHIFT = 2**30
"""What is added to a power to label an entry: labels below zero are nobody's."""

Powers = dict[fx.Node, Tensor]
"""By value, whole numbers in its shape; all zero where there are none."""


def drawn_powers(count: int) -> Tensor:
    """Powers for so many factors, so that none are the same by chance: they satisfy no equation but those that all
    powers do."""
    return torch.randint(1, _LARGEST, (count,), generator=torch.Generator().manual_seed(0))


def cancels(starts: Mapping[fx.Node, Tensor], found: Interpretation, any_sign: bool = False) -> bool:
    """Whether no output changes if the entries of some values are multiplied by powers of any positive number.

    Args:
        any_sign: or of a negative one: it goes through a length or a root only if its power there is even.
    """
    powers = dict(starts)
    for node in found.program.graph.nodes:
        if node in starts or node.op == "output" or not any(a in powers for a in node.all_input_nodes):
            continue
        after = _powers(node, powers, found)
        if after is None or (any_sign and _loses_sign(node) and not _are_even(node, {**powers, **after})):
            return False
        powers.update((n, p) for n, p in after.items() if bool(p.any()))
    return powers.keys().isdisjoint(found.program.interface)


def _powers(node: fx.Node, powers: Powers, found: Interpretation) -> Powers | None:
    """Those of what an op makes of its operands; none if a factor does not stay one."""
    value = node.meta.get("val")
    carried = [a for a in node.all_input_nodes if a in powers and not gives_only_its_shape(a, node)]
    if not carried:
        return {}
    if isinstance(value, Tensor) and not value.is_floating_point():
        return None

    def of(operand: object) -> Tensor:
        if isinstance(operand, fx.Node):
            return powers.get(operand, torch.zeros(_shape(operand), dtype=torch.long))
        return torch.zeros((), dtype=torch.long)

    if does(node, Trait.SETS_LENGTHS):
        return _made_as_long(node, *map(of, node.args[:2]))
    if only_moves(node, carried, found):
        labels = {a: powers[a] + _SHIFT for a in carried}
        return {n: torch.where(p < 0, 0, p - _SHIFT) for n, p in moved(node, labels, found)}
    if does(node, Trait.LINEAR) and node.args == (carried[0],) and not node.kwargs:
        return {node: of(carried[0])} if _shape(carried[0]) == _shape(node) else None
    if (exponent := exponent_of(node)) is not None:
        after = of(carried[0]) * exponent.numerator
        return {node: after // exponent.denominator} if not bool((after % exponent.denominator).any()) else None
    if does(node, Trait.AVERAGES | Trait.TOTALS | Trait.MEASURES) and carried == [node.args[0]]:
        return _reduced(node, of(carried[0]))
    if does(node, Trait.CENTRES) and node.args[0] not in powers:
        gain, bias = (*node.args[2:4], None, None)[:2]
        return _alike(node, of(gain), of(gain if bias is None else bias))
    if does(node, Trait.ADDS | Trait.SUBTRACTS) and len(node.args) == 2:
        return _alike(node, *map(of, node.args))
    if does(node, Trait.FILLS) and node.args[1] not in powers and node.args[2:] in ((0,), (0.0,)):
        return {node: of(node.args[0]).expand(_shape(node))}
    if does(node, Trait.SELECTS) and not does(node, Trait.FILLS) and node.args[0] not in powers:
        return _alike(node, *map(of, node.args[1:]))
    if does(node, Trait.MULTIPLIES) and len(node.args) == 2 and not node.kwargs:
        return {node: (of(node.args[0]) + of(node.args[1])).expand(_shape(node))}
    if does(node, Trait.DIVIDES) and len(node.args) == 2 and not node.kwargs:
        return {node: (of(node.args[0]) - of(node.args[1])).expand(_shape(node))}
    return _contracted(node, of)


def _loses_sign(node: fx.Node) -> bool:
    """Whether an op makes the same of factors of either sign."""
    return does(node, Trait.MEASURES | Trait.SETS_LENGTHS) or (
        exponent_of(node) is not None and exponent_of_any(node) is None
    )


def _are_even(node: fx.Node, powers: Powers) -> bool:
    """Whether an op's operands and what it makes of them have even powers, if they have any."""
    return not any(bool((powers[n] % 2).any()) for n in (node, *node.all_input_nodes) if n in powers)


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _alike(node: fx.Node, first: Tensor, second: Tensor) -> Powers | None:
    """Of a sum, of what is chosen from two values, or of a gain and a bias: both have one factor."""
    first, second = torch.broadcast_tensors(first, second)
    return {node: first.expand(_shape(node))} if torch.equal(first, second) else None


def _made_as_long(node: fx.Node, direction: Tensor, length: Tensor) -> Powers | None:
    """Of what is made as long as another value says: its own factors are lost where all of a slice has one."""
    own = sliced_along(node)
    axes = [i for i in range(direction.dim()) if i != own]
    same = torch.equal(direction.amin(axes, keepdim=True), direction.amax(axes, keepdim=True))
    return {node: length.expand(_shape(node))} if same else None


def sliced_along(node: fx.Node) -> int | None:
    """The axis along which each slice is made as long as something says; None if that is all at once."""
    dim: int = Arguments(node).ask("dim", 0)
    return None if dim == -1 else dim % len(_shape(node))


def _reduced(node: fx.Node, powers: Tensor) -> Powers | None:
    """Of a sum, a mean or a length over some axes, all of one factor along these."""
    arguments = Arguments(node)
    axes, keeps = arguments.ask("dim", ()), bool(arguments.ask("keepdim", False))
    counts = 0 in (arguments.ask("ord", None), arguments.ask("p", None))
    if axes == () or counts:  # windows have no such argument
        return None
    every = list(range(powers.dim())) if axes in (None, []) else [axes] if isinstance(axes, int) else list(axes)
    least, most = powers.amin(every, keepdim=keeps), powers.amax(every, keepdim=keeps)
    return {node: least} if torch.equal(least, most) and least.shape == _shape(node) else None


def _contracted(node: fx.Node, of: Callable[[object], Tensor]) -> Powers | None:
    """Of a product of matrices: all terms of a sum have one factor if the mean of their powers is that of the squares,
    squared."""
    factors = factors_of(node)
    if factors is None or not does(node, Trait.CONTRACTS | Trait.AFFINE | Trait.CONVOLVES):
        return None
    x, w, b = factors
    left, right = (of(node.args[i]).double() for i in (x, w))
    added = of(node.args[b]).double() if b is not None and len(node.args) > b and node.args[b] is not None else None

    def product(left: Tensor, right: Tensor, added: Tensor | None) -> Tensor:
        args = list(node.args)
        args[x], args[w] = left, right
        if b is not None and len(args) > b:
            args[b] = added
        result: Tensor = call_wide(node, args, node.kwargs)
        return result

    none = None if added is None else torch.zeros_like(added)
    one, other = torch.ones_like(left), torch.ones_like(right)
    terms = product(one, other, none).clamp_min(1)
    mean = (product(left, other, none) + product(one, right, none)) / terms
    squares = product(left.square(), other, none) + 2 * product(left, right, none) + product(one, right.square(), none)
    if not torch.allclose(squares / terms, mean.square()):
        return None
    if added is not None and not torch.allclose(product(0 * one, 0 * other, added), mean):
        return None
    return {node: mean.round().long()}
