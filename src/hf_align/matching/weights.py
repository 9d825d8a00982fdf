"""Weight matching: the alignment that brings B's weights closest to A's (Git Re-Basin, arXiv 2209.04836, section 3.2;
Theus et al., 2506.22712, section 4), over whatever groups the spec has.

The spaces are visited in turn, each solved exactly with all others held still (better than it was, if it meets itself
in a weight), until none has a neighbour that moved, or the objective ⟨A, gB⟩ no longer rises. It never falls. Steps
that meet in no weight, layers mostly, are spread over processes, and over the threads of each; of a step by itself, the
residual stream, the weights are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from hf_align.matching.anchors import start
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import over_weights
from hf_align.matching.descent import Progress
from hf_align.matching.head_families import head_families
from hf_align.matching.heads import Pairing, best_fit
from hf_align.matching.memory import Step, room, spaces_of, weights_of
from hf_align.matching.metric import weighted
from hf_align.matching.recurrent import meets_itself
from hf_align.matching.solver import Solution, Solver
from hf_align.matching.stream import alone, products_of_tables
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import PRIMAL, Element
from hf_align.symmetry.spec import SymmetrySpec

_SWEEPS = 50
"""Visits of all spaces at most: a stop for what would not converge."""
_CONVERGED = 1e-5
"""A sweep that changes the objective by a smaller part of it is the last, unless that is more than is left to gain: of
copies, all is found."""
_STILL = 1e-7
"""An element that changes by a smaller part of its square has not moved: the objective changes by less."""
_SLACK = 1e-6
"""The part of the objective by which its float32 sum may fall although every step raises it."""


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
    return descend(weighted(models), first, progress=progress, pairing=pairing)


def _as_allowed(spec: SymmetrySpec) -> SymmetrySpec | None:
    """The spec with all that the architecture allows; None where nothing smaller was chosen."""
    chosen = {name: replace(s, group=s.allowed, allowed=None) for name, s in spec.spaces.items() if s.allowed}
    return replace(spec, spaces={**spec.spaces, **chosen}) if chosen else None


def _projected(spec: SymmetrySpec, found: Elements) -> dict[str, Element]:
    """The elements nearest to those of larger groups: a better start than the tables, among which few are so near."""
    smaller = [name for name, space in spec.spaces.items() if space.allowed is not None and name in found]
    return {name: spec.group(name).nearest({PRIMAL: found[name].as_matrix()}) for name in smaller}


def steps_of(spec: SymmetrySpec) -> list[Step]:
    """What a sweep solves, in order: heads with what is inside them, of that by itself what meets there, then spaces by
    themselves, the residual last."""
    families = head_families(spec)
    inside = [space for family in families for space in family.meeting]
    return [*families, *inside, *reversed(alone(spec, families))]


def descend(
    models: Balanced,
    first: Elements | None = None,
    *,
    progress: Progress | None = None,
    pairing: Pairing = best_fit,
) -> tuple[dict[str, Element], int]:
    """Coordinate descent over spaces; the elements for B, and the number of sweeps.

    Args:
        first: spaces that are not named start from the identity; by default from what the tables say of them.
        pairing: how heads are paired; by anything but the best fit, the objective may fall on the way.
    """
    spec, tables = models.spec, products_of_tables(models)
    elements = {s: start(models, s, points) for s, points in tables.items()} if first is None else dict(first)
    steps = steps_of(spec)
    runs = list(_independent(spec, steps))
    near = _neighbours(spec, steps)
    solver = Solver(models, tables, pairing, room(spec, steps))
    due, solved = set(steps), dict[Step, Solution]()
    best, sweep = float("-inf"), 0
    limit = cache(partial(_limit, models))
    for sweep in range(1, _SWEEPS + 1):
        for run in runs:
            together = [step for step in run if step in due]
            for step, solution in zip(together, solver.solve(together, elements), strict=True):
                due.discard(step)
                if any(_moves(elements.get(space), element) for space, element in solution.elements.items()):
                    due |= near[step]
                elements.update(solution.elements)
                solved[step] = solution
        objective = solver.objective(elements, steps[-1:], solved)
        assert pairing is not best_fit or objective >= best - _SLACK * abs(best), "descent lowered its objective"
        if progress is not None:
            progress(sweep, objective)
        gained = abs(objective - best)
        if not due or (gained <= _CONVERGED * abs(objective) and gained <= limit() - objective):
            break
        best = objective
    return elements, sweep


def _limit(models: Balanced) -> float:
    """(|A|² + |B|²) / 2, the objective where both are the same."""

    def squares(name: str) -> float:
        return float(models.a[name].square().sum() + models.b[name].square().sum())

    return over_weights(models.spec, models.spec.parameters, models.processes, squares) / 2


def _moves(before: Element | None, after: Element) -> bool:
    """Whether an element is another than before, by more than the objective would show."""
    if before is None or before.tensors().keys() != after.tensors().keys():
        return True
    pairs = zip(before.tensors().values(), after.tensors().values(), strict=True)
    return any(_differ(x, y) for x, y in pairs)


def _differ(x: Tensor, y: Tensor) -> bool:
    if not x.is_floating_point():
        return not torch.equal(x, y)
    return float((x - y).square().sum()) > _STILL * float(y.square().sum())


def _neighbours(spec: SymmetrySpec, steps: list[Step]) -> dict[Step, set[Step]]:
    """Whose best elements change where those of a step do: who meets it in a weight, and itself if it meets itself."""
    weights = {step: weights_of(spec, step) for step in steps}
    return {
        step: {other for other in steps if weights[step] & weights[other]
               and (other != step or any(meets_itself(spec, s) for s in spaces_of(step)))}
        for step in steps
    }  # fmt: skip


def _independent(spec: SymmetrySpec, steps: list[Step]) -> Iterator[list[Step]]:
    """Runs of steps no two of which meet in a weight: layers, mostly. Each run is solved in parallel, with the result
    of one after the other."""
    run: list[Step] = []
    carried: set[str] = set()
    for step in steps:
        weights = weights_of(spec, step)
        if run and carried & weights:
            yield run
            run, carried = [], set()
        run.append(step)
        carried |= weights
    if run:
        yield run
