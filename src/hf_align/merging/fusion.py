"""Fusion by maps that mix the units of B before the mean is taken: optimal transport (Singh & Jaggi, arXiv 1910.05653)
and semi-permutations (Theus et al., 2506.22712, section 3).

These maps are inexact: at weight one the merge is not B. They start from models that are matched, so that spaces whose
elements are dense (streams that turn, interiors of heads) are aligned by symmetries already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_align.matching.cross import cross
from hf_align.matching.features import Site, as_weights, compare, watch
from hf_align.matching.soft import blends, favourites, likeness, sinkhorn, units
from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.samples import Samples
from hf_align.running.network import batches
from hf_align.symmetry.action import Elements, act
from hf_align.symmetry.groups.fit import summed

TEMPERATURE = 0.05
"""Of cosines and correlations."""


def fused(models: Aligned, temperature: float = TEMPERATURE) -> Mix:
    """Units mixed by doubly stochastic maps that follow how alike their weights are."""
    likes = likeness(models.spec, models.a, models.b)
    return _mean_with(models, blends(models.spec, {n: sinkhorn(m, temperature) for n, m in likes.items()}))


def fused_by_activations(models: Aligned, samples: Samples, temperature: float = TEMPERATURE) -> Mix:
    """Units mixed by doubly stochastic maps that follow how their activations correlate; both models on A's samples."""
    a, b = (samples.network.placed(w) for w in (models.a, models.b))
    spec, first, second = as_weights(models.spec, compare(samples.network, a, b, batches(samples.each[0])))
    maps = {}
    for name in units(models.spec):
        if name in spec.spaces:
            total = summed(cross(spec, name, first, second, {}))
            maps[name] = sinkhorn(total / max(1, len(spec.uses(name))), temperature)
    return _mean_with(models, blends(models.spec, maps))


def _mean_with(models: Aligned, elements: Elements) -> Mix:
    def mix(name: str, weight: float) -> Tensor:
        return torch.lerp(models.a[name], act(models.b[name], name, models.spec, elements), weight)

    return mix


def semi_permuted(models: Aligned, samples: Samples) -> Mix:
    """Every unit of A meets the unit of B that is most like it, whoever else meets that one; what reads a unit of B is
    shared among all that do. Exact where no unit of B is left out."""
    chosen = {n: favourites(m) for n, m in likeness(models.spec, models.a, models.b).items()}
    shared = {n: m / m.sum(-2, keepdim=True).clamp_min(1) for n, m in chosen.items()}
    writing, reading = blends(models.spec, chosen), blends(models.spec, shared)
    one = next(batches(samples.each[0], 1))
    sites = set(watch(samples.network, samples.network.placed(models.a), one))

    def mix(name: str, weight: float) -> Tensor:
        read = {f.space for axis, segments in enumerate(models.spec.parameters[name]) if Site(name, axis) in sites
                for segment in segments for f in segment}  # fmt: skip
        return _mean_with(models, {n: (reading if n in read else writing)[n] for n in chosen})(name, weight)

    return mix
