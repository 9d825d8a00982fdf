"""Whether entries of a value may tie: of those the first is the largest, so that a choice among them shows their order.

No list of ops is asked. What the ops since the last product of matrices make of random numbers of several sizes is
looked at: behind a limit, a rounding or a comparison, some are equal. A product that only hands the axis on hands on
what is equal along it, too, such as copies; there the ops before it are looked at with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, fx

from hf_align.symmetry.interpreter.bounds import FIXED
from hf_align.symmetry.interpreter.call import Call
from hf_align.symmetry.interpreter.spaces import Axis, Space
from hf_align.symmetry.interpreter.values import Interpretation, Product, Value
from hf_align.tracing.execute import run_node
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program

_SIZES = (0.01, 1.0, 30.0, 1000.0, 10_000.0)
"""Of the numbers: limits lie within them, unless they only keep numbers from overflowing."""
_DRAWS = 2
_OFF = 4.0
"""How far below zero, or above, a unit is off that ever is; what only comes near zero is not that near yet."""
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
    ops, sources = _since_products(value, program, lambda product: _hands_on(product, spaces, found))
    try:
        drawn = _numbers(sources, spaces, found)
        return any(_has_ties(_run(ops, numbers, program)[value], dim) for numbers in drawn)
    except Exception:  # whatever an op finds wrong with random numbers
        return True


def _numbers(
    sources: Collection[fx.Node], spaces: set[Space], found: Interpretation
) -> Iterator[dict[fx.Node, Tensor]]:
    """What a value may begin with: random numbers of several sizes, those of a text of one word, and zeros where
    products vanish."""
    program, rng = found.program, Generator().manual_seed(0)
    for size in _SIZES * _DRAWS:
        yield _drawn_all(sources, program, size, rng, ())
    plain = _drawn_all(sources, program, 1.0, rng, ())
    yield {node: _in_one_word(node, numbers, spaces, found) for node, numbers in plain.items()}
    if vanishing := [node for node in sources if _may_vanish(node, found)]:
        yield _drawn_all(sources, program, 1.0, rng, vanishing)


def _hands_on(product: fx.Node, spaces: set[Space], found: Interpretation) -> bool:
    """Whether spaces lie along what a product is given, and along none of its weights: it has not made them."""

    def lies_along(value: Value) -> bool:
        return any(atom.space in spaces for axis in value.axes for atom in axis.atoms)

    given = [v for node in product.all_input_nodes for v in _factors(found.values.get(node))]
    weights = [v for v in given if v.parameter is not None]
    return any(map(lies_along, given)) and not any(map(lies_along, weights))


def _factors(value: object) -> list[Value]:
    if isinstance(value, Product):
        return [value.left, value.right]
    return [value] if isinstance(value, Value) else []


def _since_products(
    value: fx.Node, program: Program, hands_on: Callable[[fx.Node], bool] = lambda product: False
) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a value is computed by since the last products of matrices, in order, and what that begins with.

    Args:
        hands_on: which products are no beginning.
    """
    ops, sources, waiting = set[fx.Node](), set[fx.Node](), [value]
    while waiting:
        node = waiting.pop()
        if node in program.constants or node in ops or node in sources:
            continue
        mixes = Trait.AFFINE | Trait.CONTRACTS | Trait.CONVOLVES | Trait.NAMES_AXES | Trait.LOOKS_UP_ROWS
        if node.op != "call_function" or (does(node, mixes) and not hands_on(node)):
            sources.add(node)
        else:
            ops.add(node)
            waiting += node.all_input_nodes
    return sorted(ops, key=program.order.__getitem__), sorted(sources, key=program.order.__getitem__)


def _may_vanish(product: fx.Node, found: Interpretation) -> bool:
    """Whether a product may be zero everywhere: what it multiplies is, and nothing is added."""
    if product not in found.vanishing:
        program, rng = found.program, Generator().manual_seed(0)
        given = product.all_input_nodes if product.op == "call_function" else []
        factors = [a for a in given if a not in program.constants and a not in program.parameters]
        found.vanishing[product] = False
        if factors and _may_be_off(factors[0], found, rng):
            values = _drawn_all(given, program, 1.0, rng, factors)
            found.vanishing[product] = not bool(_run([product], values, program)[product].any())
    return found.vanishing[product]


def _may_be_off(factor: fx.Node, found: Interpretation, rng: Generator) -> bool:
    """Whether a factor may be zero everywhere: it is of units that may all be off, or of products that all vanish."""
    program = found.program
    ops, sources = _since_products(factor, program)
    begins = [node for node in sources if node not in program.constants]
    for sign in (1, -1) if ops else ():
        far = {node: _far(node, sign, program, rng) for node in begins}
        if not bool(_run(ops, far, program)[factor].any()):
            return True
    if not begins or not all(_may_vanish(node, found) for node in begins):
        return False
    zeros = _drawn_all(begins, program, 1.0, rng, begins)
    return not bool(_run(ops, zeros, program)[factor].any())


def _drawn_all(
    sources: Iterable[fx.Node], program: Program, size: float, rng: Generator, zero: Collection[fx.Node]
) -> dict[fx.Node, Any]:
    """Random numbers for what is no constant, and zeros for some of it."""
    drawn = {node: _drawn(node, program, size, rng) for node in sources if node not in program.constants}
    return {node: torch.zeros_like(value) if node in zero else value for node, value in drawn.items()}


def _in_one_word(source: fx.Node, drawn: Tensor, spaces: set[Space], found: Interpretation) -> Tensor:
    """The same numbers in all places, as in a text of one word: what is zero in one is then zero in the mean of all."""
    for value in _factors(found.values.get(source)):
        keeps = [any(atom.space in spaces for atom in axis.atoms) for axis in value.axes]
        if any(keeps) and len(keeps) == drawn.dim():
            return drawn[tuple(slice(None if kept else 1) for kept in keeps)].expand(drawn.shape)
    return drawn


def _run(ops: Iterable[fx.Node], drawn: Mapping[fx.Node, Any], program: Program) -> dict[fx.Node, Any]:
    """What ops, in order, make of what they begin with."""
    values = dict(drawn)

    def lookup(node: fx.Node) -> Any:
        value = values[node] if node in values else program.constants[node]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    for node in ops:
        if does(node, Trait.SATURATES):
            x = lookup(node.all_input_nodes[0])
            values[node] = x + (x.square() + 1).sqrt()
        elif does(node, Trait.SOFTMAX):
            values[node] = lookup(node.all_input_nodes[0]).log_softmax(node.args[1])
        elif does(node, Trait.FILLS) and not _is_compared(node.args[1]):
            value, mask, _ = node.args
            values[node] = lookup(value).masked_fill(lookup(mask), -torch.inf)  # type: ignore[arg-type]
        else:
            values[node] = run_node(node, lookup)
    return values


def _drawn(source: fx.Node, program: Program, size: float, rng: Generator) -> Tensor:
    """Random numbers, and of what is no number of the model, such as a mask, what was given. Rows that are looked up
    may all be one."""
    example = source.meta["val"]
    if example.is_floating_point():
        is_row = does(source, Trait.LOOKS_UP_ROWS) and source.args[1] not in program.constants
        shape = example.shape[-1:] if is_row else example.shape
        return size * torch.randn(shape, generator=rng, dtype=torch.float64).expand(example.shape)
    given = program.example.arguments.get(program.inputs.get(source, ""))
    return given if isinstance(given, Tensor) else torch.zeros(example.shape, dtype=example.dtype)


def _far(source: fx.Node, sign: int, program: Program, rng: Generator) -> Tensor:
    """Numbers above zero at which a unit is on, or below, at which it is off; the same ones in every place."""
    example = source.meta["val"]
    if example.is_floating_point():
        row = _OFF + torch.rand(example.shape[-1:], generator=rng, dtype=torch.float64)
        return (sign * row).expand(example.shape)
    return _drawn(source, program, 1.0, rng)


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
