"""Weight matching: the alignment that brings B's weights closest to A's (Git Re-Basin, arXiv 2209.04836, section 3.2;
Theus et al., 2506.22712, section 4), over whatever groups the spec has.

The spaces are visited in turn, each solved exactly with all others held still (better than it was, if it meets itself
in a weight), until the objective ⟨A, gB⟩ no longer
rises. It never falls. Steps that meet in no weight, layers mostly, are spread over processes, and over the threads of
each; of a step by itself, the residual stream, the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_align.devices import CPU
from hf_align.matching.anchors import start
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import Weights, cross, inner_product, nearest
from hf_align.matching.head_families import HeadFamily, head_families
from hf_align.matching.heads import Pairing, best_fit, match_heads
from hf_align.matching.memory import Step, at_once, room
from hf_align.matching.metric import weighted
from hf_align.matching.recurrent import meets_itself, nearest_step, unless_worse
from hf_align.matching.stream import alone, streams
from hf_align.matching.turns import match_turns, signed_beside
from hf_align.processes import ALONE, Processes
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import PRIMAL, Element, Power
from hf_align.symmetry.spec import SymmetrySpec

_SWEEPS = 50
"""Visits of all spaces at most: a stop for what would not converge."""
_CONVERGED = 1e-7
"""A sweep that changes the objective by a smaller part of it is the last."""
_SLACK = 1e-6
"""The part of the objective by which its float32 sum may fall although every step raises it."""

Progress = Callable[[int, float], None]


def match_weights(
    models: Balanced, progress: Progress | None = None, pairing: Pairing = best_fit
) -> tuple[dict[str, Element], int]:
    """The elements that bring the balanced B closest to A, and the number of sweeps.

    Args:
        progress: called after each sweep with its number and the objective.
        pairing: how heads are paired.
    """
    wider = _as_allowed(models.spec)
    first = _projected(models.spec, match_weights(replace(models, spec=wider), None, pairing)[0]) if wider else None
    models = weighted(models)
    if first is None:
        first = start_streams(models.spec, models.a, models.b, models.processes, models.device)
    return descend(models.spec, models.a, models.b, first, progress=progress, pairing=pairing,
                   processes=models.processes, device=models.device)  # fmt: skip


def _as_allowed(spec: SymmetrySpec) -> SymmetrySpec | None:
    """The spec with all that the architecture allows; None where nothing smaller was chosen."""
    chosen = {name: replace(s, group=s.allowed, allowed=None) for name, s in spec.spaces.items() if s.allowed}
    return replace(spec, spaces={**spec.spaces, **chosen}) if chosen else None


def _projected(spec: SymmetrySpec, found: Elements) -> dict[str, Element]:
    """The elements nearest to those of larger groups: a better start than the tables, among which few are so near."""
    smaller = [name for name, space in spec.spaces.items() if space.allowed is not None and name in found]
    return {name: spec.group(name).nearest({PRIMAL: found[name].as_matrix()}) for name in smaller}


def start_streams(
    spec: SymmetrySpec, a: Weights, b: Weights, processes: Processes = ALONE, device: torch.device = CPU
) -> dict[str, Element]:
    """The elements of the streams that fit what both models share by construction."""
    found = {stream: start(spec, stream, a, b, processes, device) for stream in streams(spec)}
    return {stream: element for stream, element in found.items() if element is not None}


def steps_of(spec: SymmetrySpec, still: Collection[str] = ()) -> list[Step]:
    """What a sweep solves, in order: heads with what is inside them, then spaces by themselves, the residual last."""
    families = [t for t in head_families(spec) if not t.spaces & set(still)]
    return [*families, *(s for s in reversed(alone(spec, families)) if s not in still)]


def descend(
    spec: SymmetrySpec,
    a: Weights,
    b: Weights,
    elements: Elements,
    *,
    still: Collection[str] = (),
    progress: Progress | None = None,
    pairing: Pairing = best_fit,
    processes: Processes = ALONE,
    device: torch.device = CPU,
) -> tuple[dict[str, Element], int]:
    """Coordinate descent over spaces; the elements for B, and the number of sweeps.

    Args:
        elements: where it starts; spaces that are not named start from the identity.
        still: spaces that stay there. Of a tree of heads all move, or each by itself.
        pairing: how heads are paired; by anything but the best fit, the objective may fall on the way.
        processes: that solve it together, and all end with the same.
        device: where polar factors are computed; products are where the weights are.
    """
    elements = dict(elements)
    best = float("-inf")
    sweep = 0
    steps = steps_of(spec, still)
    runs = list(_independent(spec, steps))
    solver = _Solver(spec, a, b, pairing, processes, device, room(spec, steps))
    for sweep in range(1, _SWEEPS + 1):
        for together in runs:
            for found in solver.solve(together, elements):
                elements.update(found)
        objective = inner_product(spec, a, b, elements, processes)
        assert pairing is not best_fit or objective >= best - _SLACK * abs(best), "descent lowered its objective"
        if progress is not None:
            progress(sweep, objective)
        if abs(objective - best) <= _CONVERGED * abs(objective):
            break
        best = objective
    return elements, sweep


@dataclass(frozen=True)
class _Solver:
    """Two models, and with what they are matched.

    Attributes:
        pairing: how heads are paired.
        most: bytes for steps side by side.
    """

    spec: SymmetrySpec
    a: Weights
    b: Weights
    pairing: Pairing
    processes: Processes
    device: torch.device
    most: int

    def solve(self, together: list[Step], elements: Elements) -> Sequence[dict[str, Element]]:
        """Steps that do not see each other; by itself, the products of one are shared out."""
        if len(together) == 1 and isinstance(space := together[0], str) and self._is_plain(space):
            matrices = cross(self.spec, space, self.a, self.b, elements, processes=self.processes)
            return [{space: self.processes.by_the_first(lambda: self._nearest(space, matrices))}]

        def solved(own: Sequence[Step]) -> list[dict[str, Element]]:
            at_a_time = at_once(self.spec, together, self.most)
            if at_a_time == 1:
                return [self.one(step, elements) for step in own]
            with ThreadPoolExecutor(at_a_time) as threads:
                return list(threads.map(lambda step: self.one(step, elements), own))

        return self.processes.spread(together, lambda step: _work(self.spec, step), solved)

    def _is_plain(self, space: str) -> bool:
        """Whether the products of its weights say which element is best."""
        return not signed_beside(self.spec, space) and not meets_itself(self.spec, space)

    def one(self, step: Step, elements: Elements) -> dict[str, Element]:
        """The best elements of a step, all others held; of spaces that meet themselves, better ones."""
        if isinstance(step, HeadFamily):
            found = match_heads(self.spec, step, self.a, self.b, elements, self.pairing)
            quadratic = self.pairing is best_fit and any(meets_itself(self.spec, s) for s in step.spaces)
            return unless_worse(self.spec, found, self.a, self.b, elements) if quadratic else found
        if signed_beside(self.spec, step):
            return match_turns(self.spec, step, self.a, self.b, elements)
        if meets_itself(self.spec, step):
            return {step: nearest_step(self.spec, step, self.a, self.b, elements, self.device)}
        return {step: self._nearest(step, cross(self.spec, step, self.a, self.b, elements))}

    def _nearest(self, space: str, matrices: Mapping[Power, Tensor]) -> Element:
        return nearest(self.spec.group(space), matrices, self.device)


def _work(spec: SymmetrySpec, step: Step) -> int:
    """About how much there is to do: products of weights along the step's spaces."""
    spaces = step.spaces if isinstance(step, HeadFamily) else (step,)
    return sum(math.prod(spec.shape(name)) * spec.spaces[s].size for s in spaces for name in spec.uses(s))


def _independent(spec: SymmetrySpec, steps: list[Step]) -> Iterator[list[Step]]:
    """Runs of steps no two of which meet in a weight: layers, mostly. Each run is solved in parallel, with the result
    of one after the other."""
    run: list[Step] = []
    carried: set[str] = set()
    for step in steps:
        spaces = step.spaces if isinstance(step, HeadFamily) else (step,)
        weights = {name for s in spaces for name in spec.uses(s)}
        if run and carried & weights:
            yield run
            run, carried = [], set()
        run.append(step)
        carried |= weights
    if run:
        yield run
