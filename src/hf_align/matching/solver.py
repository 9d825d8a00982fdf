"""One step of weight matching solved, all others held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hf_align.matching.anchors import anchored
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import cross, inner_product, nearest
from hf_align.matching.head_families import HeadFamily
from hf_align.matching.heads import Pairing, best_fit, match_heads
from hf_align.matching.memory import Step, at_once, spaces_of, weights_of
from hf_align.matching.recurrent import meets_itself, nearest_step, unless_worse
from hf_align.matching.stream import Tables
from hf_align.matching.turns import match_turns, signed_beside
from hf_align.matching.visits import moved
from hf_align.runtime.devices import CPU, threads
from hf_align.runtime.processes import ALONE, Processes
from hf_align.symmetry.action import Elements
from hf_align.symmetry.alignment import MovedWeights, compose
from hf_align.symmetry.elements import Element, Power
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.groups.fit import fit
from hf_align.symmetry.spec import SymmetrySpec


@dataclass(frozen=True)
class Solution:
    """The best elements of a step.

    Attributes:
        agreement: ⟨A, gB⟩ over the weights that carry its space, where their products told it.
    """

    elements: Mapping[str, Element]
    agreement: float | None = None


@dataclass(frozen=True)
class Solver:
    """Two models, and with what they are matched.

    Attributes:
        tables: products that do not change.
        pairing: how heads are paired.
        most: bytes for steps side by side.
        permuted: by stream, and by the processes that share its products, those of weights that only permutations share
            with it, and these permutations.
    """

    models: Balanced
    tables: Tables
    pairing: Pairing
    most: int
    permuted: dict[tuple[str, Processes], tuple[Elements, Mapping[Power, Tensor]]] = field(default_factory=dict)

    @property
    def spec(self) -> SymmetrySpec:
        """That of the models."""
        return self.models.spec

    def solve(self, together: list[Step], elements: Elements) -> Sequence[Solution]:
        """Steps that do not see each other; by itself, the products of one are shared out."""
        if len(together) == 1 and isinstance(space := together[0], str) and self._is_plain(space):
            matrices = self._products(space, elements, self.models.processes)
            return [self.models.processes.by_the_first(lambda: self._nearest(space, matrices))]

        def solved(own: Sequence[Step]) -> list[Solution]:
            at_a_time = at_once(self.spec, together, self.most)
            if at_a_time == 1:
                return [self._one(step, elements) for step in own]
            for element in elements.values():
                element.prepare()
            with threads(at_a_time) as pool:
                return list(pool.map(lambda step: self._one(step, elements), own))

        return self.models.processes.spread(together, lambda step: _work(self.spec, step), solved) if together else []

    def objective(self, elements: Elements, last: Sequence[Step], solved: Mapping[Step, Solution]) -> float:
        """⟨A, gB⟩ over all weights; most of it is known where the products of the last step told it."""
        told = {step: agreement for step in last if (agreement := solved[step].agreement) is not None}
        known = {name for step in told for name in self._moved_whole(step)}
        others = [name for name in self.spec.parameters if name not in known]
        rest = inner_product(self.spec, self.models.a, self.models.b, elements, self.models.processes, others)
        return rest + (sum(told.values()) if known else 0.0)

    def _moved_whole(self, step: Step) -> set[str]:
        """The weights of a step if it moves every entry of each once, so that its products are all there is of them."""
        names = weights_of(self.spec, step)
        for name in names:
            moved = [b for b in self.spec.blocks(name) if [m.space for m in b.moves].count(str(step)) == 1]
            if sum(math.prod(f.size for f in b.factors) for b in moved) != math.prod(self.spec.shape(name)):
                return set()
        return names

    def _is_plain(self, space: str) -> bool:
        """Whether the products of its weights say which element is best."""
        others = signed_beside, meets_itself, _carries_others
        return not any(is_other(self.spec, space) for is_other in others)

    def _one(self, step: Step, elements: Elements) -> Solution:
        """The best elements of a step, all others held; of spaces that meet themselves, better ones."""
        spec, a, b = self.spec, self.models.a, self.models.b
        if isinstance(step, HeadFamily):
            found = match_heads(spec, step, a, b, elements, self.pairing)
            all_told = not step.meeting and not any(meets_itself(spec, s) for s in step.spaces)
            if all_told or self.pairing is not best_fit:
                return Solution(found)
            return Solution(unless_worse(spec, found, a, b, elements))
        if signed_beside(spec, step):
            return Solution(match_turns(spec, step, a, b, elements))
        if _carries_others(spec, step):
            return Solution(self._carried(step, elements))
        if meets_itself(spec, step):
            return Solution({step: nearest_step(spec, step, a, b, elements, self.models.device)})
        return self._nearest(step, self._products(step, elements))

    def _carried(self, space: str, elements: Elements) -> dict[str, Element]:
        """Units that take others along, in the order that is best for B as it is moved now, if that is better."""
        spec, a, b = self.spec, self.models.a, self.models.b
        matrices = cross(spec, space, a, MovedWeights(b, spec, elements), {})
        found = compose(spec, {space: nearest(spec.group(space), matrices, self.models.device)}, elements)
        return unless_worse(spec, {s: found[s] for s in (space, *spec.indexed_by(space)) if s in found}, a, b, elements)

    def _products(self, space: str, elements: Elements, processes: Processes = ALONE) -> dict[Power, Tensor]:
        """The cross matrices of a space, by power; those of a stream's tables are known, and what it says of weights
        that are permuted is known as long as the permutations stay."""
        names, known = list(self.spec.uses(space)), list[Mapping[Power, Tensor]]()
        device = self.models.device if processes.count == 1 else CPU
        if space in self.tables:
            beside = {name: {*self.spec.carried(name)} - {space} for name in names}
            tables = anchored(self.spec, space)
            still = [name for name in names if name not in tables and all(map(self._permutes, beside[name]))]
            around = {s: elements[s] for n in still for s in beside[n] if s in elements}
            known = [self.tables[space], self._of_permuted(space, still, around, processes)]
            told = {*tables, *still}
            names = [name for name in names if name not in told]
        found = cross(self.spec, space, self.models.a, self.models.b, elements, names, processes, device)
        for power, matrix in (item for matrices in known for item in matrices.items()):
            found[power] = found[power].add_(matrix.to(device)) if power in found else matrix.to(device, copy=True)
        return found

    def _permutes(self, space: str) -> bool:
        group = self.spec.spaces[space].group
        return group is None or isinstance(group, ScaledPermutation)

    def _of_permuted(
        self, space: str, names: list[str], around: Elements, processes: Processes
    ) -> Mapping[Power, Tensor]:
        kept = self.permuted.get((space, processes))
        if kept is None or not _same(kept[0], around):
            kept = around, cross(self.spec, space, self.models.a, self.models.b, around, names, processes)
            self.permuted[space, processes] = kept
        return kept[1]

    def _nearest(self, space: str, matrices: Mapping[Power, Tensor]) -> Solution:
        element = nearest(self.spec.group(space), matrices, self.models.device)
        place = next(iter(matrices.values())).device
        return Solution({space: element}, float(fit(element.to(place), matrices).sum()))


def _carries_others(spec: SymmetrySpec, space: str) -> bool:
    """Whether units of a space have spaces of their own, which go where they go."""
    inside = [spec.spaces[name].group for name in spec.indexed_by(space)]
    return spec.group(space).permutes and any(group is not None for group in inside)


def _same(before: Elements, after: Elements) -> bool:
    return before.keys() == after.keys() and not any(moved(before[s], element, 0.0) for s, element in after.items())


def _work(spec: SymmetrySpec, step: Step) -> int:
    """About how much there is to do: products of weights along the step's spaces."""
    return sum(math.prod(spec.shape(name)) * spec.spaces[s].size for s in spaces_of(step) for name in spec.uses(s))
