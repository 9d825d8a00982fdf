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
from hf_align.symmetry.interpreter.values import Interpretation, values_of
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
        drawn = _numbers(sources, found)
        return any(_has_ties(_run(ops, numbers, program, _unlimited)[value], dim) for numbers in drawn)
    except Exception:  # whatever an op finds wrong with random numbers
        return True


def _numbers(sources: Collection[fx.Node], found: Interpretation) -> Iterator[dict[fx.Node, Tensor]]:
    """What a value may begin with: random numbers of several sizes, those of a text of one word, and zeros where
    products vanish."""
    program, rng = found.program, Generator().manual_seed(0)
    for size in _SIZES * _DRAWS:
        yield _drawn_all(sources, program, size, rng)
    plain = _drawn_all(sources, program, 1.0, rng)
    stored = {atom.space for weight in found.weights.values() for axis in weight.axes for atom in axis.atoms}
    yield {node: _in_one_word(node, numbers, stored, found) for node, numbers in plain.items()}
    vanishing = {node: _vanishing(node, found) for node in plain}
    if any(numbers is not None for numbers in vanishing.values()):
        yield {node: numbers if (zeros := vanishing[node]) is None else zeros for node, numbers in plain.items()}


def _hands_on(product: fx.Node, spaces: set[Space], found: Interpretation) -> bool:
    """Whether spaces lie along what a product is given, and along none of its weights: it has not made them."""

    def lies_along(operand: fx.Node) -> bool:
        axes = [axis for value in values_of(found.values.get(operand)) for axis in value.axes]
        return any(atom.space in spaces for axis in axes for atom in axis.atoms)

    given = [operand for operand in product.all_input_nodes if lies_along(operand)]
    return bool(given) and not any(_is_stored(operand, found.program) for operand in given)


def _is_stored(node: fx.Node, program: Program) -> bool:
    """Whether a value is a weight, or made of weights alone."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        before = waiting.pop()
        if before in seen or before in program.parameters or before in program.constants:
            continue
        if before.op != "call_function":
            return False
        seen.add(before)
        waiting += before.all_input_nodes
    return True


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


def _vanishing(product: fx.Node, found: Interpretation) -> Tensor | None:
    """What a product gives where one of its factors is zero, if it is zero there, too; none if it never is."""
    if product not in found.vanishing:
        known = found.program.parameters.keys() | found.program.constants.keys()
        given = [a for a in product.all_input_nodes if a not in known and a.meta["val"].is_floating_point()]
        tried = (_of_zeros(product, factor, found) for factor in given)
        found.vanishing[product] = None
        found.vanishing[product] = next((value for value in tried if value is not None), None)
    return found.vanishing[product]


def _of_zeros(product: fx.Node, factor: fx.Node, found: Interpretation) -> Tensor | None:
    program, rng = found.program, Generator().manual_seed(0)
    for zeros in _with_zeros(factor, found, rng):
        drawn = _drawn_all(product.all_input_nodes, program, 1.0, rng)
        drawn[factor] = drawn[factor].masked_fill(zeros == 0, 0)
        value = _run([product], drawn, program)[product]
        if bool((value == 0).any()):
            return value
    return None


def _with_zeros(factor: fx.Node, found: Interpretation, rng: Generator) -> Iterator[Tensor]:
    """What a factor of a product may be where some of it is zero: units of it are off, a mask hides them, or the
    products vanish that it is made of."""
    program = found.program
    ops, sources = _since_products(factor, program)
    begins = [node for node in sources if node not in program.constants]
    for sign in (1, -1) if ops else ():
        value = _run(ops, {node: _far(node, sign, program, rng) for node in begins}, program)[factor]
        if bool((value == 0).any()):
            yield value
    products = [node for node in begins if node not in program.parameters]
    zeros = dict[fx.Node, Tensor]()
    for node in products:
        if (vanished := _vanishing(node, found)) is None:
            return
        zeros[node] = vanished
    if zeros:
        yield _run(ops, _drawn_all(begins, program, 1.0, rng) | zeros, program)[factor]


def _drawn_all(sources: Iterable[fx.Node], program: Program, size: float, rng: Generator) -> dict[fx.Node, Tensor]:
    """Random numbers for what is no constant."""
    return {node: _drawn(node, program, size, rng) for node in sources if node not in program.constants}


def _in_one_word(source: fx.Node, drawn: Tensor, stored: Collection[Space], found: Interpretation) -> Tensor:
    """The same vectors in all places, as in a text of one word: what is zero in one is then zero in the mean of all.
    Places lie along what no weight has."""
    for value in values_of(found.values.get(source)):
        kept = [any(atom.space in stored for atom in axis.atoms) for axis in value.axes]
        if any(kept) and len(kept) == drawn.dim():
            return drawn[tuple(slice(None if has else 1) for has in kept)].expand(drawn.shape)
    return drawn


def _run(
    ops: Iterable[fx.Node],
    drawn: Mapping[fx.Node, Any],
    program: Program,
    run_op: Callable[[fx.Node, Callable[[fx.Node], Any]], Any] = run_node,
) -> dict[fx.Node, Any]:
    """What ops, in order, make of what they begin with.

    Args:
        run_op: runs one of them on operands that it looks up.
    """
    values = dict(drawn)

    def lookup(node: fx.Node) -> Any:
        value = values[node] if node in values else program.constants[node]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    for node in ops:
        values[node] = run_op(node, lookup)
    return values


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
