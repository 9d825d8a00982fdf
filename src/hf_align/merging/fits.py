"""What is solved for together, and the least squares of one weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx

from hf_align.merging.lockstep import Lockstep, Lookup
from hf_align.merging.sites import Beside, Site, brought_back
from hf_align.running.network import Network, Weights
from hf_align.tracing.execute import run_node

RIDGE = 1e-3
"""Against the mean of the diagonal of the Gram matrix: a tenth and ten times of it end alike."""

_PADDING = 16
"""Rows that are added to a matrix before it is factored (`factor`)."""


class Fit(ABC):
    """Weights that are found together.

    Attributes:
        names: of the weights.
        reads: the values of the merged model that must be known.
        ahead: the ops whose results in the models are a target.
        looked_up: the values that must be held besides.
        makes_up: whether it makes up for errors of what was found before.
    """

    names: frozenset[str]
    reads: tuple[fx.Node, ...]
    ahead: tuple[fx.Node, ...]
    looked_up: frozenset[fx.Node]
    makes_up: bool

    @property
    def asked(self) -> frozenset[fx.Node]:
        """All values that must be held."""
        return self.looked_up.union(self.ahead)

    @abstractmethod
    def add(self, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float]) -> None:
        """Count one part of the inputs, looked up in the models and in their merge, which is the last.

        Args:
            shares: of each model in what is aimed at there.
        """

    @abstractmethod
    def solved(self) -> dict[str, Tensor]:
        """The weights by name, float32 on the CPU; and what is known of them, under names of its own."""


def missing_to_target(
    node: fx.Node, beside: Iterable[Beside], result: Tensor, lookups: Sequence[Lookup], steps: Lockstep,
    shares: Sequence[float],
) -> Tensor:  # fmt: skip
    """What the result of a node lacks to the mean of the models' results, and what lacks to the mean in all that is
    added to it."""
    *models, merged = lookups
    missing = mean_of_values([lookup(node) for lookup in models], shares) - result
    for other in beside:
        if steps.is_known(other.value):
            apart = mean_of_values([lookup(other.value) for lookup in models], shares) - merged(other.value)
            missing = missing + brought_back(other.way, apart, result, node, merged)
    return missing


class WeightFit(Fit):
    """The least squares of one weight, and of its bias.

    Args:
        rank: that the change of the weight may have; None for any.
    """

    def __init__(self, site: Site, network: Network, merged: Weights, rank: int | None = None) -> None:
        self._site, self._merged, self._rank = site, merged, rank
        self._grams = [network.gram() for _ in range(site.groups)]
        self._products = [network.gram() for _ in range(site.groups)]
        self.names = site.names
        self.reads, self.ahead = (site.value,), (site.node,)
        self.looked_up = frozenset((site.value, *(b.value for b in site.beside)))
        self.makes_up = bool(site.beside)

    def add(self, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float]) -> None:
        site, merged = self._site, lookups[-1]
        missing = missing_to_target(site.node, site.beside, run_node(site.node, merged), lookups, steps, shares)
        rows = site.with_ones(site.rows(merged(site.value)))
        for gram, product, x, y in zip(self._grams, self._products, rows, site.results(missing), strict=True):
            gram.add(x, x)
            product.add(x, y)

    def solved(self) -> dict[str, Tensor]:
        site, found = self._site, dict[str, Tensor]()
        gram, product = (torch.stack([each.total for each in sums]) for sums in (self._grams, self._products))
        if self._rank is None:
            step = ridge(gram, product)
        else:
            step, found[spectrum_of(site.parameter)] = of_rank_each(gram, product, self._rank, site.inputs)
        return site.named(site.found_in(self._merged).to(step.device) + step) | found


def spectrum_of(parameter: str) -> str:
    """What the singular values are called that a change was cut off from, which has a rank."""
    return f"{parameter} (singular values)"


def mean_of_values(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Σ s·x, which is x where all are."""
    first, *others = values
    return sum((s * (x - first) for s, x in zip(shares[1:], others, strict=True)), first)


def ridge(gram: Tensor, product: Tensor) -> Tensor:
    """(XᵀX + λ)⁻¹ XᵀY, [*, n, m], with λ as in `raised`; zero where X is."""
    return torch.cholesky_solve(product, factor(raised(gram, RIDGE)))


def factor(matrix: Tensor) -> Tensor:
    """L of a positive definite L Lᵀ, [*, n, n].

    A few rows are added: where n is a power of two, as widths are, columns fall onto the same lines of the cache, and
    LAPACK takes five times as long.
    """
    size = matrix.shape[-1]
    padded = torch.nn.functional.pad(matrix, (0, _PADDING, 0, _PADDING))
    padded.diagonal(dim1=-2, dim2=-1)[..., size:] = 1
    return torch.linalg.cholesky(padded)[..., :size, :size]


def of_rank_each(gram: Tensor, product: Tensor, rank: int, inputs: int) -> tuple[Tensor, Tensor]:
    """`of_rank` of every group, [groups, n, m], and the singular values of all."""
    cut = [of_rank(g, p, rank, inputs) for g, p in zip(gram.double(), product.double(), strict=True)]
    return torch.stack([weights for weights, _ in cut]), torch.cat([values for _, values in cut]).float().cpu()


def of_rank(gram: Tensor, product: Tensor, rank: int, inputs: int) -> tuple[Tensor, Tensor]:
    """The W [n, m] of a rank that is nearest to what `ridge` gives, as results go (reduced-rank regression, Izenman
    1975): with L Lᵀ = XᵀX + λ, what the largest singular values of L⁻¹ XᵀY stand for; and all singular values, whose
    squares add up to what W without a rank changes.

    Args:
        inputs: rows of W that have the rank; one behind them, of a bias, is free.
    """
    held = raised(gram, RIDGE)
    across, last = held[:inputs, inputs:], held[inputs:, inputs:]
    without = torch.linalg.solve(last, across.mT).mT if len(last) else across
    factor = torch.linalg.cholesky(held[:inputs, :inputs] - without @ across.mT)
    left = product[:inputs] - without @ product[inputs:]
    u, s, vh = torch.linalg.svd(torch.linalg.solve_triangular(factor, left, upper=False), full_matrices=False)
    found = torch.linalg.solve_triangular(factor.mT, (u * s)[:, :rank] @ vh[:rank], upper=True)
    free = product[inputs:] - across.mT @ found
    return torch.cat([found, torch.linalg.solve(last, free) if len(last) else free]), s


def raised(gram: Tensor, share: float) -> Tensor:
    """XᵀX + λ, [*, n, n], with λ a share of the mean of the diagonal of XᵀX."""
    held, sizes = gram.clone(), gram.diagonal(dim1=-2, dim2=-1)
    held.diagonal(dim1=-2, dim2=-1).add_(share * sizes.mean(-1, keepdim=True).clamp_min(1e-30))
    return held
