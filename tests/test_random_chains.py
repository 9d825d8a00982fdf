"""Chains of ops drawn at random, on operands of few entries: what a spec allows changes nothing, and none ends in an
error.

Axes of one entry, axes that come twice and tables of as many rows as there are columns are drawn on purpose: there a
rule or a gauge is most easily taken in. What they have found is in `test_chains.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from op_program import Data, OpExample, Weight, draw_inputs, draw_weights, trace_op
from test_chains import centred, chosen, normed, rotated, scores
from torch import Generator, Tensor
from torch.nn import functional

from hf_align.symmetry.certificate.certify import decided_soundness
from hf_align.symmetry.derivation.derive import derive

pytestmark = pytest.mark.slow

_SHARES = 16
_CHAINS = 500
_SHAPES = ((3, 4), (2, 3, 4), (3, 1), (1, 4), (2, 1, 3), (4,), (1,), (2, 3, 1), (1, 1), (3, 2), (2, 2, 2, 2), (1, 3, 4))
Stored = Callable[..., Tensor]
"""A weight of a shape."""
Step = Callable[[Tensor, Stored], Tensor]


def _last(x: Tensor) -> int:
    return x.shape[-1]


PLAIN: tuple[Step, ...] = (
    lambda x, w: functional.linear(x, w(4, _last(x)), w(4)),
    lambda x, w: functional.linear(x, w(1, _last(x))),
    lambda x, w: x * w(_last(x)),
    lambda x, w: x * w(1),
    lambda x, w: x * w(),
    lambda x, w: x + w(_last(x)),
    lambda x, w: x + w(1),
    lambda x, w: x - w(),
    lambda x, w: x * w(x.shape[0], *[1] * (x.dim() - 1)),
    lambda x, w: x + w(*x.shape),
    lambda x, w: x / (w(_last(x)).abs() + 0.5),
    lambda x, w: functional.rms_norm(x, [_last(x)], w(_last(x)), 1e-2),
    lambda x, w: functional.rms_norm(x, [_last(x)], None, 1e-2),
    lambda x, w: functional.layer_norm(x, [_last(x)], w(_last(x)), w(_last(x)), 1e-2),
    lambda x, w: functional.layer_norm(x, [_last(x)], w(_last(x)), None, 1e-2),
    lambda x, w: centred(x) * w(_last(x)),
    lambda x, w: normed(x) * w(_last(x)),
    lambda x, w: functional.normalize(x, dim=-1),
    lambda x, w: x / (x.abs().sum(-1, keepdim=True) + 0.1),
    lambda x, w: functional.group_norm(x, 1, w(x.shape[1]), w(x.shape[1])),
    lambda x, w: functional.batch_norm(x, w(x.shape[1]), w(x.shape[1]).abs() + 0.5, w(x.shape[1]), w(x.shape[1])),
    lambda x, w: torch.relu(x),
    lambda x, w: torch.tanh(x),
    lambda x, w: torch.exp(x),
    lambda x, w: x.square(),
    lambda x, w: functional.prelu(x, w(1)),
    lambda x, w: torch.softmax(x, -1),
    lambda x, w: torch.softmax(x, 0),
    lambda x, w: x.sum(-1),
    lambda x, w: x.mean(0),
    lambda x, w: x.amax(-1, keepdim=True),
    lambda x, w: x - x.mean(-1, keepdim=True),
    lambda x, w: x.squeeze(),
    lambda x, w: x.unsqueeze(0),
    lambda x, w: x.unsqueeze(-1),
    lambda x, w: x.flatten(),
    lambda x, w: x.flatten(-2),
    lambda x, w: x.unflatten(-1, (2, -1)),
    lambda x, w: x.unflatten(-1, (-1, 1)),
    lambda x, w: x.transpose(-1, -2),
    lambda x, w: x.transpose(0, -1),
    lambda x, w: x[..., : max(1, _last(x) // 2)],
    lambda x, w: x[0],
    lambda x, w: x[..., -1],
    lambda x, w: x[..., ::2],
    lambda x, w: x.roll(1, -1),
    lambda x, w: x.flip(-1),
    lambda x, w: x.cumsum(0),
    lambda x, w: x.expand(2, *x.shape),
    lambda x, w: x.repeat_interleave(2, -1),
    lambda x, w: functional.pad(x, (1, 0)),
    lambda x, w: torch.where(x > 0, x, 0.1 * x),
    lambda x, w: x.clamp(min=-0.5),
    lambda x, w: x.topk(max(1, _last(x) // 2), -1)[0],
    lambda x, w: chosen(x, w(_last(x), 3)),
    lambda x, w: functional.conv1d(x, w(3, x.shape[-2], 1)),
    lambda x, w: functional.conv1d(x, w(x.shape[-2], 1, 3), groups=x.shape[-2], padding=1),
    lambda x, w: rotated(x),
    lambda x, w: scores(x),
    lambda x, w: torch.softmax(scores(x), -1) @ functional.linear(x, w(3, _last(x))),
    lambda x, w: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    lambda x, w: x * functional.linear(x, w(1, _last(x))),
    lambda x, w: x * x.sum(-1, keepdim=True),
)
AROUND: tuple[Callable[[Step], Step], ...] = (
    lambda inner: lambda x, w: x + inner(x, w),
    lambda inner: lambda x, w: x * inner(x, w),
    lambda inner: lambda x, w: torch.cat([x, inner(x, w)], -1),
    lambda inner: lambda x, w: torch.cat([x, inner(x, w)], 0),
    lambda inner: lambda x, w: torch.stack([x, inner(x, w)], 0),
)


class _Handed:
    """Weights in the order in which a chain asks for them."""

    def __init__(self, weights: tuple[Tensor, ...]) -> None:
        self.left = iter(weights)

    def __call__(self, *shape: int) -> Tensor:
        return next(self.left)


def drawn(seed: int) -> OpExample | None:
    """A chain; none where an op has no use for what the one before it gives, or of too much."""
    rng = random.Random(seed)
    shape = rng.choice(_SHAPES)
    chain = [rng.choice(AROUND)(rng.choice(PLAIN)) if rng.random() < 0.2 else rng.choice(PLAIN)
             for _ in range(rng.randrange(2, 7))]  # fmt: skip
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


@pytest.mark.parametrize("share", range(_SHARES))
def test_what_is_allowed_of_a_chain_changes_nothing(share: int) -> None:
    for seed in range(share * _CHAINS, (share + 1) * _CHAINS):
        example = drawn(seed)
        if example is None:
            continue
        try:
            program = trace_op(example)
        except Exception:  # what cannot be traced is refused
            continue
        spec, rng = derive(program), Generator().manual_seed(seed)
        error, undecided = decided_soundness(program, spec, draw_weights(example, program, rng), draw_inputs(rng), rng)
        assert error < 1e-6 or undecided is not None or error != error, (seed, error)
