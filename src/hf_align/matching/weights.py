"""Weight matching: the alignment that brings B's weights closest to A's (Git Re-Basin, arXiv 2209.04836, section 3.2;
Theus et al., 2506.22712, section 4), over whatever groups the spec has.

The spaces are visited in turn, each solved exactly with all others held still, until the objective ⟨A, gB⟩ no longer
rises. It never falls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

from hf_align.matching.anchors import start
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import Weights, cross, inner_product
from hf_align.matching.heads import Pairing, Tree, best_fit, match_heads, trees
from hf_align.matching.metric import weighted
from hf_align.matching.stream import alone, residual
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import Element
from hf_align.symmetry.spec import SymmetrySpec

_SWEEPS = 50
_STILL = 1e-7

Progress = Callable[[int, float], None]
Step = Tree | str
"""What is solved at once: heads with all that is inside, or a space by itself."""


def match_weights(
    models: Balanced, progress: Progress | None = None, pairing: Pairing = best_fit
) -> tuple[dict[str, Element], int]:
    """The elements that bring the balanced B closest to A, and the number of sweeps.

    Args:
        progress: called after each sweep with its number and the objective.
        pairing: how heads are paired.
    """
    models = weighted(models)
    start = start_residual(models.spec, models.a, models.b)
    return descend(models.spec, models.a, models.b, start, progress=progress, pairing=pairing)


def start_residual(spec: SymmetrySpec, a: Weights, b: Weights) -> dict[str, Element]:
    """The element of the residual stream that fits what both models share by construction."""
    stream = residual(spec)
    first = start(spec, stream, a, b) if stream is not None else None
    return {stream: first} if stream is not None and first is not None else {}


def descend(
    spec: SymmetrySpec,
    a: Weights,
    b: Weights,
    elements: Elements,
    *,
    still: Collection[str] = (),
    progress: Progress | None = None,
    pairing: Pairing = best_fit,
) -> tuple[dict[str, Element], int]:
    """Coordinate descent over spaces; the elements for B, and the number of sweeps.

    Args:
        elements: where it starts; spaces that are not named start from the identity.
        still: spaces that stay there. Of a tree of heads all move, or each by itself.
        pairing: how heads are paired; by anything but the best fit, the objective may fall on the way.
    """
    elements = dict(elements)
    families = [t for t in trees(spec) if not t.spaces & set(still)]
    single = [s for s in alone(spec, families) if s not in still]
    best = float("-inf")
    sweep = 0
    steps: list[Step] = [*families, *reversed(single)]
    for sweep in range(1, _SWEEPS + 1):
        for together in _independent(spec, steps):
            with ThreadPoolExecutor() as threads:
                for found in threads.map(lambda step: _solved(spec, step, a, b, elements, pairing), together):
                    elements.update(found)
        objective = inner_product(spec, a, b, elements)
        assert pairing is not best_fit or objective >= best - 1e-9 * abs(best), "descent lowered its objective"
        if progress is not None:
            progress(sweep, objective)
        if abs(objective - best) <= _STILL * abs(objective):
            break
        best = objective
    return elements, sweep


def _solved(
    spec: SymmetrySpec, step: Step, a: Weights, b: Weights, elements: Elements, pairing: Pairing
) -> dict[str, Element]:
    if isinstance(step, Tree):
        return match_heads(spec, step, a, b, elements, pairing)
    group = spec.spaces[step].group
    assert group is not None
    return {step: group.nearest(cross(spec, step, a, b, elements))}


def _independent(spec: SymmetrySpec, steps: list[Step]) -> Iterator[list[Step]]:
    """Runs of steps no two of which meet in a weight: layers, mostly. Each run is solved in parallel, with the result
    of one after the other."""
    run: list[Step] = []
    carried: set[str] = set()
    for step in steps:
        spaces = step.spaces if isinstance(step, Tree) else (step,)
        weights = {name for s in spaces for name in spec.uses(s)}
        if run and carried & weights:
            yield run
            run, carried = [], set()
        run.append(step)
        carried |= weights
    if run:
        yield run
