"""Chains of ops and blocks drawn at random, on operands of few entries: what a spec allows changes nothing, and none
ends in an error.

Axes of one entry, axes that come twice and tables of as many rows as there are columns are drawn on purpose: there a
rule or a gauge is most easily taken in. What they have found is in `test_chains.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from chain_steps import AROUND, BLOCKS, OPS, Step, Stored
from op_program import Data, OpExample, Weight, draw_inputs, draw_weights, trace_op
from torch import Generator, Tensor

from hf_align.matching.balanced import Balanced
from hf_align.matching.weights import match_weights
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.certificate.soundness import decided_soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing.execute import execute
from hf_align.tracing.program import Program

pytestmark = pytest.mark.slow

_SHARES = 16
_CHAINS = 500
_MATCHED = 60
_SHAPES = ((3, 4), (2, 3, 4), (3, 1), (1, 4), (2, 1, 3), (4,), (1,), (2, 3, 1), (1, 1), (3, 2), (2, 2, 2, 2), (1, 3, 4),
           (5, 4), (2, 4, 6), (4, 4), (1, 2, 4, 4))  # fmt: skip
_BLOCKS = 0.3
_NESTED = 0.2


class _Handed:
    """Weights in the order in which a chain asks for them."""

    def __init__(self, weights: tuple[Tensor, ...]) -> None:
        self.left = iter(weights)

    def __call__(self, *shape: int) -> Tensor:
        return next(self.left)


def _step(rng: random.Random) -> Step:
    step = rng.choice(BLOCKS if rng.random() < _BLOCKS else OPS)
    return rng.choice(AROUND)(step) if rng.random() < _NESTED else step


def drawn(seed: int) -> OpExample | None:
    """A chain; none where an op has no use for what the one before it gives, or of too much."""
    rng = random.Random(seed)
    shape = rng.choice(_SHAPES)
    chain = [_step(rng) for _ in range(rng.randrange(2, 7))]
    asked = list[tuple[int, ...]]()

    def asks(*sizes: int) -> Tensor:
        asked.append(sizes)
        return torch.ones(sizes, dtype=torch.float64)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        handed: Stored = _Handed(weights) if weights or asked else asks
        for step in chain:
            x = step(x, handed)
        return x

    try:
        result = call(torch.randn(shape, dtype=torch.float64))
    except (RuntimeError, ValueError, IndexError):
        return None
    is_small = 0 < result.numel() <= 200
    along = result.dim() > 0 and rng.random() < 0.4
    return OpExample("chain", call, (Data(shape), *map(Weight, asked)), "", along=along) if is_small else None


def programs(first: int, last: int) -> Iterator[tuple[int, OpExample, Program]]:
    """The chains of some seeds that can be traced; others are refused."""
    for seed in range(first, last):
        example = drawn(seed)
        if example is not None:
            with suppress(Exception):
                yield seed, example, trace_op(example)


@pytest.mark.parametrize("share", range(_SHARES))
def test_what_is_allowed_of_a_chain_changes_nothing(share: int) -> None:
    for seed, example, program in programs(share * _CHAINS, (share + 1) * _CHAINS):
        spec, rng = derive(program), Generator().manual_seed(seed)
        error, undecided = decided_soundness(program, spec, draw_weights(example, program, rng), draw_inputs(rng), rng)
        assert error < 1e-6 or undecided is not None or error != error, (seed, error)


@pytest.mark.parametrize("share", range(_SHARES))
def test_a_matched_chain_is_itself_and_no_farther(share: int) -> None:
    for seed, example, program in programs(share * _MATCHED, (share + 1) * _MATCHED):
        spec, rng = derive(program), Generator().manual_seed(seed)
        if not any(space.group for space in spec.spaces.values()):
            continue
        a, b = (draw_weights(example, program, rng) for _ in range(2))
        models = Balanced.of(spec, a, b)
        match = models.match(*match_weights(models))
        assert match.after <= match.before * (1 + 1e-6), seed
        moved, inputs = dict(AlignedWeights(b, spec, match.b)), draw_inputs(rng)
        expected = execute(program, b, inputs)
        if decided_soundness(program, spec, b, inputs, rng)[0] < 1e-9:
            torch.testing.assert_close(execute(program, moved, inputs), expected, rtol=1e-4, atol=1e-6, msg=str(seed))
