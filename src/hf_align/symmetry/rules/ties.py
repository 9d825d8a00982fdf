"""Whether entries of a value may tie: of those the first is the largest, so that a choice among them shows their order.

No list of ops is asked. What the ops since the last product of matrices make of random numbers of several sizes is
looked at: behind a limit, a rounding or a comparison, some are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, fx

from hf_align.symmetry.interpreter.bounds import FIXED
from hf_align.symmetry.interpreter.call import Call
from hf_align.symmetry.interpreter.spaces import Axis
from hf_align.symmetry.interpreter.values import Interpretation
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
    if not all(atom.root.space.bound.fixed for atom in axis.atoms) and may_tie(call.argument(0), dim, call.found):
        call.lower(axis, FIXED, "ties")


def may_tie(value: fx.Node, axis: int, found: Interpretation) -> bool:
    """Whether entries along an axis may be equal for some text; so, too, where it cannot be tried."""
    program = found.program
    ops, sources = _since_products(value, program)
    rng = Generator().manual_seed(0)
    try:
        for node in sources:
            if node not in found.vanishing:
                found.vanishing[node] = _may_vanish(node, program, rng)
        vanishing = {node for node in sources if found.vanishing[node]}
        tried = [*((size, set[fx.Node]()) for size in _SIZES * _DRAWS), *([(1.0, vanishing)] if vanishing else [])]
        drawn = (_drawn_all(sources, program, size, rng, zero) for size, zero in tried)
        return any(_has_ties(_run(ops, numbers, program)[value], axis) for numbers in drawn)
    except Exception:  # whatever an op finds wrong with random numbers
        return True


def _since_products(value: fx.Node, program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a value is computed by since the last products of matrices, in order, and what that begins with."""
    ops, sources, waiting = set[fx.Node](), set[fx.Node](), [value]
    while waiting:
        node = waiting.pop()
        if node in program.constants or node in ops or node in sources:
            continue
        mixes = Trait.AFFINE | Trait.CONTRACTS | Trait.CONVOLVES | Trait.NAMES_AXES | Trait.LOOKS_UP_ROWS
        if node.op != "call_function" or does(node, mixes):
            sources.add(node)
        else:
            ops.add(node)
            waiting += node.all_input_nodes
    return sorted(ops, key=program.order.__getitem__), sorted(sources, key=program.order.__getitem__)


def _may_vanish(product: fx.Node, program: Program, rng: Generator) -> bool:
    """Whether a product may be zero everywhere: what it multiplies is of units that may all be off, and nothing is
    added."""
    factors = [a for a in product.all_input_nodes if a not in program.constants and a not in program.parameters]
    ops, sources = _since_products(factors[0], program) if product.op == "call_function" and factors else ([], [])
    if not ops:
        return False
    off = {node: _off(node, program, rng) for node in sources if node not in program.constants}
    for sign in (1, -1):
        far = {node: sign * value if value.is_floating_point() else value for node, value in off.items()}
        if not bool(_run(ops, far, program)[factors[0]].any()):
            values = _drawn_all(product.all_input_nodes, program, 1.0, rng, factors)
            return not bool(_run([product], values, program)[product].any())
    return False


def _drawn_all(
    sources: Iterable[fx.Node], program: Program, size: float, rng: Generator, zero: Collection[fx.Node]
) -> dict[fx.Node, Any]:
    """Random numbers for what is no constant, and zeros for some of it."""
    drawn = {node: _drawn(node, program, size, rng) for node in sources if node not in program.constants}
    return {node: torch.zeros_like(value) if node in zero else value for node, value in drawn.items()}


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


def _off(source: fx.Node, program: Program, rng: Generator) -> Tensor:
    """Numbers above zero at which a unit is on, and below which it is off."""
    example = source.meta["val"]
    if example.is_floating_point():
        return _OFF + torch.rand(example.shape, generator=rng, dtype=torch.float64)
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
