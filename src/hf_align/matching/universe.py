"""More than two models: all in one basis, and no model before another.

The universe is a basis in which every model has an element, so that going from A to B and on to C is going from A to C
(cycle consistency; Crisostomi et al., arXiv 2405.17897). It is found by generalised Procrustes analysis (Gower 1975):
every model is matched to the mean of all, in turn for all of them at once, which never lowers the length of their sum.
It starts from the model that agrees best with all others, and ends in its basis: the order of the models is nowhere
used.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hf_align.checkpoints.ondemand import OnDemand
from hf_align.matching.balanced import Balanced
from hf_align.matching.cross import inner_product
from hf_align.matching.descent import Progress
from hf_align.matching.metric import weighted
from hf_align.matching.weights import descend
from hf_align.running.network import Weights
from hf_align.symmetry.alignment import MovedWeights, inverse
from hf_align.symmetry.elements import Element

_ROUNDS = 20
"""Alignments of every model with the mean at most: a stop for what would not converge."""
_CONVERGED = 1e-6
"""A round that raises the length of the mean by a smaller part of it is the last."""


class Mean(OnDemand):
    """The mean of models, tensor by tensor."""

    def __init__(self, models: Sequence[Weights]) -> None:
        super().__init__(models[0])
        self._models = models

    def __getitem__(self, name: str) -> Tensor:
        # In the order of size, so that rounding does not know the order of the models.
        tensors = sorted((m[name] for m in self._models), key=lambda t: float(t.norm()))
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total / len(tensors)


def match_universe(models: Balanced, progress: Progress | None = None) -> tuple[list[dict[str, Element]], int]:
    """The elements that bring every balanced model into one basis, and the number of rounds.

    Args:
        progress: called after each round with its number and |Σ g_i W_i|².
    """
    models = weighted(models)
    elements = _from_medoid(models)
    best, rounds = float("-inf"), 0
    for rounds in range(1, _ROUNDS + 1):
        mean = dict(Mean([MovedWeights(m, models.spec, e) for m, e in zip(models.models, elements, strict=True)]))
        length = len(elements) ** 2 * sum(float(t.square().sum()) for t in mean.values())
        if progress is not None:
            progress(rounds, length)
        if length - best <= _CONVERGED * length:
            break
        best = length
        elements = [descend(replace(models, models=(mean, m)), e)[0]
                    for m, e in zip(models.models, elements, strict=True)]  # fmt: skip
    return elements, rounds


def _from_medoid(models: Balanced) -> list[dict[str, Element]]:
    """Each model matched to the one that agrees best with all others."""
    pairs = list(itertools.combinations(range(len(models.models)), 2))
    found: dict[tuple[int, int], dict[str, Element]] = {}
    agreement = [0.0] * len(models.models)
    for i, j in pairs:
        pair = replace(models, models=(models.models[i], models.models[j]))
        found[i, j], _ = descend(pair)
        value = inner_product(pair.spec, pair.a, pair.b, found[i, j], pair.processes)
        agreement[i] += value
        agreement[j] += value
    centre = max(range(len(models.models)), key=lambda i: agreement[i])
    return [
        {} if i == centre else found[centre, i] if centre < i else inverse(models.spec, found[i, centre])
        for i in range(len(models.models))
    ]
