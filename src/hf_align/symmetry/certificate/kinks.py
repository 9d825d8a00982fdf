"""Random weights at which what has a kink is seen on both sides of it.

A ReLU that is open for no input, or for all of them, has null directions that are none of the architecture's. Behind
other ReLUs, whose answers are all positive, most are so by chance.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.fx import Node

from hf_align.symmetry.certificate.count import in_each
from hf_align.symmetry.certificate.random_copy import Weights, random_inputs
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.execute import run
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program, upstream

_CONTEXTS, _STEPS, _RATE = 24, 40, 0.03
"""Of a descent of so few steps that weights stay as random as they were drawn."""
_LEAST = 1e-12
"""In place of a variance that is zero."""


def kinks(program: Program) -> list[Node]:
    """What goes into ReLUs that a result depends on."""
    returned = upstream(program.interface, program)
    return [node.all_input_nodes[0] for node in program.graph.nodes if does(node, Trait.KINKED) and node in returned]


def on_both_sides(program: Program, spec: SymmetrySpec, weights: Weights, rng: Generator) -> Weights:
    """The weights, moved until the mean of what goes into a ReLU lies at its kink."""
    bent = kinks(program)
    if not bent:
        return weights
    sizes, needed = [node.meta["val"].numel() for node in bent], upstream(bent, program)
    contexts = [random_inputs(program, rng) for _ in range(_CONTEXTS)]
    moved = {n: w.clone().requires_grad_(n not in spec.positive) for n, w in weights.items()}
    optimiser = torch.optim.Adam([w for w in moved.values() if w.requires_grad], lr=_RATE)

    def before_kinks(inputs: Weights) -> Tensor:
        values = run(program, moved, inputs, needed)
        return torch.cat([values[node].reshape(-1) for node in bent])

    for _ in range(_STEPS):
        values = torch.stack([*in_each(before_kinks, contexts, (), _CONTEXTS)])
        loss = torch.stack([_off_centre(part) for part in values.split(sizes, dim=1)]).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {n: w.detach() for n, w in moved.items()}


def _off_centre(values: Tensor) -> Tensor:
    """The squares of means over contexts, as shares of the variances; values [contexts, entries]."""
    return (values.mean(0).square() / values.var(0).clamp_min(_LEAST)).mean()
