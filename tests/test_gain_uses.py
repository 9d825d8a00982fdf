"""A weight that is a gain with a number added to it (y = (1 + w) x), and is used in another way, too.

Found by drawing pairs of uses at random: where a factor of 1 + w may go elsewhere, one of w may not.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from op_program import Data, OpExample, Weight, draw_inputs, draw_weights, trace_op
from torch import Generator, Tensor
from torch.nn import functional

from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive

Use = Callable[[Tensor, Tensor], Tensor]
GAINS: dict[str, Use] = {
    "(1 + w) y": lambda y, w: y * (1 + w),
    "(2 + w) y, w as a row": lambda y, w: (2 + w.view(1, -1)) * y,
    "a norm with 1 + w": lambda y, w: functional.rms_norm(y, w.shape, 1 + w, 1e-2),
    "(1 + w) of half": lambda y, w: torch.cat([y[:, :2] * (1 + w[:2]), y[:, 2:]], -1),
}
OTHERS: dict[str, Use] = {
    "w y": lambda y, w: y * w,
    "y + w": lambda y, w: y + w,
    "(1 - w) y": lambda y, w: y * (1 - w),
    "(3 + w) y": lambda y, w: y * (3 + w),
    "2 w y": lambda y, w: y * (2 * w),
    "a norm with w": lambda y, w: functional.layer_norm(y, w.shape, w, None, 1e-2),
    "a norm and w": lambda y, w: functional.layer_norm(y, w.shape, None, w, 1e-2),
    "exp(w) y": lambda y, w: y * w.exp(),
    "y (w · y)": lambda y, w: y * (y @ w)[:, None],
    "y sum w": lambda y, w: y * w.sum(),
    "slopes": functional.prelu,
    "w y + (1 - w) tanh y": lambda y, w: w * y + (1 - w) * y.tanh(),
    "one more row": lambda y, w: torch.cat([y, w[None]]),
}


@pytest.mark.parametrize(("gain", "other", "is_first"), list(product(GAINS, OTHERS, (True, False))))
def test_a_gain_with_a_number_that_is_used_elsewhere_keeps_its_factor(gain: str, other: str, is_first: bool) -> None:
    uses = (GAINS[gain], OTHERS[other]) if is_first else (OTHERS[other], GAINS[gain])

    def call(x: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = uses[0](x, weight)
        y = uses[1](y + functional.linear(torch.tanh(functional.linear(y, up)), down), weight)
        return torch.relu(y)

    example = OpExample("uses", call, (Data((3, 4)), Weight((4,)), Weight((5, 4)), Weight((4, 5))), "")
    program = trace_op(example)
    spec = derive(program)
    rng = Generator().manual_seed(0)
    assert soundness(program, spec, draw_weights(example, program, rng), draw_inputs(rng), rng) < 1e-9
