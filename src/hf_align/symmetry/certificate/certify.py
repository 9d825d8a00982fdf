"""The certificate: no derived symmetry changes the function, and none lies open.

Soundness is measured by applying a random element of every group. Completeness is counted: all directions in which the
weights can move without an effect, the null space of the Jacobian of the outputs with respect to the parameters, on a
small random copy in float64; and how many of them are moved, fixed or flat (`null_directions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor
from transformers import PretrainedConfig

from hf_align.symmetry.certificate.alike import alike
from hf_align.symmetry.certificate.draws import draws, fewest, settled
from hf_align.symmetry.certificate.null_directions import NullDirections
from hf_align.symmetry.certificate.random_copy import (
    lower_limits,
    raise_epsilons,
    with_eps,
)
from hf_align.symmetry.certificate.rounding import EXACT
from hf_align.symmetry.certificate.soundness import measured_soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.derivation.unseen import without_unseen
from hf_align.symmetry.overrides.override_file import OverrideFile
from hf_align.symmetry.overrides.overrides import Review
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.modes import trace_modes
from hf_align.tracing.program import Program
from hf_align.tracing.trace import trace

_LEAK = 1e-6
"""A direction of a group or a fibre with more effect than that, over that of a random one, is no symmetry."""
_TOKENS = 10
"""In each context."""
_UNREVIEWED = Review("", OverrideFile(overrides=()))


@dataclass(frozen=True)
class Certificate:
    """What was measured on the copy.

    Attributes:
        max_error: largest change of an output under random elements, over the largest output.
        moved: dimensions of the groups: alignment finds where B lies along them.
        fixed: dimensions of the fibres of the canonical form: the gauges remove them.
        flat: dimensions that change no mean of canonical weights, so that nothing has to be done about them.
        nullity: dimensions in which the weights can move without any effect on the outputs.
        leak: largest effect of a found direction, over that of a random one; zero up to rounding if all are true.
        missing: parameters that carry open directions, and how much of them.
        alike: spaces whose element could differ along another space, as from expert to expert, and that other.
        modes: the calls of the model that all of this holds for, by name.
        unread: parameters that none of these calls reads; they stand still.
        untried: lines of the model's own code that none of these calls could send another way, and other arguments may.
        not_counted: why null directions were not counted, where they were not; then the counts say nothing.
        undecided: where rounding alone changes the outputs as much, so that they say nothing of the symmetries.
        lacking: lists of layers of which the copy has fewer kinds than the model: so many, of so many. Nothing is shown
            of the others.
    """

    model_type: str
    max_error: float
    moved: int
    fixed: int
    flat: int
    nullity: int
    leak: float
    missing: Mapping[str, float]
    unknown_ops: tuple[str, ...]
    modes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    not_counted: str = ""
    undecided: str = ""
    alike: tuple[tuple[str, str], ...] = ()
    lacking: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def found(self) -> int:
        """All that is not open."""
        return self.moved + self.fixed + self.flat

    @property
    def open(self) -> int:
        """Dimensions along which A and B lie apart for no reason, and nothing brings them together."""
        return self.nullity - self.found

    @property
    def sound(self) -> bool:
        return self.max_error < EXACT

    @property
    def complete(self) -> bool:
        return not self.not_counted and self.open == 0 and self.leak < _LEAK and not self.alike

    def as_json(self) -> dict[str, object]:
        """The contract of `hf-align certify --json`."""
        counts = {"moved": self.moved, "fixed": self.fixed, "flat": self.flat, "open": self.open}
        return {
            "model_type": self.model_type,
            "sound": {"max_error": self.max_error, "undecided": self.undecided},
            "complete": {"not_counted": self.not_counted}
            if self.not_counted
            else {**counts, "found": self.found, "nullity": self.nullity},
            "unknown_ops": list(self.unknown_ops),
            "missing": dict(self.missing),
            "alike": [list(pair) for pair in self.alike],
            "modes": list(self.modes),
            "unread": list(self.unread),
            "untried": list(self.untried),
            "lacking": {path: list(kinds) for path, kinds in self.lacking.items()},
        }


def certify(
    config: PretrainedConfig,
    *,
    traced: Program | None = None,
    review: Review = _UNREVIEWED,
    eps: float = 1e-2,
    most: float = math.inf,
) -> Certificate:
    """Measure soundness and completeness of the derived spec of a small architecture.

    Weights that no input reaches (rows of tables beyond the contexts), and those that only decide choices and have no
    derivative, are left out of both counts. Where a first count leaves open directions, it is repeated (`draws.py`).

    Args:
        config: a small config (`shrink.py`): cost grows with the cube of the number of parameters.
        traced: one call to certify alone, of the config with its epsilons raised; all modes by default. Other
            epsilons in it are raised in place, and limits lowered.
        review: overrides of the derived spec, which then is certified, with their calls.
        eps: what every norm's epsilon is raised to, so that no near-symmetry blurs the count.
        most: parameters of which null directions are counted; of more, soundness alone is measured.
    """
    config = with_eps(config, eps)

    def derived(config: PretrainedConfig, known: Program | None = None) -> tuple[Program, SymmetrySpec]:
        if traced is not None:
            program = _measurable(known or trace(config, length=_TOKENS), eps)
            return program, review(derive(program))
        model = build_without_weights(config)
        program = _measurable(trace_modes(model, review.reviewed.calls, length=_TOKENS), eps)
        return program, review(without_unseen(derive(program), review.reviewed.unused, model))

    def uncounted(error: float, doubt: str, why: str) -> Certificate:
        return Certificate(program.config.model_type, error, 0, 0, 0, 0, 0.0, {}, tuple(spec.unknown_ops), spec.modes,
                           spec.unread, spec.untried, why, doubt)  # fmt: skip

    copy = derived(config, traced)
    program, spec = copy
    parameters = sum(math.prod(spec.shape(name)) for name in spec.parameters)
    if parameters > most:
        why = f"{parameters} parameters are more than the {most:.0f} of which null directions are counted"
        return uncounted(*measured_soundness(program, spec, torch.Generator().manual_seed(0)), why)
    drawn, error, doubt = list[NullDirections](), 0.0, ""
    for draw in draws(config, copy, derived):
        program, spec = draw.program, draw.spec
        seen, doubt = measured_soundness(program, spec, draw.rng)
        error = max(error, seen) if seen < EXACT else seen
        if math.isnan(error):
            return uncounted(error, doubt, "its outputs are no numbers")
        try:
            drawn.append(draw.count())
        except OverflowError as overflow:
            return uncounted(error, doubt, str(overflow))
        if not error < EXACT:
            drawn = drawn[-1:]
            break
        if settled(drawn):
            break
    best = fewest(drawn)
    return Certificate(
        model_type=program.config.model_type,
        max_error=error,
        moved=len(best.moved),
        fixed=len(best.fixed),
        flat=len(best.flat),
        nullity=best.nullity,
        leak=_leak(best.derivatives, best.found, torch.Generator().manual_seed(0)),
        missing=best.by_parameter(),
        unknown_ops=tuple(spec.unknown_ops),
        modes=spec.modes,
        unread=spec.unread,
        untried=spec.untried,
        undecided=doubt,
        alike=tuple(alike(*copy, torch.Generator().manual_seed(0))),
    )


def _measurable(program: Program, eps: float) -> Program:
    """A program without near-symmetries."""
    return lower_limits(raise_epsilons(program, eps))


def _leak(jacobian: Tensor, span: Tensor, rng: Generator) -> float:
    if not len(span):
        return 0.0
    random = torch.randn(8, jacobian.shape[1], generator=rng, dtype=jacobian.dtype)
    random = random / random.norm(dim=1, keepdim=True)
    return float((jacobian @ span.T).norm(dim=0).max() / (jacobian @ random.T).norm(dim=0).mean())
