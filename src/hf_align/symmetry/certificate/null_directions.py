"""Every direction in which canonical weights move without an effect is moved, fixed, flat, or open.

*Moved* is a tangent of the groups: alignment finds where B lies along it. *Fixed* is a tangent of the fibre of the
canonical form: the gauges have removed it. *Flat* is null at every mean of canonical weights: it changes no merge.
Nothing of this knows of ops. What is left is *open*: A and B lie somewhere along it, and nothing brings them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

from hf_align.symmetry.certificate.count import (
    Look,
    glances,
    jacobian,
    looks,
    moving,
    reached,
    telling_looks,
    without_any_effect,
    without_derivative,
)
from hf_align.symmetry.certificate.fibres import Fibres, fibres
from hf_align.symmetry.certificate.flat import POINTS, flat_directions
from hf_align.symmetry.certificate.kinks import on_both_sides, within_reach
from hf_align.symmetry.certificate.null_space import (
    are_hardly_seen,
    are_null,
    as_few_rows,
    missing_directions,
    null_space,
    without_effect,
)
from hf_align.symmetry.certificate.random_copy import SIZES, Weights, random_weights
from hf_align.symmetry.certificate.tangents import tangents
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.program import Program

_REACHED = 1e-6
"""Of a direction of unit length among weights that are not reached, what rounding leaves of it among those that are."""
_INDEPENDENT = 1e-9
"""Far above what rounding leaves of a direction less its part in the span of others."""
_ZERO = 1e-12
"""What rounding leaves of the effect of a null direction, relative to the largest of all; 1e-16 to 3e-12 were seen."""
_ZERO_OF_FOUND = 5e-15
"""The same for what was found with the very derivatives that show the effect."""
_CONTEXTS = 64
"""In which all rows of tables are looked up: a direction that moves others, too, has an effect without them."""
_SHARE = 1.1
"""Outputs that a first look at the weights sees, for each direction in which they may have an effect."""
_AGAIN = 2.0
"""Outputs that are looked at again, for each direction that had none."""
_IN_MANY = 4
"""Outputs that are looked at in each of many contexts."""
_SKETCH = 64
"""Random combinations of rows that are tried first, where they may depend on each other."""
_QUIET = 0.01
"""By what weights that only decide choices are made smaller: else some experts are never chosen."""


@dataclass(frozen=True)
class NullDirections:
    """Orthonormal bases of the four parts of a null space, orthogonal to each other, [directions, reached parameters].

    Each part holds what the parts before it do not span.

    Attributes:
        derivatives: of the outputs, or of combinations of them that show the same, [rows, reached parameters].
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
    """Those at random canonical weights; at smaller ones where the copy overflows.

    Args:
        thorough: at weights that were drawn with more care, where a first look has left open directions.

    Raises:
        OverflowError: at all of these weights derivatives are no numbers.
    """
    *larger, smallest = SIZES
    for size in larger:
        with suppress(OverflowError):
            return _null_directions(program, spec, rng, size=size, thorough=thorough)
    return _null_directions(program, spec, rng, size=smallest, thorough=thorough)


def _null_directions(
    program: Program, spec: SymmetrySpec, rng: Generator, *, size: float, thorough: bool
) -> NullDirections:
    weights = canonical_weights(program, spec, rng, size=size, around_kinks=thorough)
    moved, fixed = tangents(spec, weights), fibres(spec.gauges, weights)
    sizes = {name: weight.numel() for name, weight in weights.items()}
    contexts = sum(look.contexts for look in looks(program, sizes, _SHARE, spare=1))
    contexts = max(contexts, _CONTEXTS)
    read = reached(program, weights, contexts, rng)
    first = orthonormal(moved[:, read])
    second = beside(first, fixed.tangents[:, read])
    derivatives, rest = _beyond(program, weights, torch.cat([first, second]), read, contexts, rng)
    null, third = torch.cat([first, second, rest]), rest[:0]
    if len(rest):
        means = [*_means(program, spec, rng, size)]
        flat = flat_directions(program, means, _canonical(null, fixed, read), read, rng)
        # What a null direction has beyond the known ones is its part in the rest; computed so, it lies there exactly.
        third = orthonormal((flat @ rest.T) @ rest)
    left = beside(third, rest)
    return NullDirections(first, second, third, left, derivatives, read, sizes)


def _beyond(
    program: Program, weights: Weights, known: Tensor, read: Tensor, contexts: int, rng: Generator
) -> tuple[Tensor, Tensor]:
    """Derivatives by the weights that are read, and the null directions that are orthogonal to the known ones.

    One result that depends on all weights shows most. What it does not see moved is looked at again, and found anew
    with all that was looked at where some of it is hardly seen: what rounding has left in it of a direction with a
    small effect may have a larger one there.

    Args:
        contexts: in which it was found out what is read.
    """
    most = max(1, int(read.sum()) - len(known))
    glanced = glances(program, weights, rng)
    telling = [*telling_looks(program, _SHARE, spare=1, most=most, read=moving(glanced, weights))]
    seen = _of_read([jacobian(program, weights, telling, rng), *glanced.values()], read)
    rest = _others(seen, known)
    in_many = [Look(look.results, contexts, _IN_MANY) for look in telling]
    while len(rest):
        unseen, shown = _unseen(rest, program, weights, read, in_many, rng)
        seen = torch.cat([seen, _of_read(shown, read)])
        effects, zero = [rows[:, read] for rows in shown], _ZERO
        if len(unseen) < len(rest) and are_hardly_seen(rest, effects, zero=zero):
            seen = as_few_rows(seen)
            rest, before, zero = _others(seen, known), len(rest), _ZERO_OF_FOUND
            if len(rest) < before:
                continue
        return seen, without_effect(rest, effects, zero=zero)
    return seen, rest


def _unseen(
    directions: Tensor, program: Program, weights: Weights, read: Tensor, in_many: list[Look], rng: Generator
) -> tuple[Tensor, list[Tensor]]:
    """What of some directions moves no output, and the derivatives that were looked at, [outputs, parameters].

    Args:
        in_many: a look at few outputs of as many contexts as had to be for all rows of tables to be looked up.
    """
    shown = list[Tensor]()

    def at(look: Look) -> list[Tensor]:
        shown.append(jacobian(program, weights, [look], rng))
        return [shown[-1][:, read]]

    directions = without_effect(directions, [rows for look in in_many for rows in at(look)], zero=_ZERO)
    return without_any_effect(directions, program, at, _AGAIN, spare=1, zero=_ZERO), shown


def _of_read(shown: Sequence[Tensor], read: Tensor) -> Tensor:
    """The derivatives of results that depend on no other weights than those that are read, by these: only there must
    what is left of a direction of a group be null. In each look outputs are given the same size.

    Raises:
        OverflowError: at these weights some are no numbers, or too large.
    """
    sizes = [look.norm() for look in shown]
    if not all(size.isfinite() for size in sizes):
        raise OverflowError("its derivatives are no numbers")
    rows = torch.cat([look * (len(look) ** 0.5 / (size or 1)) for look, size in zip(shown, sizes, strict=True)])
    return rows[(rows[:, ~read] == 0).all(1)][:, read]


def _canonical(null: Tensor, fixed: Fibres, reached: Tensor) -> Tensor:
    """An orthonormal basis of the null directions along which canonical weights stay canonical."""
    whole = null.new_zeros(len(null), len(reached))
    whole[:, reached] = null
    return orthonormal(fixed.across(whole)[:, reached])


def canonical_weights(
    program: Program, spec: SymmetrySpec, rng: Generator, *, size: float = 1.0, around_kinks: bool = False
) -> Weights:
    """Random weights with every gauge fixed."""
    weights = random_weights(spec, rng, size)
    if around_kinks:
        weights = within_reach(program, spec, on_both_sides(program, spec, weights, rng), rng)
    quiet = {n: _QUIET * weights[n] for n in without_derivative(program)}
    return dict(CanonicalWeights(weights | quiet, spec.gauges))


def _means(program: Program, spec: SymmetrySpec, rng: Generator, size: float) -> Iterator[Weights]:
    for _ in range(POINTS):
        a, b = (canonical_weights(program, spec, rng, size=size) for _ in range(2))
        yield {name: (a[name] + b[name]) / 2 for name in a}


def _others(derivatives: Tensor, known: Tensor) -> Tensor:
    """The null directions that are orthogonal to the known ones; these need not be null where a rule is wrong."""
    if are_null(known, derivatives):
        return missing_directions(derivatives, known)
    null = null_space(derivatives)
    return beside(known, null)


def orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows of unit length or shorter.

    So many random combinations of rows span what the rows span as soon as one of them depends on those before it. An
    SVD need not converge where so many rows are orthogonal.
    """
    kept = normalize(rows[rows.norm(dim=1) > _REACHED])
    count = min(_SKETCH, len(kept))
    while len(kept):
        mix = torch.randn(count, len(kept), generator=Generator().manual_seed(0), dtype=kept.dtype)
        basis, factor = torch.linalg.qr((mix @ kept).T)
        sizes = factor.diagonal().abs()
        dependent = (sizes <= _INDEPENDENT * sizes.max()).nonzero()
        if len(dependent) or count in (len(kept), kept.shape[1]):
            return basis[:, : int(dependent[0]) if len(dependent) else count].T.contiguous()
        count = min(4 * count, len(kept), kept.shape[1])
    return kept


def beside(known: Tensor, rows: Tensor) -> Tensor:
    """An orthonormal basis of what rows span beyond the span of an orthonormal basis."""
    return orthonormal(rows - (rows @ known.T) @ known)
