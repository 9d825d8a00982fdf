"""Random weights at which what has a kink is seen on both sides of it.

A ReLU that is open for no input, or for all of them, has null directions that are none of the architecture's. Behind
other ReLUs, whose answers are all positive, most are so by chance. So has a unit that lies beyond its limit for all
inputs, or for none.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.fx import Node

from hf_align.symmetry.certificate.count import Look, in_each, jacobian
from hf_align.symmetry.certificate.random_copy import NO_LIMIT, Weights, random_inputs
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.execute import run
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program, upstream

_CONTEXTS, _STEPS, _RATE = 24, 40, 0.03
"""Of a descent of so few steps that weights stay as random as they were drawn."""
_LEAST_LIMIT = 0.1
"""What is smaller keeps divisors from being zero."""
_LEAST = 1e-12
"""In place of a variance that is zero."""


def kinks(program: Program) -> list[tuple[Node, float]]:
    """What goes into ReLUs and limits that a result depends on, and where the kink lies."""
    returned = upstream(program.interface, program)
    places = {node: _kink(node) for node in program.graph.nodes if node in returned and node not in program.constants}
    return [(node.all_input_nodes[0], place) for node, place in places.items() if place is not None]


def _kink(node: Node) -> float | None:
    """Where an op has a kink that units reach; of two limits, one."""
    if does(node, Trait.KINKED):
        return 0.0
    limits = [*node.args, *node.kwargs.values()] if does(node, Trait.LIMITS) else []
    return next((n for n in reversed(limits) if isinstance(n, float) and _LEAST_LIMIT < abs(n) < NO_LIMIT), None)


def on_both_sides(program: Program, spec: SymmetrySpec, weights: Weights, rng: Generator) -> Weights:
    """The weights, moved until the mean of what goes into a ReLU, or a limit, lies at its kink."""
    bent = kinks(program)
    if not bent:
        return weights
    sizes, needed = [node.meta["val"].numel() for node, _ in bent], upstream([node for node, _ in bent], program)
    contexts = [random_inputs(program, rng) for _ in range(_CONTEXTS)]
    moved = {n: w.clone().requires_grad_(n not in spec.positive) for n, w in weights.items()}
    optimiser = torch.optim.Adam([w for w in moved.values() if w.requires_grad], lr=_RATE)

    def before_kinks(inputs: Weights) -> Tensor:
        values = run(program, moved, inputs, needed)
        return torch.cat([values[node].reshape(-1) - place for node, place in bent])

    for _ in range(_STEPS):
        values = torch.stack([*in_each(before_kinks, contexts, (), _CONTEXTS)])
        loss = torch.stack([_off_centre(part) for part in values.split(sizes, dim=1)]).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {n: w.detach() for n, w in moved.items()}


def within_reach(program: Program, spec: SymmetrySpec, weights: Weights, rng: Generator) -> Weights:
    """The weights, those that have no effect at all with the other sign: a limit may lie beyond another one."""
    results = tuple(result for result in program.interface if result.meta["val"].is_floating_point())
    effects = jacobian(program, weights, [Look(results, _CONTEXTS, wanted=1)], rng).ne(0).any(0)
    sizes = [weight.numel() for weight in weights.values()]
    seen = {name: bool(e.any()) for name, e in zip(weights, effects.split(sizes), strict=True)}
    return {name: w if seen[name] or name in spec.positive else -w for name, w in weights.items()}


def _off_centre(values: Tensor) -> Tensor:
    """The squares of means over contexts, as shares of the variances; values [contexts, entries]."""
    return (values.mean(0).square() / values.var(0).clamp_min(_LEAST)).mean()
