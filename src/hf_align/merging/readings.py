"""The least squares of weights that read the same, from what is read alone.

A linear map that is to give, on what the merged model reads, what other maps give on what the models read, is found
from the products of the inputs: the results need not be computed, and all weights share the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx

from hf_align.merging.fits import Fit, WeightFit, mean_of_values, of_rank_each, ridge, spectrum_of
from hf_align.merging.lockstep import Lockstep, Lookup
from hf_align.merging.sites import Site
from hf_align.running.network import Gram, Network, Weights

_ROUNDING = 1e-6
"""What a weight may be from the mean of the models' and count as that, against its size."""


def reading(site: Site) -> tuple[fx.Node, fx.Node | None, bool]:
    """What sites have in common that can share the sums: the value and the way it is read, and whether with a bias."""
    return site.value, site.node if site.is_convolution else None, site.bias is None


def fits_of(sites: Iterable[Site], network: Network, models: Sequence[Weights], merged: Weights,
            ranks: Mapping[str, int | None]) -> dict[fx.Node, Fit]:  # fmt: skip
    """The fits of sites, by the first node of each: of all together that share a reading and aim at nothing else."""
    found: dict[fx.Node, Fit] = {}
    alike: dict[object, list[Site]] = {}
    for site in sites:
        if site.beside or not site.is_whole:
            found[site.node] = WeightFit(site, network, merged, ranks.get(site.parameter))
        else:
            alike.setdefault((reading(site), ranks.get(site.parameter)), []).append(site)
    for each in alike.values():
        found[each[0].node] = ReadFit(each, network, models, merged, ranks.get(each[0].parameter))
    return found


class Reading:
    """What the merged model reads, and how far that is from what the models read.

    Args:
        site: any of those that read it.
        count: of the models.
    """

    def __init__(self, site: Site, network: Network, count: int) -> None:
        self._site, self._network = site, network
        self._own: dict[tuple[float, ...], list[Gram]] = {}
        self._apart = [self._sums() for _ in range(count)]

    def _sums(self) -> list[Gram]:
        return [self._network.gram() for _ in range(self._site.groups)]

    def add(self, lookups: Sequence[Lookup], shares: Sequence[float]) -> None:
        """Count one part of the inputs, of which the models have shares."""
        site, (*models, merged) = self._site, lookups
        read = site.rows(merged(site.value))
        own = site.with_ones(read)
        if tuple(shares) not in self._own:
            self._own[tuple(shares)] = self._sums()
        for gram, x in zip(self._own[tuple(shares)], own, strict=True):
            gram.add(x, x)
        for model, share, sums in zip(models, shares, self._apart, strict=True):
            apart = share * (site.rows(model(site.value)) - read)
            for each, x, y in zip(sums, own, apart, strict=True):
                each.add(x, y)

    @property
    def own(self) -> list[tuple[tuple[float, ...], Tensor]]:
        """XᵀX, [groups, n, n], where the models have some shares. A column of ones goes with a bias."""
        return [(shares, _stacked(grams)) for shares, grams in self._own.items()]

    @property
    def apart(self) -> list[Tensor]:
        """Xᵀ s (Xᵢ - X) of each model i and its share s, [groups, n, n]; no column of ones, for these do not differ."""
        return [_stacked(sums) for sums in self._apart]


def _stacked(sums: Sequence[Gram]) -> Tensor:
    return torch.stack([each.total for each in sums])


class ReadFit(Fit):
    """The least squares of weights of one reading, towards the mean of what the models' weights give.

    Args:
        rank: that their changes may have; None for any.
    """

    def __init__(self, sites: Sequence[Site], network: Network, models: Sequence[Weights], merged: Weights,
                 rank: int | None = None) -> None:  # fmt: skip
        self._sites, self._models, self._merged, self._rank = sites, models, merged, rank
        self._reading = Reading(sites[0], network, len(models))
        self.names = frozenset[str]().union(*(site.names for site in sites))
        self.reads, self.ahead = (sites[0].value,), ()
        self.looked_up = frozenset(self.reads)
        self.makes_up = False

    def add(self, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float]) -> None:
        self._reading.add(lookups, shares)

    def solved(self) -> dict[str, Tensor]:
        grams, apart = self._reading.own, self._reading.apart
        whole = sum((x for _, x in grams[1:]), grams[0][1])
        # without a rank it is solved for the inputs, once for all weights
        towards: Callable[[Tensor], Tensor] = (lambda x: ridge(whole, x)) if self._rank is None else torch.clone
        own, apart = [(shares, towards(x)) for shares, x in grams], [towards(x) for x in apart]
        found: dict[str, Tensor] = {}
        for site in self._sites:
            *models, merged = (site.found_in(w).to(whole.device) for w in (*self._models, self._merged))
            step = torch.zeros_like(merged)
            for x, model in zip(apart, models, strict=True):
                step.baddbmm_(x, model[:, : site.inputs])
            for shares, x in own:
                missing = mean_of_values(models, shares) - merged
                if float(missing.norm()) > _ROUNDING * float(merged.norm()):
                    step.baddbmm_(x, missing)
            if self._rank is not None:
                step, found[spectrum_of(site.parameter)] = of_rank_each(whole, step, self._rank, site.inputs)
            found |= site.named(merged + step)
        return found
