"""Two models made comparable: where every kind of matching starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hf_align.matching.match import Match
from hf_align.symmetry.action import Elements, act
from hf_align.symmetry.alignment import balance, compose, distance
from hf_align.symmetry.elements import Element
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.spec import SymmetrySpec

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Balanced:
    """Two models of one architecture in the canonical gauge, each balanced.

    Attributes:
        a, b: weights by name in memory, float64.
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

    def moved(self, elements: Elements) -> dict[str, Tensor]:
        """B, moved."""
        return {n: act(t, n, self.spec, elements) for n, t in self.b.items()}

    def match(self, elements: Elements, sweeps: int = 0) -> Match:
        """The match of the models as they were, from elements that move the balanced B to the balanced A."""
        return Match(
            a=self.gauge_a,
            b=compose(self.spec, elements, self.gauge_b),
            before=distance(self.a, self.b),
            after=distance(self.a, self.moved(elements)),
            sweeps=sweeps,
        )


def _balanced(spec: SymmetrySpec, raw: Weights) -> tuple[dict[str, Tensor], dict[str, Element]]:
    canonical = CanonicalWeights(raw, spec.gauges)
    weights = {name: canonical[name].double() for name in spec.parameters}
    gauge = balance(spec, weights)
    return {n: act(t, n, spec, gauge) for n, t in weights.items()}, gauge
