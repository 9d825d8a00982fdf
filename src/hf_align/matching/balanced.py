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
    """Models of one architecture in the canonical gauge, each balanced.

    Attributes:
        models: weights by name in memory, float64, computed as they are read.
        gauges: the elements that balanced each.
    """

    spec: SymmetrySpec
    models: tuple[Weights, ...]
    gauges: tuple[Elements, ...]

    @classmethod
    def of(cls, spec: SymmetrySpec, *raw: Weights) -> Balanced:
        """Fix all gauges of each model; raw weights of any float dtype are read several times."""
        models, gauges = zip(*(_balanced(spec, weights) for weights in raw), strict=True)
        return cls(spec, models, gauges)

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
            before=distance(self.a, self.models[model]),
            after=distance(self.a, self.moved(elements, model)),
            sweeps=sweeps,
        )


def _balanced(spec: SymmetrySpec, raw: Weights) -> tuple[Weights, dict[str, Element]]:
    canonical = KeptWeights(CanonicalWeights(raw, spec.gauges), spec.parameters, most=0)
    gauge = balance(spec, canonical)
    return KeptWeights(MovedWeights(canonical, spec, gauge), spec.parameters, KEPT), gauge
