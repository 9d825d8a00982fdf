"""Regression mean (Jin et al., arXiv 2212.09849): of every matrix, the one whose outputs are closest to those of both
models, each on what its own matrix reads.

What no weight reads by a matrix product (tables, gains, biases, kernels) is averaged, and so is a tied weight, which is
a table as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hf_align.matching.features import Site, watch
from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.samples import Samples
from hf_align.merging.tensors import linear
from hf_align.running.network import Batch, Gram, Network, Weights, batches
from hf_align.runtime.devices import as_double

OFF_DIAGONAL = 0.9
"""By which the entries beside the diagonal of a Gram matrix are multiplied (section 4.1 there)."""
_RIDGE = 1e-6
"""Of the mean diagonal entry: inputs that were never active have none, and would make the solve singular."""


def regression_mean(models: Aligned, samples: Samples, off_diagonal: float = OFF_DIAGONAL) -> Mix:
    """((1-t)·Ga + t·Gb)⁻¹ ((1-t)·Ga·a + t·Gb·b) along the axis that is read, G the Gram matrices of what is read.

    All Gram matrices, float64, are held as the network holds sums.
    """
    network = samples.network
    both = zip((models.a, models.b), samples.each, strict=True)
    grams_a, grams_b = (grams(network, network.placed(w), x) for w, x in both)
    read = [site for site in grams_a if len(models.spec.parameters[site.weight]) == 2]
    tied = set(models.spec.ties.values())
    sites = {site.weight: site for site in read if site.weight not in tied}

    def mix(name: str, weight: float) -> Tensor:
        a, b = models.a[name], models.b[name]
        site = sites.get(name)
        if site is None:
            return linear(a, b, weight)
        first, second = (_shrunk(g[site], off_diagonal) for g in (grams_a, grams_b))
        return regress(a.movedim(site.axis, 0), b.movedim(site.axis, 0), first, second, weight).movedim(0, site.axis)

    return mix


def grams(network: Network, weights: Weights, inputs: Batch) -> Mapping[Site, Tensor]:
    """E[x xᵀ] of what every weight reads, [n, n] float64 on the CPU, given as they are asked for.

    Args:
        weights: by name in memory, placed for the network.
        inputs: arguments of `forward`, [examples, ...].
    """
    total: dict[Site, Gram] = {}
    counts: dict[Site, int] = {}
    for batch in batches(inputs):
        for site, x in watch(network, weights, batch).items():
            x = as_double(x)
            if site not in total:
                total[site] = network.gram()
            total[site].add(x, x)
            counts[site] = counts.get(site, 0) + len(x)
    return _Means(total, counts)


class _Means(Mapping[Site, Tensor]):
    def __init__(self, total: Mapping[Site, Gram], counts: Mapping[Site, int]) -> None:
        self._total = total
        self._counts = counts

    def __getitem__(self, site: Site) -> Tensor:
        return self._total[site].total.cpu() / self._counts[site]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._total)

    def __len__(self) -> int:
        return len(self._total)


def regress(a: Tensor, b: Tensor, gram_a: Tensor, gram_b: Tensor, weight: float) -> Tensor:
    """argmin over W of (1-t)·|Xa (W - a)|² + t·|Xb (W - b)|², for weights [n, m] and Gram matrices XᵀX [n, n].

    Computed as a + ((1-t)·Ga + t·Gb)⁻¹ t·Gb (b - a), which is exactly a where b is.
    """
    both = (1 - weight) * gram_a + weight * gram_b
    step = torch.linalg.solve(both, weight * gram_b @ (b - a).double())
    return (a.double() + step).to(a)


def _shrunk(gram: Tensor, off_diagonal: float) -> Tensor:
    """The Gram matrix with less beside its diagonal, and a little on it, so that what is never read is averaged."""
    sizes = gram.diagonal()
    return off_diagonal * gram + torch.diag((1 - off_diagonal) * sizes + _RIDGE * sizes.mean().clamp_min(1e-30))
