"""Weights and biases of maps and norms that are not as they are stored: parts of tables, views, what is computed.

A gauge that takes one of them for the parameter itself, or for none, changes the function.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from op_program import Data, Operand, OpExample, Statistic, Weight, draw_inputs, draw_weights, trace_op
from torch import Generator, Tensor
from torch.nn import functional

from hf_align.symmetry.certificate.soundness import decided_soundness
from hf_align.symmetry.derivation.derive import derive

Shape = tuple[int, ...]
Origin = tuple[Callable[[Shape], Operand], Callable[[Tensor, Shape], Tensor]]
"""What is stored for a weight of a shape, and the weight."""

ORIGINS: dict[str, Origin] = {
    "as stored": (Weight, lambda w, s: w),
    "a statistic": (Statistic, lambda w, s: w),
    "computed by the model": (Data, lambda w, s: w),
    "half of a table": (lambda s: Weight((2 * s[0], *s[1:])), lambda w, s: w.chunk(2)[1]),
    "one of three": (lambda s: Weight((3, *s)), lambda w, s: w[1]),
    "one that is looked up": (
        lambda s: Weight((3, math.prod(s))),
        lambda w, s: functional.embedding(torch.tensor(1), w).view(s),
    ),
    "stored as a row": (lambda s: Weight((1, *s)), lambda w, s: w.view(s)),
    "stored as a column": (lambda s: Weight((*s, 1)), lambda w, s: w.squeeze(-1)),
    "stored flat": (lambda s: Weight((math.prod(s),)), lambda w, s: w.view(s)),
    "stored as a table": (lambda s: Weight((math.prod(s) // 2, 2)), lambda w, s: w.view(s)),
    "one number": (lambda s: Weight((1,)), lambda w, s: w.expand(s)),
    "scaled": (Weight, lambda w, s: 2.0 * w),
    "negative": (Weight, lambda w, s: -w),
    "plus one": (Weight, lambda w, s: 1 + w),
    "positive": (Weight, lambda w, s: w.exp()),
    "backwards": (Weight, lambda w, s: w.flip(0)),
    "the sum of two": (lambda s: Weight((2, *s)), lambda w, s: w.sum(0)),
    "less its mean": (Weight, lambda w, s: w - w.mean(-1, keepdim=True)),
    "rounded": (Weight, lambda w, s: w.float().double()),
    "zeros": (lambda s: Weight(()), lambda w, s: torch.zeros(s, dtype=w.dtype)),
    "ones": (lambda s: Weight(()), lambda w, s: torch.ones(s, dtype=w.dtype)),
}
MAPS: dict[str, tuple[Shape, Shape, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "linear": ((6, 4), (6,), functional.linear),
    "addmm": ((4, 6), (6,), lambda x, w, b: torch.addmm(b, x, w)),
    "conv1d": ((6, 4, 1), (6,), lambda x, w, b: functional.conv1d(x.mT, w, b).mT),
    "a kernel for each channel": (
        (4, 1, 3), (4,), lambda x, w, b: functional.conv1d(x.mT, w, b, padding=1, groups=4).mT),
    "layer_norm": ((4,), (4,), lambda x, w, b: functional.layer_norm(x, [4], w, b, 1e-2)),
    "group_norm": ((4,), (4,), lambda x, w, b: functional.group_norm(x, 2, w, b)),
    "instance_norm": ((4,), (4,), lambda x, w, b: functional.instance_norm(x.mT[None], weight=w, bias=b)[0].mT),
    "a gain and a bias": ((4,), (4,), lambda x, w, b: x * w + b),
}  # fmt: skip


def _largest_change(op: str, weight: str, bias: str) -> float:
    """Of a map that another map reads, the last one of the model; where rounding decides nothing."""
    shape, width, function = MAPS[op]
    (stored, weight_of), (added, bias_of) = ORIGINS[weight], ORIGINS[bias]

    def call(x: Tensor, w: Tensor, b: Tensor, head: Tensor) -> Tensor:
        return functional.linear(function(x, weight_of(w, shape), bias_of(b, width)), head)

    operands = Data((3, 4)), stored(shape), added(width), Weight((5, *width))
    example = OpExample(op, call, operands, f"{weight}, {bias}", along=True)
    program = trace_op(example)
    spec, rng = derive(program), Generator().manual_seed(0)
    seen = [decided_soundness(program, spec, draw_weights(example, program, rng), draw_inputs(rng), rng) for _ in "abc"]
    return max(error for error, undecided in seen if undecided is None)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("op", MAPS)
def test_what_is_not_as_it_is_stored_is_not_taken_for_it(op: str, origin: str) -> None:
    assert _largest_change(op, origin, "as stored") < 1e-9
    assert _largest_change(op, "as stored", origin) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("op", MAPS)
def test_no_two_origins_are_taken_for_others(op: str) -> None:
    for weight, bias in itertools.product(ORIGINS, ORIGINS):
        assert _largest_change(op, weight, bias) < 1e-9, (weight, bias)
