"""Weight matching: the alignment that brings B's weights closest to A's (Git Re-Basin, arXiv 2209.04836, section 3.2;
Theus et al., 2506.22712, section 4), over whatever groups the spec has.

The spaces are visited in turn, each solved exactly with all others held still (better than it was, if it meets itself
in a weight), until none has a neighbour that moved, or the objective ⟨A, gB⟩ no longer rises. It never falls. Steps
that meet in no weight, layers mostly, are spread over processes, and over the threads of each; of a step by itself, the
residual stream, the weights are. In the second sweep a few of many layers are visited first: where one gains next to
nothing, its neighbours are left as they are. Later ones begin with streams turned further than the sweep before has
brought them (`momentum.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

from hf_align.matching.anchors import start
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import inner_product, over_weights
from hf_align.matching.descent import Progress
from hf_align.matching.head_families import head_families
from hf_align.matching.heads import Pairing, best_fit
from hf_align.matching.memory import Step, room, weights_of
from hf_align.matching.metric import weighted
from hf_align.matching.momentum import Momentum
from hf_align.matching.solver import Solver
from hf_align.matching.stream import alone, products_of_tables, streams
from hf_align.matching.sweep import Sweep
from hf_align.matching.visits import Visits
from hf_align.symmetry.action import Elements, as_gain
from hf_align.symmetry.elements import PRIMAL, Element
from hf_align.symmetry.spec import SymmetrySpec

_SWEEPS = 50
"""Visits of all spaces at most: a stop for what would not converge."""
_CONVERGED = 1e-5
"""A sweep that changes the objective by a smaller part of it is the last, unless that is more than is left to gain: of
copies, all is found."""
_AGAIN = 2
"""The sweep in which models that are alike gain next to nothing in most layers. Of others, units go on changing places
now and then, of which a few layers tell nothing."""
_LITTLE = 1e-6
"""The part of the objective that some layers may leave to gain, judged by one of them."""
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
        first: spaces that are not named start from the identity; by default from what the tables say of them. Where B
            as it is lies nearer than what is found from there, all start from the identity.
        pairing: how heads are paired; by anything but the best fit, the objective may fall on the way.
    """
    spec, tables = models.spec, products_of_tables(models)
    begins = {s: start(models, s, points) for s, points in tables.items()} if first is None else first
    elements = dict(begins)
    steps = steps_of(spec)
    runs = list(_independent(spec, steps))
    visits = Visits(spec, steps)
    solver = Solver(models, tables, pairing, room(spec, steps, models.device))
    now = Sweep(solver, visits, elements)
    momentum = Momentum(models, streams(spec) if pairing is best_fit else [], elements)
    best, sweep = float("-inf"), 0
    limit = cache(partial(_limit, models))
    for sweep in range(1, _SWEEPS + 1):
        now.through_all(runs, min(_LITTLE * abs(best), limit() - best) if sweep == _AGAIN else None)
        objective = now.objective(steps)
        was_too_far = momentum.takes_back(objective < best)
        objective = best if was_too_far else objective
        assert pairing is not best_fit or objective >= best - _SLACK * abs(best), "descent lowered its objective"
        if progress is not None:
            progress(sweep, objective)
        if was_too_far:
            continue
        gained, best = abs(objective - best), objective
        is_over = gained <= _CONVERGED * abs(objective) and gained <= limit() - objective
        is_over = is_over or not any(visits.is_due(step, elements) for step in steps)
        if is_over and (visits.is_confirmed or not visits.wake(elements)):
            break
        if sweep >= _AGAIN:
            momentum.go_beyond()
        else:
            momentum.keep()
    if begins and pairing is best_fit and inner_product(spec, models.a, models.b, {}, models.processes) > best:
        again, more = descend(models, {}, progress=progress)
        return again, sweep + more
    return elements, sweep


def _limit(models: Balanced) -> float:
    """(|A|² + |B|²) / 2, the objective where both are the same."""

    def squares(name: str) -> float:
        return sum(float(as_gain(side[name], name, models.spec).square().sum()) for side in (models.a, models.b))

    return over_weights(models.spec, models.spec.parameters, models.processes, squares) / 2


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
