"""The certificate: no derived symmetry changes the function, and no continuous one is missing.

Soundness is measured by applying a random element of every group. Completeness is counted: the rank of all symmetry
directions that the spec generates, against the nullity of the Jacobian of the outputs with respect to the parameters,
on a small random copy in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from transformers import PretrainedConfig

from hf_align.execute import execute
from hf_align.inputs import parts
from hf_align.symmetry.action import act
from hf_align.symmetry.canonical import (
    CanonicalWeights,
    Carried,
    CentreRows,
    CentreWriter,
    FoldIntoWriter,
    FoldNorm,
    FoldStatistics,
)
from hf_align.symmetry.count import jacobian, null_space, nullity, rows_of, without_derivative
from hf_align.symmetry.derive import derive
from hf_align.symmetry.elements import Element
from hf_align.symmetry.shears import shears
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.symmetry.translations import translations
from hf_align.trace import Program, op_name, trace

Weights = dict[str, Tensor]
_ATTEMPTS = 6
_ROWS = 100
"""Outputs that one run should give to the count: a run costs its ops, not its numbers."""
_DRAWS = 5
"""Random elements, and as many random inputs, for soundness."""
_QUIET = 0.01
"""By what weights that only decide choices are made smaller for the count."""
_SHARES = (1.2, 0.8)
"""Outputs that the count looks at, for each parameter: the second share only if the first leaves more null directions
than are known."""
_MOST = 16
"""Contexts in one run, at most."""


@dataclass(frozen=True)
class Certificate:
    """What was measured on the copy.

    Attributes:
        max_error: largest change of an output under random elements, over the largest output.
        found: rank of the directions that the spec generates.
        nullity: dimensions in which the weights can move without any effect on the outputs.
        leak: largest effect of a generated direction, over that of a random one; zero up to rounding if all are true.
        missing: parameters that carry null directions which the spec does not generate, and how much of them.
    """

    model_type: str
    max_error: float
    found: int
    nullity: int
    leak: float
    missing: Mapping[str, float]
    unknown_ops: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return self.max_error < 1e-9

    @property
    def complete(self) -> bool:
        return self.found == self.nullity

    def as_json(self) -> dict[str, object]:
        """The contract of `hf-align certify --json`."""
        return {
            "model_type": self.model_type,
            "sound": {"max_error": self.max_error},
            "complete": {"found": self.found, "nullity": self.nullity},
            "unknown_ops": list(self.unknown_ops),
            "missing": dict(self.missing),
        }


def certify(config: PretrainedConfig, *, seed: int = 0, eps: float = 1e-2, positions: int = 10) -> Certificate:
    """Measure soundness and completeness of the derived spec of a small architecture.

    Weights that no input reaches (rows of tables beyond the contexts), and those that only decide choices and have no
    derivative, are left out of both counts. At some weights
    there are null directions that are gone at almost all others (a ReLU that never opens): where the first count does
    not agree, others are drawn until the smallest nullity is seen twice.

    Args:
        config: a small config (`shrink.py`): cost grows with the cube of the number of parameters.
        eps: what every norm's epsilon is raised to, so that no near-symmetry blurs the count.
        positions: tokens in each context.
    """
    config = with_eps(config, eps)
    program = raise_epsilons(trace(config, length=positions), eps)
    spec = derive(program)
    traced = next(iter(program.inputs)).meta["val"].shape[0]
    batch = min(_MOST, traced * math.ceil(_ROWS / rows_of(program)))
    if batch > traced:
        program = raise_epsilons(trace(config, batch=batch, length=positions, candidate=program.candidate), eps)
    drawn: list[Certificate] = []
    for attempt in range(_ATTEMPTS):
        drawn.append(_measure(program, spec, torch.Generator().manual_seed(seed + attempt)))
        fewest = min(drawn, key=lambda c: c.nullity)
        if not drawn[-1].sound:
            return drawn[-1]
        if fewest.complete or sum(c.nullity == fewest.nullity for c in drawn) > 1:
            break
    return fewest


def _measure(program: Program, spec: SymmetrySpec, rng: Generator) -> Certificate:
    weights = random_weights(spec, rng)
    error = max(soundness(program, spec, weights, random_inputs(program, rng), rng) for _ in range(_DRAWS))
    quiet = {n: _QUIET * weights[n] for n in without_derivative(program)}  # else some experts are never chosen
    canonical = dict(CanonicalWeights(weights | quiet, spec.gauges))
    rows = [_flatten(d, canonical) for d in generate(spec, program, canonical)]
    parameters = sum(w.numel() for w in canonical.values())
    directions = _unit(torch.stack(rows)) if rows else torch.zeros(0, parameters, dtype=torch.float64)
    derivatives, reached = directions[:0], torch.zeros(parameters, dtype=torch.bool)
    for share in _SHARES:
        runs = math.ceil(share * parameters / rows_of(program)) + 1
        more, read = jacobian(program, canonical, (random_inputs(program, rng) for _ in range(runs)), rng)
        derivatives, reached = torch.cat([derivatives, more]), reached | read
        span, all_directions = _orthonormal(directions[:, reached]), nullity(derivatives[:, reached])
        if len(span) == all_directions:
            break
    derivatives = derivatives[:, reached]
    missing = {} if len(span) == all_directions else _missing(null_space(derivatives), span, canonical, reached)
    return Certificate(
        model_type=program.config.model_type,
        max_error=error,
        found=len(span),
        nullity=all_directions,
        leak=_leak(derivatives, span, rng),
        missing=missing,
        unknown_ops=tuple(spec.unknown_ops),
    )


def with_eps(config: PretrainedConfig, eps: float) -> PretrainedConfig:
    """A copy whose every epsilon is `eps`."""
    config = copy.deepcopy(config)
    for part in parts(config):
        for key in list(vars(part)):
            if "eps" in key.lower() and isinstance(getattr(part, key), float):
                setattr(part, key, eps)
    return config


def raise_epsilons(program: Program, eps: float) -> Program:
    """Raise also the epsilons that the modelling code writes as numbers: without, a stream may be scaled at will."""
    for node in program.graph.nodes:
        if node.op == "call_function" and (op_name(node) == "add" or op_name(node).endswith("norm")):
            node.args = tuple(eps if isinstance(a, float) and 0 < a < eps else a for a in node.args)
    return program


def random_weights(spec: SymmetrySpec, rng: Generator) -> Weights:
    """Generic float64 weights: gains around one (they must not vanish), the rest around zero."""
    shapes = {name: spec.shape(name) for name in spec.parameters}
    noise = {n: 0.6 * torch.randn(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()}
    weights = {n: 1 - spec.gains[n] + t if n in spec.gains else t for n, t in noise.items()}
    variances = [g.variance for g in spec.gauges if isinstance(g, FoldStatistics)]
    return weights | {n: 0.5 + noise[n].abs() for n in variances}


def random_inputs(program: Program, rng: Generator) -> dict[str, Tensor]:
    """Random tokens or pixels for every input of a program."""
    shapes = {name: tuple(node.meta["val"].shape) for node, name in program.inputs.items()}
    return program.example.random(shapes, rng)


def random_elements(spec: SymmetrySpec, rng: Generator) -> dict[str, Element]:
    """A random element of every group."""
    return {s.name: s.group.random(spec.index_shape(s.name), rng) for s in spec.spaces.values() if s.group}


def transform(spec: SymmetrySpec, weights: Mapping[str, Tensor], elements: Mapping[str, Element]) -> Weights:
    """Every parameter moved."""
    return {n: act(w, n, spec, elements) for n, w in weights.items()}


def soundness(
    program: Program, spec: SymmetrySpec, weights: Weights, inputs: dict[str, Tensor], rng: Generator
) -> float:
    """The largest change of an output under random elements of all groups, over the largest output."""
    moved = transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng))
    before, after = execute(program, weights, inputs), execute(program, moved, inputs)
    return float((before - after).abs().max() / before.abs().max())


def generate(spec: SymmetrySpec, program: Program, weights: Weights) -> Iterator[Weights]:
    """Every continuous symmetry direction at canonical weights, as changes of some parameters."""
    yield from _group_directions(spec, weights)
    for gauge in spec.gauges:
        if isinstance(gauge, FoldNorm):
            yield from _gain_directions(gauge, weights)
        elif isinstance(gauge, FoldIntoWriter):
            yield from _writer_directions(gauge, weights)
        elif isinstance(gauge, FoldStatistics):
            yield from _statistics_directions(gauge, weights)
        elif isinstance(gauge, CentreWriter):
            yield from _mean_directions(gauge, weights)
        elif isinstance(gauge, CentreRows):
            yield from _row_directions(gauge, weights)
    yield from translations(program, weights)
    yield from shears(program, weights)


def _group_directions(spec: SymmetrySpec, weights: Weights) -> Iterator[Weights]:
    for space in spec.spaces.values():
        if space.group is None or not space.group.dimension:
            continue
        index = spec.index_shape(space.name)
        names = list(spec.uses(space.name))
        for tangent in space.group.tangents():
            for at in range(math.prod(index)):
                yield _derivative(spec, space.name, tangent, index, at, {n: weights[n] for n in names})


def _derivative(
    spec: SymmetrySpec, space: str, tangent: Tensor, index: tuple[int, ...], at: int, weights: Weights
) -> Weights:
    """d/dt of the action of 1 + tX at one index."""
    group = spec.spaces[space].group
    assert group is not None
    one = group.identity(index)
    where = torch.zeros(math.prod(index), dtype=torch.float64)
    where[at] = 1.0
    where = where.reshape(index)

    def moved(t: Tensor) -> Weights:
        element = one.shifted(t * where[..., None, None] * tangent)
        return {n: act(w, n, spec, {space: element}) for n, w in weights.items()}

    return torch.func.jvp(moved, (torch.zeros(()).double(),), (torch.ones(()).double(),))[1]


def _gain_directions(gauge: FoldNorm, weights: Weights) -> Iterator[Weights]:
    """γ by c, its readers by 1/c, channel by channel."""
    carriers = [Carried(gauge.gain, 0, 1), *(Carried(r.weight, r.axis, -1) for r in gauge.reads), *gauge.others]
    if gauge.bias and gauge.bias not in [c.weight for c in carriers]:
        carriers.append(Carried(gauge.bias, 0, 1))
    for one in torch.eye(len(weights[gauge.gain]), dtype=weights[gauge.gain].dtype):
        change: Weights = {}
        for carried in carriers:
            value = weights[carried.weight] + (gauge.offset if carried.weight == gauge.gain else 0.0)
            part = value - carried.scaled(value, 1 - carried.power * one)
            change[carried.weight] = change.get(carried.weight, 0) + part
        yield change


def _writer_directions(gauge: FoldIntoWriter, weights: Weights) -> Iterator[Weights]:
    """γ by c, what writes by 1/c, channel by channel."""
    written = [(gauge.weight, gauge.axis), *([(gauge.bias, 0)] if gauge.bias else [])]
    for channel in range(weights[gauge.gain].numel()):
        gain = torch.zeros_like(weights[gauge.gain])
        gain.view(-1)[channel] = weights[gauge.gain].view(-1)[channel]
        change = {gauge.gain: gain}
        for name, axis in written:
            change[name] = torch.zeros_like(weights[name])
            change[name].select(axis, channel).copy_(-weights[name].select(axis, channel))
        yield change


def _statistics_directions(gauge: FoldStatistics, weights: Weights) -> Iterator[Weights]:
    """At μ = 0 and σ² + ε = 1: μ by t and β by γt; σ² by t and γ by γt/2."""
    for one in torch.eye(len(weights[gauge.gain]), dtype=weights[gauge.gain].dtype):
        yield {gauge.mean: one, gauge.bias: one * weights[gauge.gain]}
        yield {gauge.variance: one, gauge.gain: one * weights[gauge.gain] / 2}


def _mean_directions(gauge: CentreWriter, weights: Weights) -> Iterator[Weights]:
    """w + 1 vᵀ along the axis that is written."""
    weight = weights[gauge.parameter]
    others = weight.numel() // weight.shape[gauge.axis]
    for row in torch.eye(others, dtype=weight.dtype):
        shape = [n for i, n in enumerate(weight.shape) if i != gauge.axis]
        yield {gauge.parameter: row.reshape(shape).unsqueeze(gauge.axis).expand_as(weight)}


def _row_directions(gauge: CentreRows, weights: Weights) -> Iterator[Weights]:
    """w + 1_r vᵀ along the axis that is written."""
    weight = weights[gauge.parameter]
    for row in gauge.entries():
        ones = torch.zeros(weight.shape[gauge.axis], dtype=weight.dtype).index_fill(0, row, 1.0)
        for other in torch.eye(weight.numel() // len(ones), dtype=weight.dtype):
            direction = torch.outer(ones, other)
            yield {gauge.parameter: (direction if gauge.axis == 0 else direction.T).reshape(weight.shape)}


def _flatten(change: Weights, weights: Weights) -> Tensor:
    return torch.cat([change.get(n, torch.zeros_like(w)).reshape(-1) for n, w in weights.items()])


def _orthonormal(directions: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows, which are of unit length or shorter."""
    if not directions.numel():
        return directions[:0]
    kept = _unit(directions[directions.norm(dim=1) > 1e-9])
    _, s, vh = torch.linalg.svd(kept, full_matrices=False)
    return vh[: int((s > 1e-9 * s[0]).sum())]


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)


def _leak(jacobian: Tensor, span: Tensor, rng: Generator) -> float:
    if not len(span):
        return 0.0
    random = torch.randn(8, jacobian.shape[1], generator=rng, dtype=jacobian.dtype)
    random = random / random.norm(dim=1, keepdim=True)
    return float((jacobian @ span.T).norm(dim=0).max() / (jacobian @ random.T).norm(dim=0).mean())


def _missing(null: Tensor, span: Tensor, weights: Weights, reached: Tensor) -> dict[str, float]:
    """How much of the null directions outside the span lies in each parameter (they sum to what is missing)."""
    rest = torch.zeros(len(reached), dtype=null.dtype)
    rest[reached] = (null - (null @ span.T) @ span).pow(2).sum(0)
    mass = rest.split([w.numel() for w in weights.values()])
    found = {n: float(m.sum()) for n, m in zip(weights, mass, strict=True)}
    return {n: round(m, 3) for n, m in sorted(found.items(), key=lambda x: -x[1]) if m > 1e-6}
