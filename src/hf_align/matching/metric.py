"""How much each weight counts when models are compared.

The entries of all weights count alike, but for the tables through which the residual stream meets an interface of the
model: vocabulary, positions, patches, labels. Their rows are pairs of points that correspond in any two models, yet a
head may be many times the size of an embedding, by nothing but how a model is trained, and then decides alone where the
stream is turned to. The other extreme, rows of equal size in all tables, gives a few patches the say of a vocabulary.
Between the two lies the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from hf_align.matching.anchors import anchored
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import Weights
from hf_align.matching.stream import residual


@dataclass(frozen=True)
class Scaled(Mapping[str, Tensor]):
    """Weights, some of them times a factor."""

    weights: Weights
    factors: Mapping[str, float]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.weights[name]
        return self.factors[name] * tensor if name in self.factors else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def weighted(models: Balanced) -> Balanced:
    """The models as weight matching compares them. Factors commute with every element, and are the same for all."""
    factors = _factors(models)
    return replace(models, models=tuple(Scaled(m, factors) for m in models.models))


def _factors(models: Balanced) -> dict[str, float]:
    """√(r/rₙ) for every table, where rₙ is the size of its rows over all models, and r that of all tables' rows."""
    stream = residual(models.spec)
    if stream is None:
        return {}
    size = models.spec.spaces[stream].size
    squares = {n: sum(float(m[n].square().sum()) for m in models.models) for n in anchored(models.spec, stream)}
    rows = {n: models.a[n].numel() // size * len(models.models) for n, s in squares.items() if s > 0}
    tables = {n: math.sqrt(squares[n] / rows[n]) for n in rows if rows[n] > len(models.models)}
    if not tables:
        return {}
    overall = math.sqrt(sum(squares[n] for n in tables) / sum(rows[n] for n in tables))
    return {n: math.sqrt(overall / row) for n, row in tables.items()}
