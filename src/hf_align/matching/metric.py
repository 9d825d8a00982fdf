"""How much each weight counts when models are compared.

The entries of all weights count alike, but for the tables through which the residual stream meets an interface of the
model: vocabulary, positions, patches, labels. Their rows are pairs of points that correspond in any two models, yet a
head may be many times the size of an embedding, by nothing but how a model is trained, and then decides alone where the
stream is turned to. The other extreme, rows of equal size in all tables, gives a few patches the say of a vocabulary.
Between the two lies the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hf_align.checkpoints.ondemand import Computed
from hf_align.matching.anchors import anchored
from hf_align.matching.balanced import Balanced
from hf_align.matching.stream import residual
from hf_align.running.network import Weights


def weighted(models: Balanced) -> Balanced:
    """The models as weight matching compares them. Factors commute with every element, and are the same for all."""
    factors = _factors(models)
    return replace(models, models=tuple(_scaled(m, factors) for m in models.models))


def _scaled(weights: Weights, factors: Mapping[str, float]) -> Weights:
    def compute(name: str) -> Tensor:
        return factors[name] * weights[name] if name in factors else weights[name]

    return Computed(weights, compute)


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
