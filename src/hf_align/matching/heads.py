"""Matching heads together with what lives inside them.

Which head of B is which of A depends on the best map between their interiors (query-key and value spaces, the order of
the query heads that share a key), so for every pair of heads the interior is solved first; the pairing is the
assignment that maximises the sum of these best fits. The two-stage scheme of Verma & Elbayad (arXiv 2403.00986,
section 3.2), with the inner permutation replaced by the nearest element of whatever group the interior has. Or the
pairing is by circuits, what a head does whatever its inner basis: W_Qᵀ W_K and W_O W_V (Theus et al., 2506.22712).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_align.matching.head_families import HeadFamily
from hf_align.running.network import Weights
from hf_align.symmetry.action import Elements, act_on_block
from hf_align.symmetry.elements import DUAL, PRIMAL, Element, Monomial, Power, load_element
from hf_align.symmetry.groups import Group, ScaledPermutation, assign, sign
from hf_align.symmetry.spec import Block, SymmetrySpec

_MOST_ORDERS = 24
"""Orders of sub-heads that are all tried: 4!; among more they are looked for in turns."""
_ALTERNATIONS = 4
"""Between the order of sub-heads and their inner elements, each the best for the other."""
_MOST_NUMBERS = 2**27
"""Numbers in memory at once, about, of the comparison of heads: 1 GiB."""
LISTED = 3
"""Heads of B that a large head of A is compared with for each way of seeing them, so that the cost grows as the number
of heads, and not as its square."""
_PROJECTIONS = 64
"""Random directions in which the units of heads are seen: they tell lengths to an eighth."""


@dataclass(frozen=True)
class Pairs:
    """The fit of every head of A with every head of B over one block: [h, h', g, g', n, n'] (g, n of size one where
    the block has no sub-heads or no inner space).

    Attributes:
        power: of the inner space.
        heads_power: of the heads, whose signs may differ.
        sides: the weights of the heads of A [h, g, n, rest], and of B.
    """

    inner: str | None
    power: Power
    heads_power: Power
    has_subheads: bool
    fit: Tensor
    sides: tuple[Tensor, Tensor]

    def gram(self, side: int) -> Tensor:
        """The fit of every head of A, or of B, with itself, over all sub-heads [h, n, n]."""
        return torch.einsum("hgnr,hgmr->hnm", self.sides[side], self.sides[side]).double().cpu()

    def with_signs(self, signs: tuple[int, ...]) -> Pairs:
        """As it would be if every head of B had these signs."""
        return replace(self, fit=self.fit * sign(signs, self.heads_power)) if -1 in signs else self


Pairing = Callable[[SymmetrySpec, HeadFamily, list[Pairs], Tensor | None], Tensor]
"""How well every head of A goes with every head of B [h, h'], with sub-heads in an order [h, h', g]."""


@dataclass(frozen=True)
class _Solved:
    """Heads of A with heads of B, under every choice of the signs of B's.

    Attributes:
        signs: the choices.
        pairs: by choice, the fit of every two heads, block by block.
        orders: by choice, the best order of sub-heads [h, h', g].
        fits: how well the heads go with each other [choices, h, h'].
    """

    signs: list[tuple[int, ...]]
    pairs: list[list[Pairs]]
    orders: list[Tensor | None]
    fits: Tensor

    @classmethod
    def of(cls, spec: SymmetrySpec, tree: HeadFamily, pairs: list[Pairs], pairing: Pairing) -> _Solved:
        group = spec.group(tree.heads)
        assert isinstance(group, ScaledPermutation)
        signs = group.signs()
        turned = [[p.with_signs(s) for p in pairs] for s in signs]
        orders = [_best_orders(spec, tree, p, pairing) if tree.subheads else None for p in turned]
        fits = [pairing(spec, tree, p, order) for p, order in zip(turned, orders, strict=True)]
        return cls(signs, turned, orders, torch.stack(fits))

    def elements(self, spec: SymmetrySpec, tree: HeadFamily, heads: Tensor) -> dict[str, Element]:
        """The best elements where the heads of A go with these of B [h]."""
        rows = torch.arange(len(heads))
        chosen = self.fits.argmax(0)[rows, heads]
        signs = torch.tensor(self.signs, dtype=torch.float64)[chosen].mT
        found: dict[str, Element] = {tree.heads: Monomial(heads, signs)}

        def together(crosses: list[dict[Power, Tensor]]) -> dict[Power, Tensor]:
            return {p: torch.stack([c[p] for c in crosses])[chosen, rows, heads] for p in crosses[0]}

        for space in tree.inner:
            crosses = [_inner_cross(space, p, order) for p, order in zip(self.pairs, self.orders, strict=True)]
            found[space] = spec.group(space).nearest(together(crosses))
        if tree.subheads:
            order = torch.stack([o for o in self.orders if o is not None])[chosen, rows, heads]
            found[tree.subheads] = Monomial.permutation(order)
            for space in tree.leaves:
                fits = together([_leaf_cross(space, p) for p in self.pairs])
                beside = {p: torch.take_along_dim(m, order[..., None, None, None], 2) for p, m in fits.items()}
                found[space] = spec.group(space).nearest({p: m.squeeze(2) for p, m in beside.items()})
        return found


def match_heads(
    spec: SymmetrySpec, tree: HeadFamily, a: Weights, b: Weights, elements: Elements, pairing: Pairing
) -> dict[str, Element]:
    """The best elements of a tree's spaces, all others held at `elements`.

    What is inside large heads (the units of experts) is compared for a few pairs at a time, and of many heads only for
    those that seem alike (`likely`); then once more for those that go together.
    """
    laid = list(_laid_out(spec, tree, a, b, elements))
    count, most = spec.spaces[tree.heads].size, pairs_at_once(spec, tree)

    def solved(rows: slice, columns: slice | Tensor) -> _Solved:
        return _Solved.of(spec, tree, [block.pairs(rows, columns) for block in laid], pairing)

    if not laid:  # nothing in which the heads could be told apart
        return {}
    if count**2 <= most:
        everything = solved(slice(None), slice(None))
        return everything.elements(spec, tree, assign(everything.fits.amax(0)))
    current = elements.get(tree.heads)
    listed = likely(laid, current.order if isinstance(current, Monomial) else torch.arange(count))
    fit = torch.full((count, count), -torch.inf, dtype=torch.float64)
    for row, numbers in enumerate(listed):
        for some in numbers.split(most):
            fit[row, some] = solved(slice(row, row + 1), some).fits.amax(0)[0]
    finite = fit.isfinite()
    heads = assign(fit.where(finite, fit[finite].min() - count * fit[finite].aminmax().max.abs()))
    first = torch.zeros(1, dtype=torch.long)
    parts = [solved(slice(h, h + 1), slice(i, i + 1)).elements(spec, tree, first) for h, i in enumerate(heads.tolist())]
    signs = torch.cat([part[tree.heads].tensors()["scale"] for part in parts], -1)
    return _one_after_the_other(parts) | {tree.heads: Monomial(heads, signs)}


def pairs_at_once(spec: SymmetrySpec, tree: HeadFamily) -> int:
    """How many pairs of heads are compared at a time."""
    return max(1, _MOST_NUMBERS // numbers_of_pair(spec, tree))


def numbers_of_pair(spec: SymmetrySpec, tree: HeadFamily) -> int:
    """What is computed to compare two heads, over all weights."""
    inside = tree.spaces - {tree.heads}
    names = {name for space in tree.spaces for name in spec.uses(space)}
    sizes = [math.prod(f.size for f in block.factors if f.space in inside) for n in names for block in spec.blocks(n)]
    return sum(size**2 for size in sizes)


def likely(laid: Sequence[_LaidOut], current: Tensor) -> list[Tensor]:
    """For each head of A the numbers of those of B that are compared with it, its `current` one among them.

    Seen from outside, heads are compared as they are. Inside, units come in any order or basis, which the second
    moments of their weights do not depend on: of random projections, so that a pair of heads costs next to nothing.
    Either may say nothing, so that each names as many.
    """
    kinds = dict.fromkeys((block.inner, block.a.shape[1]) for block in laid)
    views = [[block for block in laid if (block.inner, block.a.shape[1]) == kind] for kind in kinds]
    found = [_outside_alike(blocks) if blocks[0].inner is None else _inside_alike(blocks) for blocks in views]
    named = [view.topk(min(LISTED, len(current)), 1).indices for view in found]
    return [row.unique() for row in torch.cat([current[:, None], *named], 1)]


def _outside_alike(blocks: Sequence[_LaidOut]) -> Tensor:
    """⟨a, b⟩ of every two heads [h, h']."""
    a, b = (torch.cat([getattr(block, side).flatten(1) for block in blocks], 1) for side in ("a", "b"))
    return (a @ b.mT).double().cpu()


def _inside_alike(blocks: Sequence[_LaidOut]) -> Tensor:
    """cos(XᵀX, YᵀY) of every two heads [h, h'], without the mean of all heads in either."""
    rng = torch.Generator().manual_seed(0)
    moments = []
    maps = [torch.randn(block.a.shape[-1], _PROJECTIONS, generator=rng) for block in blocks]
    for side in ("a", "b"):
        weights = [getattr(block, side).flatten(1, 2) for block in blocks]
        units = sum(w.float() @ m.to(w.device) for w, m in zip(weights, maps, strict=True)).double().cpu()
        moment = (units.mT @ units).flatten(1)
        moments.append(torch.nn.functional.normalize(moment - moment.mean(0), dim=1))
    return moments[0] @ moments[1].mT


def _one_after_the_other(parts: list[dict[str, Element]]) -> dict[str, Element]:
    """Elements of some heads as those of all."""
    tensors = {name: [part[name].tensors() for part in parts] for name in parts[0]}
    return {name: load_element({k: torch.cat([t[k] for t in of_heads]) for k in of_heads[0]})
            for name, of_heads in tensors.items()}  # fmt: skip


@dataclass(frozen=True)
class _LaidOut:
    """A block of both models as [heads, sub-heads, inner, rest], B's moved by all spaces but the tree's."""

    inner: str | None
    power: Power
    heads_power: Power
    a: Tensor
    b: Tensor

    def pairs(self, rows: slice, columns: slice | Tensor) -> Pairs:
        x, y = self.a[rows], self.b[columns]
        fit = torch.einsum("hgnr,ijmr->higjnm", x, y).double().cpu()
        return Pairs(self.inner, self.power, self.heads_power, x.shape[1] > 1, fit, (x, y))


def _laid_out(spec: SymmetrySpec, tree: HeadFamily, a: Weights, b: Weights, elements: Elements) -> Iterator[_LaidOut]:
    others = {s: e for s, e in elements.items() if s not in tree.spaces}
    names = dict.fromkeys(n for s in sorted(tree.spaces) for n in spec.uses(s))
    for name in names:
        for block in spec.blocks(name):
            if not any(True for _ in block.occurrences(tree.heads)) or _has_several(block, tree):
                continue
            inner, x = _arrange(block, tree, block.factored(a[name]))
            _, y = _arrange(block, tree, act_on_block(block.factored(b[name]), block, others))
            power = next((f.power for f in block.factors if f.space == inner), PRIMAL) if inner else PRIMAL
            heads_power = next(f.power for f in block.factors if f.space == tree.heads)
            yield _LaidOut(inner, power, heads_power, x, y)


def _has_several(block: Block, tree: HeadFamily) -> bool:
    """Whether spaces inside of heads meet there, so that under no one of them it could be compared."""
    return len({move.space for move in block.moves} & {*tree.inner, *tree.leaves, *tree.held}) > 1


def _arrange(block: Block, tree: HeadFamily, view: Tensor) -> tuple[str | None, Tensor]:
    """A block as [heads, sub-heads, inner, rest]."""
    inner = next((f.space for f in block.factors if f.space in (*tree.inner, *tree.leaves)), None)
    front = [next(block.occurrences(tree.heads))]
    for space in (tree.subheads, inner):
        at = next(block.occurrences(space), None) if space else None
        if at is None:
            view = view.unsqueeze(-1)
        front.append(view.dim() - 1 if at is None else at)
    rest = [i for i in range(view.dim()) if i not in front]
    view = view.permute(*front, *rest)
    return inner, view.reshape(*view.shape[:3], -1)


def _summed(space: str, pairs: list[Pairs], term: Callable[[Pairs], Tensor]) -> dict[Power, Tensor]:
    """The sum of a term of every pair in which an inner space lies, by power."""
    total: dict[Power, Tensor] = {}
    for p in pairs:
        if p.inner == space:
            total[p.power] = total.get(p.power, torch.zeros((), dtype=torch.float64)) + term(p)
    return total


def _inner_cross(space: str, pairs: list[Pairs], order: Tensor | None) -> dict[Power, Tensor]:
    """[h, h', n, n'] by power, sub-heads paired by `order` [h, h', g]."""
    return _summed(space, pairs, lambda p: _paired(p, order))


def _leaf_cross(space: str, pairs: list[Pairs]) -> dict[Power, Tensor]:
    """[h, h', g, g', n, n'] by power."""
    return _summed(space, pairs, lambda p: p.fit)


def _leaf_fit(spec: SymmetrySpec, tree: HeadFamily, pairs: list[Pairs]) -> Tensor:
    """The best fit of what is inside every pair of sub-heads [h, h', g, g']."""
    return sum((spec.group(s).score(_leaf_cross(s, pairs)) for s in tree.leaves), torch.zeros(1, 1, 1, 1))


def _paired(p: Pairs, order: Tensor | None) -> Tensor:
    if not p.has_subheads or order is None:
        return p.fit.sum((2, 3)) if not p.has_subheads else p.fit.diagonal(dim1=2, dim2=3).sum(-1)
    chosen = torch.take_along_dim(p.fit, order[:, :, :, None, None, None], 3)
    return chosen.squeeze(3).sum(2)


def best_fit(spec: SymmetrySpec, tree: HeadFamily, pairs: list[Pairs], order: Tensor | None) -> Tensor:
    """⟨A, gB⟩ of the weights of every pair of heads, under the best inner elements g."""
    inside = sum((spec.group(s).score(_inner_cross(s, pairs, order)) for s in tree.inner), torch.zeros(()))
    return _outside(spec, tree, pairs, order) + inside


def likest_circuits(spec: SymmetrySpec, tree: HeadFamily, pairs: list[Pairs], order: Tensor | None) -> Tensor:
    """⟨DᵀP, D'ᵀP'⟩ of every pair of heads, for the weights P that write an inner space and D that read it, over the
    root of |DᵀP| |D'ᵀP'|, which makes it of the degree of a fit; the best fit for an inner space without circuits.

    As ⟨DᵀP, D'ᵀP'⟩ = ⟨PP'ᵀ, DD'ᵀ⟩, no circuit is ever formed. Between P and D a rotary embedding turns by the distance
    of two tokens; the mean over all distances is that over the part of PP'ᵀ that commutes with it.
    """
    total = _outside(spec, tree, pairs, order)
    for space in tree.inner:
        group, fit = spec.group(space), _inner_cross(space, pairs, order)
        if isinstance(group, ScaledPermutation) or not group.has_gauge or fit.keys() != {PRIMAL, DUAL}:
            total = total + group.score(fit)
            continue
        a, b = (_sizes(group, space, pairs, side) for side in (0, 1))
        total = total + _common(group, fit) / (a[:, None] * b).clamp_min(1e-300).sqrt()
    return total


PAIRINGS: dict[str, Pairing] = {"two-stage": best_fit, "circuits": likest_circuits}
"""What heads are paired by."""


def _outside(spec: SymmetrySpec, tree: HeadFamily, pairs: list[Pairs], order: Tensor | None) -> Tensor:
    """The fit of what has a place for each head but lies in no inner space, or in one of a sub-head [h, h']."""
    found = [_paired(p, order)[..., 0, 0] for p in pairs if p.inner is None]
    if tree.leaves and order is not None:
        fit = _leaf_fit(spec, tree, pairs)
        found.append(torch.take_along_dim(fit, order[..., None], 3).sum((2, 3)))
    return torch.stack(found).sum(0) if found else torch.zeros(())


def _common(group: Group, fit: Mapping[Power, Tensor]) -> Tensor:
    """The inner product of two circuits."""
    return (group.algebra(fit[PRIMAL]) * fit[DUAL]).sum((-1, -2))


def _sizes(group: Group, space: str, pairs: list[Pairs], side: int) -> Tensor:
    """The norm of the circuit of each head of A, or of B [h]."""
    return _common(group, _summed(space, pairs, lambda p: p.gram(side))).sqrt()


def _best_orders(spec: SymmetrySpec, tree: HeadFamily, pairs: list[Pairs], pairing: Pairing) -> Tensor:
    """For every pair of heads, the order [h, h', g] of sub-heads that allows the best fit."""
    assert tree.subheads is not None
    size = spec.spaces[tree.subheads].size
    if math.factorial(size) <= _MOST_ORDERS:
        every = pairs[0].fit.shape[:2]
        orders = [torch.tensor(o).expand(*every, -1) for o in itertools.permutations(range(size))]
        scores = torch.stack([pairing(spec, tree, pairs, o) for o in orders])
        best = scores.argmax(0)
        return torch.stack(orders).gather(0, best[None, :, :, None].expand(1, -1, -1, size)).squeeze(0)
    return _alternate(spec, tree, pairs)


def _alternate(spec: SymmetrySpec, tree: HeadFamily, pairs: list[Pairs]) -> Tensor:
    """Too many orders to try: from the inner elements of the weights that have no sub-heads, back and forth."""
    shared = [p for p in pairs if not p.has_subheads]
    order: Tensor | None = None
    for _ in range(_ALTERNATIONS):
        cost = _leaf_fit(spec, tree, pairs)
        for space in tree.inner:
            matrices = _inner_cross(space, shared if order is None else pairs, order)
            if not matrices:
                matrices = {p.power: p.fit.sum((2, 3)) for p in pairs if p.inner == space}
            element = spec.group(space).nearest(matrices).as_matrix()
            for p in pairs:
                if p.inner == space and p.has_subheads:
                    cost = cost + (p.fit * element[:, :, None, None]).sum((-1, -2))
        for p in pairs:
            if p.inner is None and p.has_subheads:
                cost = cost + p.fit[..., 0, 0]
        order = assign(cost)
    assert order is not None
    return order
