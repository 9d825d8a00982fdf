"""Two models made comparable: where every kind of matching starts."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from hf_align.matching.cross import over_weights
from hf_align.matching.match import Match
from hf_align.matching.scales import STILL, TURNS, settle_scales
from hf_align.matching.weight_cache import WeightCache, cached_on
from hf_align.running.network import Weights
from hf_align.runtime.devices import CPU
from hf_align.runtime.processes import ALONE, Processes
from hf_align.symmetry.action import Elements
from hf_align.symmetry.alignment import AlignedWeights, MovedWeights, balance, compose, squared_distance
from hf_align.symmetry.elements import Element
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.spec import SymmetrySpec


@dataclass(frozen=True)
class Balanced:
    """Models of one architecture in the canonical gauge, each balanced.

    Attributes:
        models: weights by name in memory, float32, computed as they are read; what is solved of them is float64.
        gauges: the elements that balanced each.
        processes: that match them together: what takes a `Balanced` is called by all of them.
        device: where its weights are given, and what is matched is solved.
    """

    spec: SymmetrySpec
    models: tuple[Weights, ...]
    gauges: tuple[Elements, ...]
    processes: Processes = ALONE
    device: torch.device = CPU

    @classmethod
    def of(
        cls, spec: SymmetrySpec, *raw: Weights, processes: Processes = ALONE, device: torch.device = CPU
    ) -> Balanced:
        """Fix all gauges of each model; raw weights of any float dtype are read several times."""
        most = cached_on(device, len(raw))
        models, gauges = zip(*(_balanced(spec, weights, processes, device, most) for weights in raw), strict=True)
        return cls(spec, models, gauges, processes, device)

    @property
    def a(self) -> Weights:
        """The first model: pairs are matched to it."""
        return self.models[0]

    @property
    def b(self) -> Weights:
        """The second model."""
        return self.models[1]

    def moved(self, elements: Elements, model: int = 1) -> Weights:
        """A model, moved."""
        return MovedWeights(self.models[model], self.spec, elements)

    def match(self, elements: Elements, sweeps: int = 0, model: int = 1) -> Match:
        """The match of two models as they were, from elements that move a balanced model to the balanced A."""
        return Match(
            a=self.gauges[0],
            b=compose(self.spec, elements, self.gauges[model]),
            before=self._distance(self.a, self.models[model]),
            after=self._distance(self.a, self.moved(elements, model)),
            sweeps=sweeps,
        )

    def measured(self, found: Match, *raw: Weights) -> Match:
        """A match that was found before, perhaps of other models, with the distances of these.

        Args:
            raw: A and B as they were.
        """
        a, b = (AlignedWeights(weights, self.spec, elements, self.device)
                for weights, elements in zip(raw, (found.a, found.b), strict=True))  # fmt: skip
        return replace(found, before=self._distance(self.a, self.b), after=self._distance(a, b))

    def _distance(self, one: Weights, other: Weights) -> float:
        return math.sqrt(over_weights(self.spec, self.a, self.processes, partial(squared_distance, one, other)))


def _balanced(
    spec: SymmetrySpec, raw: Weights, processes: Processes, device: torch.device, most: int
) -> tuple[Weights, dict[str, Element]]:
    fixed: Weights = CanonicalWeights(raw, spec.gauges)
    if device != CPU:  # it takes longer to bring a weight there than to balance it there again
        brought = WeightCache(fixed, spec.parameters, torch.float32, most, device)
        brought.fill()
        fixed, most = brought, 0
    canonical = WeightCache(fixed, spec.parameters, torch.float64, device=device)
    free = [name for name, space in spec.spaces.items() if space.group is not None and space.group.has_gauge]
    found = processes.spread(
        free,
        lambda space: sum(math.prod(spec.shape(name)) for name in spec.uses(space)),
        lambda own: [balance(spec, canonical, space) for space in own],
    )
    gauge = _settled(spec, canonical, dict(zip(free, found, strict=True)))
    moved = MovedWeights(canonical, spec, gauge)
    return WeightCache(moved, spec.parameters, torch.float32, most, device), gauge


def _settled(spec: SymmetrySpec, weights: Weights, gauge: dict[str, Element]) -> dict[str, Element]:
    """The gauge in which spaces that share a weight are balanced together: each moves what the next one reads, so they
    take turns until none moves any more. The sum of squares goes down with every turn."""
    coupled = [name for name in gauge if gauge.keys() & _beside(spec, name)]
    if all(isinstance(spec.group(name), ScaledPermutation) for name in coupled):
        return settle_scales(spec, weights, coupled, gauge)
    for _ in range(TURNS):
        moved = 0.0
        for name in coupled:
            step = balance(spec, MovedWeights(weights, spec, gauge), name)
            moved = max(moved, _size(spec, name, step))
            gauge[name] = step @ gauge[name]
        if moved < STILL:
            break
    return gauge


def _beside(spec: SymmetrySpec, name: str) -> set[str]:
    """The spaces that move the same entries of some weight."""
    found: set[str] = set()
    for block in itertools.chain.from_iterable(itertools.product(*spec.parameters[p]) for p in spec.uses(name)):
        spaces = {space for segment in block for f in segment for space in f.powers}
        found |= spaces if name in spaces else set()
    return found - {name}


def _size(spec: SymmetrySpec, name: str, step: Element) -> float:
    """How far an element without a permutation is from moving nothing."""
    rest = spec.group(name).identity(spec.index_shape(name)).tensors()
    return max(float((t - rest[k]).abs().max()) for k, t in step.tensors().items() if t.is_floating_point())
