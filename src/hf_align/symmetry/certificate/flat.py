"""Flat directions: null wherever a merge may lead, so that they change no mean.

Let δ be null at every weighted mean of canonical weights, and let A, B, A + aδ and B + bδ be canonical, as they are to
first order where δ = dC δ. The way from (1 - λ)A + λB to (1 - λ)(A + aδ) + λ(B + bδ) is a line along δ, and consists of
such means. So the function has no derivative along it, and both ends compute the same: nothing has to match or fix such
a direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator, Tensor

from hf_align.symmetry.certificate.count import (
    Look,
    jacobian,
    telling_looks,
    without_any_effect,
)
from hf_align.symmetry.certificate.null_space import without_effect
from hf_align.symmetry.certificate.random_copy import Weights
from hf_align.tracing.program import Program

POINTS = 8
"""Means that are tried: a direction that depends on the weights is seen by one already, up to chance."""
_ZERO = 1e-10
"""What rounding in null directions may leave of their effect at other weights, relative to the largest."""
_SHARE = 2.0
"""Outputs at all of these together, for each direction."""


def flat_directions(
    program: Program, means: Sequence[Weights], null: Tensor, reached: Tensor, rng: Generator
) -> Tensor:
    """What of some null directions, along which canonical weights stay canonical, is null at others as well.

    Args:
        means: `POINTS` weighted means of canonical weights.
        null: these, orthonormal, [directions, reached parameters].
        reached: which parameters are counted, [parameters].

    Returns:
        orthonormal, [flat, reached parameters].
    """

    def at_all(look: Look) -> list[Tensor]:
        return [jacobian(program, mean, [look], rng)[:, reached] for mean in means]

    if len(null):
        telling = telling_looks(program, _SHARE / POINTS, most=len(null))
        null = without_effect(null, [rows for look in telling for rows in at_all(look)], zero=_ZERO)
    return without_any_effect(null, program, at_all, _SHARE / POINTS, zero=_ZERO)
