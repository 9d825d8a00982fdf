"""The least squares of experts: of matrices one of which is chosen for each row of what they are multiplied by.

A router chooses otherwise in the merged model than in each of its parents, so that their results do not lie side by
side. Before the experts' results are added up, the target of an expert is the mean of what the experts of the same
number give in the models, whichever those would choose. Where they are added up, the sums are compared, and what the
merged one lacks is brought back to the experts that were chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.merging.fits import Fit, mean_of_values, missing_to_target, ridge
from hf_align.merging.lockstep import Lockstep, Lookup
from hf_align.merging.sites import LAYS_OUT, Beside, arrivals, besides, carried, readers_of
from hf_align.running.chosen import Chosen, chooses_matrices
from hf_align.running.network import Network, Weights
from hf_align.runtime.devices import as_double
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program, operand

COLUMNS = 4096
"""Columns that the least squares of a group of experts may have, unless one has more: a Gram matrix of 128 MiB."""


@dataclass(frozen=True)
class ExpertSite:
    """A product with matrices chosen out of a weight that nothing else reads.

    Attributes:
        weight: [experts, ...], by its node.
        choosing: the op that chooses a matrix of the weight for each row.
        numbers: of the matrices that it chooses, [rows].
        laying_out: ops that turn the matrices between choosing and product.
        node: the product.
        value: what is multiplied by the matrices.
        is_first: whether the matrices are the first factor.
        parameter: the weight's name.
        way: ops from the product to the sum over the experts of each token; none if there is no such sum.
        beside: what is added to that sum.
    """

    weight: fx.Node
    choosing: fx.Node
    numbers: fx.Node
    laying_out: tuple[fx.Node, ...]
    node: fx.Node
    value: fx.Node
    is_first: bool
    parameter: str
    way: tuple[fx.Node, ...]
    beside: tuple[Beside, ...] = field(compare=False)

    @property
    def experts(self) -> int:
        """How many there are."""
        return int(self.weight.meta["val"].shape[0])

    @property
    def inputs(self) -> int:
        """n, what an expert multiplies."""
        return int(self.weight.meta["val"].shape[2 if self.is_first != self._is_flipped else 1])

    @property
    def _is_flipped(self) -> bool:
        return len(self.laying_out) % 2 == 1

    def product(self, weight: Tensor, numbers: Tensor, value: Tensor) -> Tensor:
        """As the op gives it, with the matrices of these numbers."""
        chosen = Chosen(weight, numbers)
        chosen = chosen.transposed if self._is_flipped else chosen
        return chosen.times(value) if self.is_first else chosen.behind(value)

    def rows(self, value: Tensor) -> Tensor:
        """What is multiplied, or the products, [rows, columns, n]."""
        return value.mT if self.is_first else value

    def stored(self, matrices: Tensor) -> Tensor:
        """[experts, n, m] as the weight is stored."""
        return (matrices.mT if self.is_first != self._is_flipped else matrices).contiguous()


def expert_sites(program: Program) -> Iterator[ExpertSite]:
    """All sites in the order of the graph, of weights that are read once."""
    readers = readers_of(program)
    for node in program.graph.nodes:
        if node.op == "call_function" and chooses_matrices(node, program):
            site = _site(node, program)
            if site is not None and readers[site.parameter] == [node]:
                yield site


def _site(choosing: fx.Node, program: Program) -> ExpertSite | None:
    matrices, laying_out = choosing, list[fx.Node]()
    while len(matrices.users) == 1 and does(next(iter(matrices.users)), Trait.REORDERS_AXES):
        (matrices,) = matrices.users
        laying_out.append(matrices)
    if len(matrices.users) != 1:
        return None
    (node,) = matrices.users
    is_first = node.args[0] is matrices
    value, weight = operand(node, 1 if is_first else 0), operand(choosing, 0)
    assert value is not None and weight is not None
    numbers: Any = choosing.args[1]
    way = tuple(_way_to_sum(node))
    beside = tuple(besides(way[-1], program)) if way else ()
    name = program.parameters[weight]
    return ExpertSite(weight, choosing, numbers[0], tuple(laying_out), node, value, is_first, name, way, beside)


def _way_to_sum(node: fx.Node) -> Iterator[fx.Node]:
    """The ops up to a sum, on which values are only weighed, shifted, and laid out anew; none if there is no sum."""
    way: list[fx.Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        way.append(user)
        if does(user, Trait.SUMS_PLACES) and not does(user, Trait.AVERAGES | Trait.RUNNING_SUM):
            yield from way
            return
        if not does(user, LAYS_OUT | Trait.MULTIPLIES | Trait.ADDS) or user.kwargs:
            return
        if not does(user, Trait.MULTIPLIES | Trait.ADDS) and user.all_input_nodes[0] is not node:
            return
        node = user


class ExpertFit(Fit):
    """The least squares of all experts on the rows that the merged model gives them.

    Where their results are added up for each token, those of a group of experts are found together: a row of the least
    squares is a token, of which each expert has its own columns. What a sum lacks is divided between groups.
    """

    def __init__(self, site: ExpertSite, network: Network, merged: Weights) -> None:
        self._site, self._merged = site, merged
        together = max(1, COLUMNS // site.inputs) if site.way else 1
        self._groups = torch.arange(site.experts).split(together)
        self._grams = [network.gram() for _ in self._groups]
        self._products = [network.gram() for _ in self._groups]
        self.names = frozenset((site.parameter,))
        self.reads = (site.value, site.numbers)
        self.ahead = (site.way[-1],) if site.way else ()
        beyond = (a for node in site.way for a in node.all_input_nodes if a not in (site.node, *site.way))
        self.looked_up = frozenset((*self.reads, *beyond, *(b.value for b in site.beside)))
        self.makes_up = bool(site.way)

    def add(self, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float]) -> None:
        site, merged = self._site, lookups[-1]
        numbers, value = merged(site.numbers), as_double(site.rows(merged(site.value)))
        result = site.product(merged(site.weight), numbers, merged(site.value))
        sums = self._sums(result, lookups, steps, shares) if site.way else self._each(result, lookups, shares)
        numbers = numbers.repeat_interleave(value.shape[1]).to(value.device)
        given = sums.factors[:, None] * value.flatten(0, 1)
        for group, gram, product in zip(self._groups, self._grams, self._products, strict=True):
            rows = ((numbers >= group[0]) & (numbers <= group[-1])).nonzero()[:, 0]
            columns = given.new_zeros(len(sums.missing), len(group), site.inputs)
            columns.index_put_((sums.tokens[rows], numbers[rows] - group[0]), given[rows], accumulate=True)
            share = sums.share(rows)
            x, y = columns[share > 0].flatten(1), (share[:, None] * sums.missing)[share > 0]
            gram.add(x, x)
            product.add(x, y)

    def _each(self, result: Tensor, lookups: Sequence[Lookup], shares: Sequence[float]) -> _Sums:
        """Every product by itself: what it lacks to what experts of the same number give in the models."""
        site, (*models, merged) = self._site, lookups
        numbers = merged(site.numbers)
        given = [site.product(m(site.weight), numbers, m(site.value)) for m in models]
        missing = as_double(site.rows(mean_of_values(given, shares) - result).flatten(0, 1))
        return _Sums(missing, torch.arange(len(missing), device=missing.device), torch.ones_like(missing[:, 0]))

    def _sums(self, result: Tensor, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float]) -> _Sums:
        """The sums over experts: what they lack to those in the models."""
        site, merged = self._site, lookups[-1]
        end = carried(site.way, result, site.node, merged)
        missing = as_double(missing_to_target(site.way[-1], site.beside, end, lookups, steps, shares))
        factors, places = (site.rows(t).flatten(0, 1) for t in arrivals(site.way, result, site.node, merged))
        counts = (factors != 0).all(1)
        tokens = torch.zeros_like(places[:, 0])
        first, tokens[counts] = places[counts, 0].unique(return_inverse=True)
        of_tokens = missing.new_zeros(len(first), places.shape[1])
        of_tokens[tokens[counts]] = missing.flatten()[places[counts]]
        return _Sums(of_tokens, tokens, torch.where(counts, factors[:, 0], 0))

    def solved(self) -> dict[str, Tensor]:
        name, site = self._site.parameter, self._site
        found = [ridge(gram.total, product.total).unflatten(0, (len(group), site.inputs))
                 for group, gram, product in zip(self._groups, self._grams, self._products, strict=True)]  # fmt: skip
        return {name: self._merged[name].float().cpu() + site.stored(torch.cat(found)).float().cpu()}


@dataclass(frozen=True)
class _Sums:
    """Sums that products go into.

    Attributes:
        missing: what each lacks, [sums, m], float64.
        tokens: the sum that each product goes into, [rows].
        factors: by which it is multiplied before, [rows], float64.
    """

    missing: Tensor
    tokens: Tensor
    factors: Tensor

    def share(self, rows: Tensor) -> Tensor:
        """The part of what each sum lacks that some rows make up for where all change as little as they can, [sums]."""
        squares = self.factors**2
        zero = self.missing.new_zeros(len(self.missing))
        own, everything = zero.index_add(0, self.tokens[rows], squares[rows]), zero.index_add(0, self.tokens, squares)
        return torch.where(own == 0, 0, own / everything)
