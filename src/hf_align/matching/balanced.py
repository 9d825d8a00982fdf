"""Two models made comparable: where every kind of matching starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hf_align.matching.kept import KEPT, KeptWeights
from hf_align.matching.match import Match
from hf_align.symmetry.action import Elements
from hf_align.symmetry.alignment import MovedWeights, balance, compose, distance
from hf_align.symmetry.elements import Element
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.spec import SymmetrySpec

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Balanced:
    """Two models of one architecture in the canonical gauge, each balanced.

    Attributes:
        a, b: weights by name in memory, float64, computed as they are read.
        gauge_a, gauge_b: the elements that balanced them.
    """

    spec: SymmetrySpec
    a: Weights
    b: Weights
    gauge_a: Elements
    gauge_b: Elements

    @classmethod
    def of(cls, spec: SymmetrySpec, raw_a: Weights, raw_b: Weights) -> Balanced:
        """Fix all gauges of two models; raw weights of any float dtype are read several times."""
        (a, gauge_a), (b, gauge_b) = (_balanced(spec, raw) for raw in (raw_a, raw_b))
        return cls(spec, a, b, gauge_a, gauge_b)

    def moved(self, elements: Elements) -> Weights:
        """B, moved."""
        return MovedWeights(self.b, self.spec, elements)

    def match(self, elements: Elements, sweeps: int = 0) -> Match:
        """The match of the models as they were, from elements that move the balanced B to the balanced A."""
        return Match(
            a=self.gauge_a,
            b=compose(self.spec, elements, self.gauge_b),
            before=distance(self.a, self.b),
            after=distance(self.a, self.moved(elements)),
            sweeps=sweeps,
        )


def _balanced(spec: SymmetrySpec, raw: Weights) -> tuple[Weights, dict[str, Element]]:
    canonical = KeptWeights(CanonicalWeights(raw, spec.gauges), spec.parameters, most=0)
    gauge = balance(spec, canonical)
    return KeptWeights(MovedWeights(canonical, spec, gauge), spec.parameters, KEPT), gauge
