"""Visits of steps that meet in no weight, layers mostly: of all that are due, or of a few that speak for the others."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hf_align.matching.cross import rise
from hf_align.matching.memory import Step, weights_of
from hf_align.matching.solver import Solution, Solver
from hf_align.matching.visits import Visits, moved
from hf_align.symmetry.elements import Element
from hf_align.symmetry.spec import SymmetrySpec

_NEIGHBOURS = 10
"""Layers, about, of which one in the midst tells what there is to gain in all."""


@dataclass(frozen=True)
class Sweep:
    """Where a descent stands.

    Attributes:
        elements: the best so far, by space.
        solved: what was found of each step when it was last visited.
    """

    solver: Solver
    visits: Visits
    elements: dict[str, Element]
    solved: dict[Step, Solution] = field(default_factory=dict)

    def through_all(self, runs: Iterable[Sequence[Step]], little: float | None) -> None:
        """Visit the steps of all runs; where it is said what gain is little, a few speak for their neighbours."""
        for run in runs:
            if little is None:
                self.through(run)
            else:
                self.through_few(run, little)

    def objective(self, steps: Sequence[Step]) -> float:
        """⟨A, gB⟩, of which the last step knows most where it was just visited."""
        last = [step for step in steps[-1:] if self.visits.is_current(step, self.elements)]
        return self.solver.objective(self.elements, last, self.solved)

    def through(self, run: Sequence[Step]) -> None:
        """Visit the steps that are due."""
        self.elements.update(self._solve(self._due(run)))

    def through_few(self, run: Sequence[Step], little: float) -> None:
        """Visit one of some neighbours first, and the others only where it gains more than this for all of them."""
        together = neighbours(self.solver.spec, self._due(run))
        first, others = self._solve([layers[0] for layers in together]), list[Step]()
        for layers in together:
            if layers[1:] and self._gain(layers[0]) * len(layers) <= little:
                for step in layers[1:]:
                    self.visits.solved(step, self.elements, {})
            else:
                others += layers[1:]
        self.elements.update(first | self._solve(others))

    def _due(self, run: Iterable[Step]) -> list[Step]:
        return [step for step in run if self.visits.is_due(step, self.elements)]

    def _solve(self, together: list[Step]) -> dict[str, Element]:
        """The best elements of these steps."""
        found = self.solver.solve(together, self.elements)
        for step, solution in zip(together, found, strict=True):
            self.visits.solved(step, self.elements, solution.elements)
            self.solved[step] = solution
        return {space: element for solution in found for space, element in solution.elements.items()}

    def _gain(self, step: Step) -> float:
        """By how much the objective changes with what was found of a step."""
        found = self.solved[step].elements.items()
        new = {space: element for space, element in found if moved(self.elements.get(space), element)}
        models = self.solver.models
        return abs(rise(models.spec, models.a, models.b, self.elements, new, models.processes))


def neighbours(spec: SymmetrySpec, steps: Sequence[Step]) -> list[list[Step]]:
    """Steps of one kind, those together that follow each other, in each list the one in the midst first; of few steps
    each is by itself."""
    kinds: dict[object, list[Step]] = defaultdict(list)
    for step in steps:
        kinds[tuple(sorted(spec.shape(name) for name in weights_of(spec, step)))].append(step)
    return [part for kind in kinds.values() for part in _parts(kind)]


def _parts(kind: list[Step]) -> Iterator[list[Step]]:
    count = len(kind) if len(kind) < _NEIGHBOURS else max(2, len(kind) // _NEIGHBOURS)
    ends = [part * len(kind) // count for part in range(count + 1)]
    for first, last in itertools.pairwise(ends):
        midst = (first + last) // 2
        yield [kind[midst], *kind[first:midst], *kind[midst + 1 : last]]
