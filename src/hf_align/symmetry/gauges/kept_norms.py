"""Norms whose gain stays, because what they write re-enters the stream: γ ⊙ n + β with n of mean zero.

hᵀ(γ ⊙ n + β) = hᵀβ for h = 1/γ, whatever n is, so that a reader W may become W + u hᵀ against -(hᵀβ) u in its bias;
and against nothing if β has gone elsewhere, as any constant may (`constants.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape
from hf_align.symmetry.gauges.masked_means import is_in_masked_mean
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import is_centred, is_sum, keeps_last, multiplies_by_one, scales, used_only_by
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program


@dataclass(frozen=True)
class FreeReader(Gauge):
    """W - u hᵀ replaces W for the u that makes Wh zero, and b + (hᵀβ) u replaces b: it reads γ ⊙ n + β, h = 1/γ."""

    weight: str
    axis: int
    bias: str | None
    gain: str
    norm_bias: str | None
    offset: float

    said = "without what it never sees of a norm's output"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight, *([self.bias] if self.bias else []))

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return ()

    @property
    def counts_on_others(self) -> bool:  # type: ignore[override]
        return self.norm_bias is None

    def fix(self, name: str, get: Get) -> Tensor:
        row = inverse(get(self.gain) + self.offset)
        weight = get(self.weight).movedim(self.axis, -1)
        unseen = weight @ row / row.square().sum()
        if name == self.weight:
            return (weight - unseen.unsqueeze(-1) * row).movedim(-1, self.axis)
        assert self.norm_bias is not None
        return get(name) + unseen * (get(self.norm_bias) @ row)


@dataclass(frozen=True)
class LevelTable(Gauge):
    """W - s 1 hᵀ replaces W for the s that makes the mean of Wh zero, and P + s 1 hᵀ replaces P.

    The tied head W reads γ ⊙ n + β, h = 1/γ, and a row of one of the tables P is added wherever one of the table W is.
    What the head then adds to all its outputs, s hᵀβ, goes into its bias.

    Attributes:
        paired: a row of W, and another table and its row, which is added wherever that one is, and nowhere else. They
            have an s of their own, for which the row times h is zero.
    """

    weight: str
    others: tuple[str, ...]
    bias: str | None
    gain: str
    norm_bias: str | None
    offset: float
    paired: tuple[int, str, int] | None = None

    said = "levelled along what the tied head never sees of a norm's output"

    @property
    def targets(self) -> tuple[str, ...]:
        beside = [self.paired[1]] if self.paired is not None else []
        return (self.weight, *self.others, *beside, *([self.bias] if self.bias else []))

    @property
    def counts_on_others(self) -> bool:  # type: ignore[override]
        return self.norm_bias is None

    def fix(self, name: str, get: Get) -> Tensor:
        row = inverse(get(self.gain) + self.offset)
        shares = get(self.weight) @ row / row.square().sum()
        apart, beside, at = self.paired or (-1, None, -1)
        alone = torch.arange(len(shares), device=shares.device) == apart
        share = shares[~alone].mean()
        shares = torch.where(alone, shares, share)
        if name == self.bias:
            assert self.norm_bias is not None
            return get(name) + shares * (get(self.norm_bias) @ row)
        if name == self.weight:
            return get(name) - shares[:, None] * row
        if name == beside:
            here = torch.arange(len(get(name)), device=row.device) == at
            return get(name) + torch.where(here, shares[apart] - share, 0.0)[:, None] * row
        return get(name) + share * row


@dataclass(frozen=True)
class KeptNorm:
    """γ ⊙ n + β as it is written somewhere, by the names of γ and β; `offset` is what is added to the stored gain."""

    gain: str
    bias: str | None
    offset: float


def kept_norms(
    found: Interpretation, gone: Collection[str], zero: Collection[str]
) -> Iterator[FreeReader | LevelTable]:
    """The gauges of what reads norms whose gain has not gone into all of its readers.

    Args:
        gone: gains that have.
        zero: biases that have gone elsewhere.
    """
    norms = norms_that_stay(found, gone, zero)
    yield from _free_readers(norms, {node: list(vector_uses(node, found)) for node in norms}, found)


def norms_that_stay(found: Interpretation, gone: Collection[str], zero: Collection[str]) -> dict[fx.Node, KeptNorm]:
    """Where a value γ ⊙ n + β stands; the arguments as for `kept_norms`."""
    return {node: replace(norm, bias=None) if norm.bias in zero else norm for node, norm in _norms(found, gone)}


def _norms(found: Interpretation, gone: Collection[str]) -> Iterator[tuple[fx.Node, KeptNorm]]:
    """Where a value γ ⊙ n + β stands."""
    names = found.program.parameters
    for gain in found.gains:
        node = gain.node
        if gain.parameter in gone:
            continue
        if does(node, Trait.CENTRES) and len(node.args[1]) == 1:  # type: ignore[arg-type]
            bias = node.args[3] if len(node.args) > 3 else None
            if bias is None or bias in names:
                yield node, KeptNorm(gain.parameter, names.get(bias), gain.offset)  # type: ignore[arg-type]
        elif does(node, Trait.MULTIPLIES) and any(is_centred(a) for a in node.all_input_nodes):
            (user, *others) = node.users
            shapes, added = found.program.shapes, [names.get(a) for a in user.all_input_nodes if a is not node]
            bias = added[0] if len(added) == 1 and does(user, Trait.ADDS) and not others else None
            if bias is not None and shapes[bias] == shapes[gain.parameter]:
                yield user, KeptNorm(gain.parameter, bias, gain.offset)
            else:
                yield node, KeptNorm(gain.parameter, None, gain.offset)


@dataclass(frozen=True)
class VectorUse:
    """What becomes of a value in the end; `value` is what it is called there."""

    user: fx.Node
    value: fx.Node
    reading: LinearUse | None


def vector_uses(node: fx.Node, found: Interpretation) -> Iterator[VectorUse]:
    """The uses of a value behind ops that only pass its last axis on."""
    for user in node.users:
        if (reading := found.reading_by_matrix(user, node)) is not None:
            yield VectorUse(user, node, reading)
        elif _passes(user, node, found.program):
            yield from vector_uses(user, found)
        else:
            yield VectorUse(user, node, None)


def _passes(user: fx.Node, node: fx.Node, program: Program) -> bool:
    """Whether every vector along the last axis of the result is one of the value, or a mean of such."""
    if multiplies_by_one(user, node, program):
        return True
    if not does(user, Trait.SAME) and is_in_masked_mean(user, node):
        return keeps_last(user) if does(user, Trait.TOTALS) else scales(user, node)
    return does(user, Trait.MOVES | Trait.AVERAGES) and user.all_input_nodes[0] is node and keeps_last(user)


def _free_readers(
    norms: Mapping[fx.Node, KeptNorm], uses: Mapping[fx.Node, list[VectorUse]], found: Interpretation
) -> Iterator[FreeReader | LevelTable]:
    """The weights that read nothing but what one norm writes, always with the same bias."""
    readers: dict[str, dict[tuple[KeptNorm, int, str | None], set[fx.Node]]] = defaultdict(lambda: defaultdict(set))
    for node, norm in norms.items():
        for reading in (use.reading for use in uses[node]):
            if reading is not None:
                readers[reading.weight][norm, reading.in_axis, reading.bias].add(reading.node)
    for weight, ways in readers.items():
        ((norm, axis, bias), nodes), *others = ways.items()
        seen = bias if norm.bias is not None else None
        if others or (norm.bias is not None and not used_only_by((bias,), nodes, found.program)):
            continue
        if norm.bias is not None and seen is None:
            continue
        if used_only_by((weight,), nodes, found.program):
            yield FreeReader(weight, axis, seen, norm.gain, norm.bias, norm.offset)
        elif axis == 1 and (added := _added_tables(weight, nodes, found.program)):
            paired = _paired_rows(weight, added, found.program)
            yield LevelTable(weight, added, seen, norm.gain, norm.bias, norm.offset, paired)


def _added_tables(table: str, readers: Collection[fx.Node], program: Program) -> tuple[str, ...]:
    """Tables of one of which a row is added wherever one of this table is, if this one is only looked up or read."""
    lookups = _lookups(program)
    if not lookups[table] or not used_only_by((table,), {*readers, *lookups[table]}, program):
        return ()
    sums = [set(_summands(lookup)) for lookup in lookups[table]]
    others: list[str] = []
    for other, nodes in lookups.items():
        times = [sum(node in summands for node in nodes) for summands in sums]
        alone = other != table and sum(times) == len(nodes) and used_only_by((other,), nodes, program)
        if alone and set(times) <= {0, 1}:
            others.append(other)
            sums = [summands for summands, n in zip(sums, times, strict=True) if not n]
    return () if sums else tuple(others)


def _lookups(program: Program) -> dict[str, list[fx.Node]]:
    """Where rows of each table are looked up."""
    lookups: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        name = program.parameters.get(node.args[0]) if does(node, Trait.LOOKS_UP_ROWS) else None
        if name is not None:
            lookups[name].append(node)
    return lookups


def _paired_rows(table: str, others: Collection[str], program: Program) -> tuple[int, str, int] | None:
    """A row of a table, and another table and its row, which is added where that one is, and nowhere else: the position
    of padding."""
    lookups = _lookups(program)
    for other in lookups.keys() - {table, *others}:
        first, second = lookups[table], lookups[other]
        pairs = {_paired_at(x, y) for x in first for y in second if y in set(_summands(x))}
        met = [sum(y in set(_summands(x)) for y in second) for x in first]
        if len(pairs) == 1 and met == [1] * len(second) and used_only_by((other,), second, program):
            (pair,) = pairs
            if pair is not None and all(
                row in range(program.shapes[n][0]) for row, n in zip(pair, (table, other), strict=True)
            ):
                return pair[0], other, pair[1]
    return None


def _paired_at(tokens: fx.Node, positions: fx.Node) -> tuple[int, int] | None:
    """The rows p and k of two tables if c ⊙ m + k are looked up in the second one, for tokens t that are in the first;
    m = [t ≠ p], and c counts the ones of m so far, so that k is where p is."""
    ids, numbers = tokens.args[1], _uncast(positions.args[1])
    if not does(numbers, Trait.ADDS) or not isinstance(numbers.args[1], int) or len(numbers.args) > 2 or numbers.kwargs:
        return None
    counted = _uncast(numbers.args[0])
    if not does(counted, Trait.MULTIPLIES):
        return None
    factors = [_uncast(a) for a in counted.args]
    sums = [_uncast(f.args[0]) for f in factors if does(f, Trait.RUNNING_SUM)]
    masks = [f for f in factors if does(f, Trait.UNEQUAL) and f.args[0] is ids]
    if not masks or sums != masks or tokens.meta["val"].shape != positions.meta["val"].shape:
        return None
    padding = masks[0].args[1]
    return (padding, numbers.args[1]) if isinstance(padding, int) else None


def _uncast(node: Any) -> fx.Node:
    """A whole number before it is given another type, or zero is added."""
    while does(node, Trait.SAME) or (does(node, Trait.ADDS) and node.args[1:] == (0,)):
        node = node.args[0]
    found: fx.Node = node
    return found


def _summands(node: fx.Node) -> Iterator[fx.Node]:
    """What is added up with a value, all of which nothing else sees."""
    top = _top_of(node)
    return (term for term in _terms_of(top) if term is top or len(term.users) == 1)


def _top_of(node: fx.Node) -> fx.Node:
    """The sum of a value and others, where nothing else sees it."""
    while len(node.users) == 1 and is_sum_or_same(user := next(iter(node.users))):
        node = user
    return node


def _terms_of(top: fx.Node) -> Iterator[fx.Node]:
    """The terms of a sum; a sum that something else sees, too, is one."""
    parts = [top]
    while parts:
        part = parts.pop()
        if is_sum_or_same(part) and (part is top or len(part.users) == 1):
            parts += part.all_input_nodes
        else:
            yield part


def is_sum_or_same(node: fx.Node) -> bool:
    """Whether an op adds two values, or leaves one as it is."""
    return is_sum(node) or _is_same(node)


def _is_same(node: fx.Node) -> bool:
    if does(node, Trait.MULTIPLIES):
        return node.args[1:] in ((1,), (1.0,))
    return does(node, Trait.SAME)


def inverse(gain: Tensor) -> Tensor:
    """1/γ up to a factor, in the limit where some entries are zero: one for those, and zero for the others."""
    least = gain.abs().min()
    return torch.where(gain == 0, 1.0, 0.0).to(gain) if bool(least == 0) else least / gain
