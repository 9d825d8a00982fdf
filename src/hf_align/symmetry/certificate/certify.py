"""The certificate: no derived symmetry changes the function, and no continuous one is missing.

Soundness is measured by applying a random element of every group. Completeness is counted: the rank of all symmetry
directions that the spec generates, against the nullity of the Jacobian of the outputs with respect to the parameters,
on a small random copy in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import scipy.linalg
import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize
from transformers import PretrainedConfig

from hf_align.symmetry.certificate.count import (
    are_null,
    jacobian,
    missing_directions,
    null_space,
    rows_of,
    without_derivative,
)
from hf_align.symmetry.certificate.directions import directions
from hf_align.symmetry.certificate.random_copy import (
    Weights,
    raise_epsilons,
    random_elements,
    random_inputs,
    random_weights,
    transform,
    with_eps,
    with_tokens,
)
from hf_align.symmetry.derive import derive
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.override_file import OverrideFile
from hf_align.symmetry.overrides import Review
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.symmetry.unseen import without_unseen
from hf_align.tracing.execute import run
from hf_align.tracing.modes import trace_modes
from hf_align.tracing.trace import Program, build_without_weights, trace

_EXACT = 1e-9
"""Relative changes below are rounding."""
_SEEN = 1e-6
"""A generated direction with more effect than that, over that of a random one, is none of the function's."""
_REACHED = 1e-6
"""Of a direction of unit length among weights that are not reached, what rounding leaves of it among those that are."""
_ATTEMPTS = 6
_TOKENS = 48
"""More than there are entries in a symmetric matrix as wide as a small copy is."""
_DRAWS = 5
"""Random elements, and as many random inputs, for soundness."""
_QUIET = 0.01
"""By what weights that only decide choices are made smaller for the count."""
_SHARES = (1.2, 0.8)
"""Outputs that the count looks at, for each parameter: the second share only if the first leaves more null directions
than are known."""

_NOTHING = 1e-300
_UNREVIEWED = Review("", OverrideFile(overrides=()))


@dataclass(frozen=True)
class Certificate:
    """What was measured on the copy.

    Attributes:
        max_error: largest change of an output under random elements, over the largest output.
        found: rank of the directions that the spec generates.
        nullity: dimensions in which the weights can move without any effect on the outputs.
        leak: largest effect of a generated direction, over that of a random one; zero up to rounding if all are true.
        missing: parameters that carry null directions which the spec does not generate, and how much of them.
        modes: the calls of the model that all of this holds for, by name.
        unread: parameters that none of these calls reads; they stand still.
    """

    model_type: str
    max_error: float
    found: int
    nullity: int
    leak: float
    missing: Mapping[str, float]
    unknown_ops: tuple[str, ...]
    modes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        return self.max_error < _EXACT

    @property
    def complete(self) -> bool:
        return self.found == self.nullity and self.leak < _SEEN

    def as_json(self) -> dict[str, object]:
        """The contract of `hf-align certify --json`."""
        return {
            "model_type": self.model_type,
            "sound": {"max_error": self.max_error},
            "complete": {"found": self.found, "nullity": self.nullity},
            "unknown_ops": list(self.unknown_ops),
            "missing": dict(self.missing),
            "modes": list(self.modes),
            "unread": list(self.unread),
        }


def certify(
    config: PretrainedConfig,
    *,
    traced: Program | None = None,
    review: Review = _UNREVIEWED,
    seed: int = 0,
    eps: float = 1e-2,
    positions: int = 10,
) -> Certificate:
    """Measure soundness and completeness of the derived spec of a small architecture.

    Weights that no input reaches (rows of tables beyond the contexts), and those that only decide choices and have no
    derivative, are left out of both counts. At some weights there are null directions that are gone at almost all
    others (a ReLU that never opens), and with few tokens there are some that are gone with more (on what depends on the
    token alone, a quadratic form may vanish): where the first count does not agree, others are drawn, with more tokens,
    until the smallest nullity is seen four times.

    Args:
        config: a small config (`shrink.py`): cost grows with the cube of the number of parameters.
        traced: one call to certify alone, of the config with its epsilons raised; all modes by default. Other
            epsilons in it are raised in place.
        review: overrides of the derived spec, which then is certified, with their calls.
        eps: what every norm's epsilon is raised to, so that no near-symmetry blurs the count.
        positions: tokens in each context.
    """
    config = with_eps(config, eps)

    def derived(program: Program) -> tuple[Program, SymmetrySpec]:
        program = raise_epsilons(program, eps)
        spec = derive(program)
        return program, review(spec if traced is not None else without_unseen(spec, review.reviewed.unused))

    def called(config: PretrainedConfig) -> Program:
        if traced is not None:
            return trace(config, length=positions)
        return trace_modes(build_without_weights(config), review.reviewed.calls, length=positions)

    program, spec = derived(traced or called(config))
    drawn: list[_Count] = []
    for attempt in range(_ATTEMPTS):
        if attempt == 1 and (larger := with_tokens(config, _TOKENS)) is not None:
            program, spec = derived(called(larger))
            drawn.clear()
        shares = (sum(_SHARES),) if drawn else _SHARES
        drawn.append(_measure(program, spec, torch.Generator().manual_seed(seed + attempt), shares))
        fewest = min(drawn, key=lambda c: c.nullity)
        if not drawn[-1].error < _EXACT:
            fewest = drawn[-1]
            break
        if fewest.complete or sum(c.nullity == fewest.nullity for c in drawn) > 3:
            break
    return Certificate(
        model_type=program.config.model_type,
        max_error=fewest.error,
        found=len(fewest.span),
        nullity=fewest.nullity,
        leak=_leak(fewest.derivatives, fewest.span, torch.Generator().manual_seed(seed)),
        missing={} if fewest.complete else _missing(fewest),
        unknown_ops=tuple(spec.unknown_ops),
        modes=spec.modes,
        unread=spec.unread,
    )


@dataclass(frozen=True)
class _Count:
    """What one random copy shows.

    Attributes:
        error: of the outputs under random elements.
        span: orthonormal, [found, reached parameters].
        nullity: of the derivatives.
        missing: null directions less their part in the span, [missing, reached parameters].
        derivatives: of the outputs, [rows, reached parameters].
        reached: which parameters are counted, [parameters].
        sizes: entries of each parameter, by name.
    """

    error: float
    span: Tensor
    nullity: int
    missing: Tensor
    derivatives: Tensor
    reached: Tensor
    sizes: Mapping[str, int]

    @property
    def complete(self) -> bool:
        return len(self.span) == self.nullity


def _measure(program: Program, spec: SymmetrySpec, rng: Generator, shares: Sequence[float]) -> _Count:
    """One random copy, counted with so many outputs for each parameter, in steps while null directions are unknown."""
    weights = random_weights(spec, rng)
    errors = [soundness(program, spec, weights, random_inputs(program, rng), rng) for _ in range(_DRAWS)]
    error = float(torch.tensor(errors).max())
    quiet = {n: _QUIET * weights[n] for n in without_derivative(program)}  # else some experts are never chosen
    canonical = dict(CanonicalWeights(weights | quiet, spec.gauges))
    known = directions(spec, program, canonical)
    parameters = known.shape[1]
    derivatives, reached = known[:0], torch.zeros(parameters, dtype=torch.bool)
    for share in shares:
        count = math.ceil(share * parameters / rows_of(program)) + 1
        more, read = jacobian(program, canonical, [random_inputs(program, rng) for _ in range(count)], rng)
        derivatives, reached = torch.cat([derivatives, more]), reached | read
        span = _orthonormal(known[:, reached])
        nullity, missing = _null_directions(derivatives[:, reached], span)
        if len(span) == nullity:
            break
    sizes = {name: weight.numel() for name, weight in canonical.items()}
    return _Count(error, span, nullity, missing, derivatives[:, reached], reached, sizes)


def _null_directions(derivatives: Tensor, span: Tensor) -> tuple[int, Tensor]:
    """The nullity, and what of the null directions is not in the span."""
    if are_null(span, derivatives):
        missing = missing_directions(derivatives, span)
        return len(span) + len(missing), missing
    null = null_space(derivatives)
    return len(null), null - (null @ span.T) @ span


def soundness(
    program: Program, spec: SymmetrySpec, weights: Weights, inputs: dict[str, Tensor], rng: Generator
) -> float:
    """The largest change of a result under random elements of all groups, over the largest of its entries."""
    moved = transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng))
    runs = run(program, weights, inputs), run(program, moved, inputs)
    results = [tuple(values[node] for values in runs) for node in program.interface if node.meta["val"].numel()]
    errors = [(before - after).abs().max() / before.abs().max().clamp_min(_NOTHING) for before, after in results]
    return float(torch.stack(errors).max())  # of which one that is no number is the largest


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows, which are of unit length or shorter; by QR with pivoting, for an SVD
    need not converge where so many rows are orthogonal."""
    kept = normalize(rows[rows.norm(dim=1) > _REACHED])
    if not len(kept):
        return kept
    basis, factor, _ = scipy.linalg.qr(kept.T.numpy(), mode="economic", pivoting=True)
    sizes = torch.from_numpy(factor).diagonal().abs()
    return torch.from_numpy(basis).T[: int((sizes > 1e-9 * sizes[0]).sum())].contiguous()


def _leak(jacobian: Tensor, span: Tensor, rng: Generator) -> float:
    if not len(span):
        return 0.0
    random = torch.randn(8, jacobian.shape[1], generator=rng, dtype=jacobian.dtype)
    random = random / random.norm(dim=1, keepdim=True)
    return float((jacobian @ span.T).norm(dim=0).max() / (jacobian @ random.T).norm(dim=0).mean())


def _missing(count: _Count) -> dict[str, float]:
    """How much of the null directions outside the span lies in each parameter (they sum to what is missing)."""
    rest = torch.zeros(len(count.reached), dtype=torch.float64)
    rest[count.reached] = count.missing.pow(2).sum(0)
    mass = rest.split(list(count.sizes.values()))
    found = {n: float(m.sum()) for n, m in zip(count.sizes, mass, strict=True)}
    return {n: round(m, 3) for n, m in sorted(found.items(), key=lambda x: -x[1]) if m > 1e-6}
