"""Runs of what lies between products of matrices and a value, on random numbers: what is tried there needs no list of
ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, fx

from hf_align.tracing.execute import run_node
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program


def since_products(
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


def drawn_all(sources: Iterable[fx.Node], program: Program, size: float, rng: Generator) -> dict[fx.Node, Tensor]:
    """Random numbers for what is no constant."""
    return {node: drawn(node, program, size, rng) for node in sources if node not in program.constants}


def run(
    ops: Iterable[fx.Node],
    begins: Mapping[fx.Node, Any],
    program: Program,
    run_op: Callable[[fx.Node, Callable[[fx.Node], Any]], Any] = run_node,
) -> dict[fx.Node, Any]:
    """What ops, in order, make of what they begin with.

    Args:
        run_op: runs one of them on operands that it looks up.
    """
    values = dict(begins)

    def lookup(node: fx.Node) -> Any:
        value = values[node] if node in values else program.constants[node]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    for node in ops:
        values[node] = run_op(node, lookup)
    return values


def drawn(source: fx.Node, program: Program, size: float, rng: Generator) -> Tensor:
    """Random numbers, and of what is no number of the model, such as a mask, what was given. Rows that are looked up
    may all be one. A product with what is computed of weights has what is equal along these."""
    example = source.meta["val"]
    if example.is_floating_point():
        is_row = does(source, Trait.LOOKS_UP_ROWS) and source.args[1] not in program.constants
        if any(_computed_weights(source, program)):
            made = size * run([source], drawn_operands(source, program, rng), program)[source]
            return made.reshape(-1, made.shape[-1])[0].expand(made.shape) if is_row else made
        shape = example.shape[-1:] if is_row else example.shape
        return size * torch.randn(shape, generator=rng, dtype=torch.float64).expand(example.shape)
    given = program.example.arguments.get(program.inputs.get(source, ""))
    return given if isinstance(given, Tensor) else torch.zeros(example.shape, dtype=example.dtype)


def drawn_operands(product: fx.Node, program: Program, rng: Generator) -> dict[fx.Node, Tensor]:
    """Random numbers for what a product is made of; what is computed of weights is made of random weights."""
    numbers = drawn_all(product.all_input_nodes, program, 1.0, rng)
    for weight in _computed_weights(product, program):
        ops, sources = since_products(weight, program)
        numbers[weight] = run(ops, drawn_all(sources, program, 1.0, rng), program)[weight]
    return numbers


def _computed_weights(product: fx.Node, program: Program) -> Iterator[fx.Node]:
    for operand in product.all_input_nodes if product.op == "call_function" else ():
        if operand in program.constants or _is_laid_out(operand, program):
            continue
        if operand.op == "call_function" and is_stored(operand, program):
            yield operand


def _is_laid_out(value: fx.Node, program: Program) -> bool:
    """Whether a value shows every entry of a weight once: entries that are unlike in the weight are unlike there."""
    while does(value, Trait.SAME | Trait.RESHAPES | Trait.REORDERS_AXES | Trait.ADDS_UNIT_AXES):
        value = value.all_input_nodes[0]
    return value in program.parameters


def is_stored(node: fx.Node, program: Program) -> bool:
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
