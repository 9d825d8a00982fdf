"""What a product of matrices gives where one of its factors is zero: units of it are off, a mask hides them, or the
products vanish that it is made of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor, fx

from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.trials import drawn, drawn_all, drawn_operands, run, since_products
from hf_align.tracing.program import Program

_OFF = 4.0
"""How far below zero, or above, a unit is off that ever is; what only comes near zero is not that near yet."""


def vanishing(product: fx.Node, found: Interpretation) -> Tensor | None:
    """What a product gives where as much of one of its factors is zero as can be; none if nothing of one ever is."""
    if product not in found.vanishing:
        known = found.program.parameters.keys() | found.program.constants.keys()
        given = [a for a in product.all_input_nodes if a not in known and a.meta["val"].is_floating_point()]
        found.vanishing[product] = None
        tried = [pair for factor in given for pair in _at_zeros(product, factor, found)]
        found.vanishing[product] = max(tried, key=lambda pair: pair[0])[1] if tried else None
    return found.vanishing[product]


def _at_zeros(product: fx.Node, factor: fx.Node, found: Interpretation) -> Iterator[tuple[float, Tensor]]:
    """How much of a factor is zero, and what the product gives there."""
    program, rng = found.program, Generator().manual_seed(0)
    for value in _with_zeros(factor, found, rng):
        is_zero = value == 0
        if bool(is_zero.any()):
            numbers = drawn_operands(product, program, rng)
            numbers[factor] = numbers[factor].masked_fill(is_zero, 0)
            yield float(is_zero.double().mean()), run([product], numbers, program)[product]


def _with_zeros(factor: fx.Node, found: Interpretation, rng: Generator) -> Iterator[Tensor]:
    """What a factor of a product may be where some of it is zero: units of it are off, a mask hides them, or the
    products vanish that it is made of."""
    program = found.program
    ops, sources = since_products(factor, program)
    begins = [node for node in sources if node not in program.constants]
    for sign in (1, -1) if ops else ():
        value = run(ops, {node: _far(node, sign, program, rng) for node in begins}, program)[factor]
        if bool((value == 0).any()):
            yield value
    products = [node for node in begins if node not in program.parameters]
    zeros = dict[fx.Node, Tensor]()
    for node in products:
        if (vanished := vanishing(node, found)) is None:
            return
        zeros[node] = vanished
    if zeros:
        yield run(ops, drawn_all(begins, program, 1.0, rng) | zeros, program)[factor]


def _far(source: fx.Node, sign: int, program: Program, rng: Generator) -> Tensor:
    """Numbers above zero at which a unit is on, or below, at which it is off; the same ones in every place."""
    example = source.meta["val"]
    if example.is_floating_point():
        row = _OFF + torch.rand(example.shape[-1:], generator=rng, dtype=torch.float64)
        return (sign * row).expand(example.shape)
    return drawn(source, program, 1.0, rng)
