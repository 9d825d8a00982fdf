"""Activation matching (Verma & Elbayad, arXiv 2403.00986): the alignment under which two models read the same.

What features leave open (units that never fire, queries and keys, which no weight reads) the weights decide: they
take part with a small share of the objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hf_align.checkpoints.ondemand import Computed
from hf_align.matching.balanced import Balanced
from hf_align.matching.features import Moments, Site, as_weights, compare
from hf_align.matching.weights import descend
from hf_align.running.decoder_inputs import unlabelled
from hf_align.running.network import Batch, Network, Weights, batches
from hf_align.symmetry.elements import Element

_SHARE = 1e-3
"""Of the weights, against the features."""


def match_activations(models: Balanced, moments: Mapping[Site, Moments]) -> tuple[dict[str, Element], int]:
    """The elements that bring B's features closest to A's, and the number of sweeps.

    Args:
        moments: of what the balanced models read on the same inputs.
    """
    spec, a, b = as_weights(models.spec, moments)
    scale = math.sqrt(_SHARE * _size(a, b) / _size(models.a, models.b))
    both = replace(models.spec, parameters={**models.spec.parameters, **spec.parameters})
    ours, theirs = (_beside(w, scale, f) for w, f in ((models.a, a), (models.b, b)))
    return descend(replace(models, spec=both, models=(ours, theirs)), {})


def _beside(weights: Weights, scale: float, features: Weights) -> Weights:
    def compute(name: str) -> Tensor:
        return features[name] if name in features else scale * weights[name]

    return Computed(dict.fromkeys([*weights, *features]), compute)


def _size(a: Weights, b: Weights) -> float:
    """What the objective could reach."""
    return math.sqrt(math.prod(sum(float(t.square().sum()) for t in w.values()) for w in (a, b)))


def agreement(moments: Mapping[Site, Moments]) -> dict[str, float]:
    """The mean correlation of each feature with its counterpart, by the weight that reads it; constant ones left
    out."""
    found: dict[str, float] = {}
    for site, m in moments.items():
        matched: Tensor = m.correlation.diagonal()
        found[site.weight] = float(matched[matched != 0].mean()) if bool(torch.any(matched != 0)) else 0.0
    return found


def correlations(network: Network, a: Weights, b: Weights, data: Batch) -> dict[str, float]:
    """The mean correlation of what A and B read on the same inputs, by the weight that reads it."""
    inputs = unlabelled(data, network.config)
    return agreement(compare(network, network.placed(a), network.placed(b), batches(inputs)))
