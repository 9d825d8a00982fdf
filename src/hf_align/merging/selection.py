"""Units chosen out of several models: of the units that a weight reads in all, those that its target needs most.

Between two models of different seeds many units have no counterpart, and their mean is of no use. Where a space of
units is permuted, and a single weight reads them, the merge may take some units of A as they are, and some of B. The
units of both, put side by side on the merged model's activations, give what is read; the least squares to the target
is found with all of them, and units are taken out, those first whose loss costs least (backward elimination; the
cost of one is that of optimal brain surgeon, Hassibi & Stork 1992, which is exact for least squares).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, fx

from hf_align.merging.fits import RIDGE, factor, raised
from hf_align.merging.lockstep import Lockstep, Lookup, WithWeights, of_weights
from hf_align.merging.sites import Site
from hf_align.running.network import Batch, Network, Weights, add_half
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.execute import run_node
from hf_align.tracing.program import Program

_AT_ONCE = 4
"""The share of the units, one in so many, that are taken out before costs are computed anew."""
_HELD = 1e-8
"""The ridge while units are taken out: next to nothing, so that of two that do the same either one costs nothing."""
_ALIKE = 1e-3
"""How far units may be from what they were with other units beside them, against the largest: float32."""


@dataclass(frozen=True)
class Units:
    """A space whose units can be chosen.

    Attributes:
        writers: the sites whose results the units are made of.
        reader: the one that reads them.
        between: the nodes from the writers to what is read, in order.
        carried: the parameters that a unit consists of, but for the reader's.
        of_weights: the values that no input has a part in (`lockstep.py`).
        columns: of what is read, the entries that each unit gives, [units, entries].
    """

    spec: SymmetrySpec
    space: str
    writers: tuple[Site, ...]
    reader: Site
    between: tuple[fx.Node, ...]
    carried: tuple[str, ...]
    columns: Tensor
    of_weights: Mapping[fx.Node, frozenset[str]] = field(repr=False)

    @property
    def names(self) -> frozenset[str]:
        """All weights and biases of the sites."""
        return frozenset[str]().union(*(site.names for site in self.sites))

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """The values that the units are computed from, besides weights."""
        inside = set(self.between)
        return tuple(dict.fromkeys(a for n in self.between for a in n.all_input_nodes
                                   if a not in inside and a not in self.of_weights
                                   and a.op == "call_function"))  # fmt: skip

    @property
    def sites(self) -> tuple[Site, ...]:
        return (*self.writers, self.reader)

    def values(self, own: Lookup, merged: Lookup) -> Tensor:
        """The units of a model on what the merged model gives them, [rows, n]."""
        found: dict[fx.Node, Tensor] = {}

        def lookup(node: fx.Node) -> Tensor:
            if node in found:
                return found[node]
            value: Tensor = own(node) if node in self.of_weights else merged(node)
            return value

        for node in self.between:
            found[node] = run_node(node, lookup)
        return self.reader.rows(lookup(self.reader.value))[0]


def units(program: Program, spec: SymmetrySpec, sites: Sequence[Site]) -> Iterator[Units]:
    """The spaces of units that one weight reads, in no order."""
    by_name = {site.parameter: site for site in sites}
    for name, space in spec.spaces.items():
        if not isinstance(space.group, ScaledPermutation) or not space.group.permutes:
            continue
        if space.index:
            continue
        found = _units(program, spec, name, by_name)
        if found is not None:
            yield found


def _units(program: Program, spec: SymmetrySpec, space: str, sites: dict[str, Site]) -> Units | None:
    carried = spec.uses(space)
    readers = [sites[p] for p in carried if p in sites and _columns(sites[p], space, spec) is not None]
    if len(readers) != 1:
        return None
    (reader,) = readers
    columns = _columns(reader, space, spec)
    assert columns is not None
    others = tuple(p for p in carried if p != reader.parameter)
    writers = tuple(sites[p] for p in others if p in sites)
    biases = {w.bias for w in writers}
    if not writers or any(w.beside or w.groups > 1 for w in writers) or reader.groups > 1:
        return None
    if any(p not in sites and p not in biases for p in others):
        return None
    between = _between(program, {w.node for w in writers}, reader.value)
    known = of_weights(program)
    named = {name for n in between for a in n.all_input_nodes for name in known.get(a, ())}
    if not between or not named <= set(others):
        return None
    return Units(spec, space, writers, reader, between, others, columns, known)


def _columns(site: Site, space: str, spec: SymmetrySpec) -> Tensor | None:
    """Which entries of what a site reads belong to each unit of a space, [units, entries]; None where some belong to
    none."""
    axis = spec.parameters[site.parameter][1 if site.is_stored_flipped else 0]
    if len(axis) != 1 or any(f.within is not None for f in axis[0]):
        return None
    places = [i for i, f in enumerate(axis[0]) if f.space == space]
    sizes = [f.size for f in axis[0]]
    if len(places) != 1 or math.prod(sizes) != site.inputs:
        return None
    return torch.arange(site.inputs).reshape(sizes).movedim(places[0], 0).reshape(sizes[places[0]], -1)


def _between(program: Program, starts: Collection[fx.Node], end: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes on the ways from some to one."""
    after = set(starts)
    for node in program.graph.nodes:
        if any(a in after for a in node.all_input_nodes):
            after.add(node)
    before, stack = set[fx.Node](), [end]
    while stack:
        node = stack.pop()
        if node in after and node not in before:
            before.add(node)
            stack.extend(node.all_input_nodes)
    return tuple(n for n in program.graph.nodes if n in before) if set(starts) <= before else ()


def independent(
    found: Iterable[Units], models: Sequence[Weights], program: Program, network: Network, part: Batch
) -> Iterator[Units]:
    """Those of which each unit stays what it is whatever other units stand beside it, as some of each model do on the
    activations of the first: no norm, say, sees them all."""
    found = list(found)
    given = {node for units in found for node in units.given}
    alone = Lockstep(program, network, [part], [models[0]], given)
    (lookups,) = alone.run(alone.stage(), keep=given)
    for units in found:
        count = len(units.columns)
        mixed = torch.arange(count) % len(models) * count + torch.arange(count)
        own = [{n: w[n].float().cpu() for n in units.carried} for w in models]
        own.append({n: put_together([w[n] for w in own], n, units, mixed) for n in units.carried})
        placed = ({n: alone.placed(t) for n, t in weights.items()} for weights in own)
        *apart, together = (
            units.values(WithWeights(program, units.of_weights, weights, lookups[0]), lookups[0]) for weights in placed
        )
        entries = torch.arange(count * units.columns.shape[1] * len(models)).reshape(len(models), -1)
        columns = entries[:, units.columns].flatten(0, 1)
        expected = torch.cat(apart, -1)[:, entries_of(units.columns, columns[mixed])]
        if float((together - expected).abs().max()) <= _ALIKE * float(expected.abs().max()):
            yield units


def disjoint(found: Iterable[Units], program: Program) -> list[Units]:
    """Those that share no site with one that is read before: of linear maps one after another, every other space."""
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    taken, kept = set[fx.Node](), list[Units]()
    for units in sorted(found, key=lambda units: place[units.reader.node]):
        nodes = {site.node for site in units.sites}
        if not nodes & taken:
            kept.append(units)
            taken |= nodes
    return kept


def entries_of(columns: Tensor, taken: Tensor) -> Tensor:
    """The entries that stand where those of the units of one model stand, [units · entries].

    Args:
        columns: of one model's units, [units, entries].
        taken: the entries of the units that take their places, likewise.
    """
    found = torch.empty(columns.numel(), dtype=torch.long)
    found[columns.flatten()] = taken.flatten()
    return found


def put_together(tensors: Sequence[Tensor], name: str, units: Units, chosen: Tensor) -> Tensor:
    """A parameter [as each] of units of several models, which are counted one model after the other."""
    merged = tensors[0].clone(memory_format=torch.contiguous_format)
    for block in units.spec.blocks(name):
        for axis in block.occurrences(units.space):
            all_units = torch.cat([block.factored(t).movedim(axis, 0) for t in tensors])
            block.factored(merged).movedim(axis, 0).copy_(all_units[chosen])
    return merged


@dataclass(frozen=True)
class Given(ABC):
    """The least squares of coefficients on what units give, drawn to coefficients that they start from.

    Attributes:
        ridge: how strongly, against the mean of the diagonal of the Gram matrix.
    """

    ridge: float = field(default=RIDGE, kw_only=True)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they are."""

    @abstractmethod
    def narrowed(self, taken: Tensor, less: Tensor) -> Self:
        """Those of some columns, with other coefficients to start from.

        Args:
            less: what is taken from the coefficients, [columns, m]; all of those whose columns are not taken.
        """

    @abstractmethod
    def solution(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """What is to be added to the start, and the blocks of the inverse of the Gram matrix, ridge and all, up to a
        factor [units, entries, entries].

        Args:
            columns: of each unit, [units, entries].
        """


@dataclass(frozen=True)
class FromGram(Given):
    """By products.

    Attributes:
        gram: HᵀH of what the units give, [n, n].
        product: Hᵀ of what the start misses of the target, [n, m].
    """

    gram: Tensor
    product: Tensor

    @property
    def device(self) -> torch.device:
        return self.gram.device

    def narrowed(self, taken: Tensor, less: Tensor) -> FromGram:
        across, (changed,) = self.gram[taken], less.any(1).nonzero(as_tuple=True)
        product = self.product[taken] + across[:, changed] @ less[changed].to(across)
        return replace(self, gram=across[:, taken], product=product)

    def solution(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.cholesky_inverse(factor(raised(self.gram, self.ridge)))
        return inverse @ self.product, inverse[columns[:, :, None], columns[:, None, :]]


@dataclass(frozen=True)
class FromRows(Given):
    """By the rows, where they are fewer than columns: (HᵀH + λ)⁻¹ Hᵀ is Hᵀ (HHᵀ + λ)⁻¹.

    Attributes:
        rows: H, what the units give, [rows, n].
        missing: what the start misses of the target, [rows, m].
    """

    rows: Tensor
    missing: Tensor

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def narrowed(self, taken: Tensor, less: Tensor) -> FromRows:
        (changed,) = less.any(1).nonzero(as_tuple=True)
        missing = self.missing + self.rows[:, changed] @ less[changed].to(self.rows)
        return replace(self, rows=self.rows[:, taken], missing=missing)

    def solution(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        outer = self.rows.new_zeros(len(self.rows), len(self.rows))
        add_half(outer, self.rows.T)
        share = self.ridge * outer.diagonal().sum() / self.rows.shape[1]
        outer.diagonal().add_(share.clamp_min(1e-30))
        lower = factor(outer)
        # from the right: a quarter faster
        white = torch.linalg.solve_triangular(lower.T, self.rows.T, upper=True, left=False)
        step = white @ torch.linalg.solve_triangular(lower, self.missing, upper=False)
        own = white[columns]
        return step, torch.eye(own.shape[1]).to(own) - own @ own.mT


def eliminated(given: Given, start: Tensor, columns: Tensor, keep: int) -> Tensor:
    """The units that are left of those of several models side by side, in order.

    Args:
        given: of all units, or with more columns behind that are always kept.
        start: coefficients that the ridge draws to.
        columns: of each unit of all, one model after the other, [models · units, entries].
        keep: how many are left, as many as each model has.
    """
    left, places, given = torch.arange(len(columns)), columns, replace(given, ridge=_HELD)
    while True:
        step, blocks = given.solution(places)
        cost = costs(blocks, (start + step)[places])
        kept = _kept(left, cost.argsort(), max(1, min(len(left) - keep, len(left) // _AT_ONCE)), keep)
        left = left[kept]
        if len(left) == keep:
            return left
        taken = torch.ones(len(start), dtype=torch.bool)
        taken[places[~kept]] = False
        given = given.narrowed(taken.nonzero()[:, 0], start.where(~taken[:, None].to(start.device), 0))
        start = start[taken]
        places = (taken.cumsum(0) - 1)[places[kept]]


def costs(blocks: Tensor, coefficients: Tensor) -> Tensor:
    """By how much the squares grow without each unit, [units]: tr Xᵤᵀ (G⁻¹)ᵤᵤ⁻¹ Xᵤ.

    Args:
        blocks: (G⁻¹)ᵤᵤ, those of the inverse of the Gram matrix [units, entries, entries].
        coefficients: Xᵤ, those of the least squares [units, entries, m].
    """
    return (coefficients * torch.linalg.solve(blocks, coefficients)).sum((1, 2))


def _kept(left: Tensor, order: Tensor, take: int, n: int) -> Tensor:
    """Which of the units are kept: all but the cheapest. Of counterparts two never go at once, for each would be cheap
    for the other's sake."""
    gone: dict[int, int] = {}
    for place in order.cpu().tolist():
        pair = int(left[place]) % n
        if pair not in gone:
            gone[pair] = place
        if len(gone) == take:
            break
    kept = torch.ones(len(left), dtype=torch.bool)
    kept[list(gone.values())] = False
    return kept
