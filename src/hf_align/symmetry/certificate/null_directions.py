"""Every direction in which canonical weights move without an effect is moved, fixed, flat, or open.

*Moved* is a tangent of the groups: alignment finds where B lies along it. *Fixed* is a tangent of the fibre of the
canonical form: the gauges have removed it. *Flat* is null at every mean of canonical weights: it changes no merge.
Nothing of this knows of ops. What is left is *open*: A and B lie somewhere along it, and nothing brings them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import scipy.linalg
import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

from hf_align.symmetry.certificate.count import (
    are_null,
    jacobian,
    looks,
    missing_directions,
    null_space,
    without_derivative,
)
from hf_align.symmetry.certificate.fibres import Fibres, fibres
from hf_align.symmetry.certificate.flat import POINTS, flat_directions
from hf_align.symmetry.certificate.kinks import on_both_sides
from hf_align.symmetry.certificate.random_copy import Weights, random_weights
from hf_align.symmetry.certificate.tangents import tangents
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.program import Program

_REACHED = 1e-6
"""Of a direction of unit length among weights that are not reached, what rounding leaves of it among those that are."""
_INDEPENDENT = 1e-9
"""Far above what rounding leaves of a direction less its part in the span of others."""
_SHARES = (1.2, 0.8)
"""Outputs that the count looks at, for each parameter: the second share only if the first leaves more null directions
than are moved or fixed."""
_QUIET = 0.01
"""By what weights that only decide choices are made smaller: else some experts are never chosen."""


@dataclass(frozen=True)
class NullDirections:
    """Orthonormal bases of the four parts of a null space, orthogonal to each other, [directions, reached parameters].

    Each part holds what the parts before it do not span.

    Attributes:
        derivatives: of the outputs, [rows, reached parameters].
        reached: which parameters are counted, [parameters]: some input reaches them, and they have a derivative.
        sizes: entries of each parameter, by name.
    """

    moved: Tensor
    fixed: Tensor
    flat: Tensor
    open: Tensor
    derivatives: Tensor
    reached: Tensor
    sizes: dict[str, int]

    @property
    def found(self) -> Tensor:
        """All that is not open."""
        return torch.cat([self.moved, self.fixed, self.flat])

    @property
    def nullity(self) -> int:
        """Dimensions in which the weights can move without any effect on the outputs."""
        return len(self.found) + len(self.open)

    def by_parameter(self) -> dict[str, float]:
        """How much of the open directions lies in each parameter; they sum to how many there are."""
        mass = torch.zeros(len(self.reached), dtype=torch.float64)
        mass[self.reached] = self.open.pow(2).sum(0)
        found = {n: float(m.sum()) for n, m in zip(self.sizes, mass.split(list(self.sizes.values())), strict=True)}
        return {n: round(m, 3) for n, m in sorted(found.items(), key=lambda x: -x[1]) if m > 1e-6}


def null_directions(program: Program, spec: SymmetrySpec, rng: Generator, *, thorough: bool = False) -> NullDirections:
    """Those at random canonical weights.

    Args:
        thorough: look at all outputs at once, at weights that were drawn with more care, where a first look has left
            open directions.
    """
    weights = canonical_weights(program, spec, rng, around_kinks=thorough)
    moved, fixed = tangents(spec, weights), fibres(spec.gauges, weights)
    sizes = {name: weight.numel() for name, weight in weights.items()}
    size = sum(sizes.values())
    derivatives, reached = moved.new_zeros(0, size), torch.zeros(size, dtype=torch.bool)
    for share in (sum(_SHARES),) if thorough else _SHARES:
        more, read = jacobian(program, weights, looks(program, sizes, share, spare=1), rng)
        derivatives, reached = torch.cat([derivatives, more]), reached | read
        first = orthonormal(moved[:, reached])
        second = beside(first, fixed.tangents[:, reached])
        rest = _others(derivatives[:, reached], torch.cat([first, second]))
        if not len(rest):
            break
    null, third = torch.cat([first, second, rest]), rest[:0]
    if len(rest):
        known, means = null[: -len(rest)], _means(program, spec, rng)
        third = beside(known, flat_directions(program, means, _canonical(null, fixed, reached), reached, rng))
    left = beside(torch.cat([first, second, third]), rest)
    return NullDirections(first, second, third, left, derivatives[:, reached], reached, sizes)


def _canonical(null: Tensor, fixed: Fibres, reached: Tensor) -> Tensor:
    """An orthonormal basis of the null directions along which canonical weights stay canonical."""
    whole = null.new_zeros(len(null), len(reached))
    whole[:, reached] = null
    return orthonormal(fixed.across(whole)[:, reached])


def canonical_weights(program: Program, spec: SymmetrySpec, rng: Generator, *, around_kinks: bool = False) -> Weights:
    """Random weights with every gauge fixed."""
    weights = random_weights(spec, rng)
    if around_kinks:
        weights = on_both_sides(program, spec, weights, rng)
    quiet = {n: _QUIET * weights[n] for n in without_derivative(program)}
    return dict(CanonicalWeights(weights | quiet, spec.gauges))


def _means(program: Program, spec: SymmetrySpec, rng: Generator) -> Iterator[Weights]:
    for _ in range(POINTS):
        a, b = (canonical_weights(program, spec, rng) for _ in range(2))
        yield {name: (a[name] + b[name]) / 2 for name in a}


def _others(derivatives: Tensor, known: Tensor) -> Tensor:
    """The null directions that are orthogonal to the known ones; these need not be null where a rule is wrong."""
    if are_null(known, derivatives):
        return missing_directions(derivatives, known)
    null = null_space(derivatives)
    return beside(known, null)


def orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows of unit length or shorter, by QR with pivoting, for an SVD need not
    converge where so many rows are orthogonal."""
    kept = normalize(rows[rows.norm(dim=1) > _REACHED])
    if not len(kept):
        return kept
    basis, factor, _ = scipy.linalg.qr(kept.T.numpy(), mode="economic", pivoting=True)
    sizes = torch.from_numpy(factor).diagonal().abs()
    return torch.from_numpy(basis).T[: int((sizes > _INDEPENDENT * sizes[0]).sum())].contiguous()


def beside(known: Tensor, rows: Tensor) -> Tensor:
    """An orthonormal basis of what rows span beyond the span of an orthonormal basis."""
    return orthonormal(rows - (rows @ known.T) @ known)
