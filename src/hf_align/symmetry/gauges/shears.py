"""Values whose mean only linear maps see: x + 1 uᵀx for x, and W (I + 1 uᵀ)⁻¹ for each of those maps W.

What is written by a norm whose gain γ stays can only follow such a change if it is none: hᵀ(γ ⊙ n) = 0 for h = 1/γ. So
u = c h where some of x is written so, and the rest by weights that may change: tables, linear maps, biases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape
from hf_align.symmetry.gauges.index_provenance import LosesMean, entries_of, in_order, moved_alone
from hf_align.symmetry.gauges.kept_norms import (
    KeptNorm,
    VectorUse,
    inverse,
    is_sum_or_same,
    norms_that_stay,
    vector_uses,
)
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.patterns import used_only_by
from hf_align.tracing.ops import Trait, does

_Weight = tuple[str, int]
_NEARLY_ORTHOGONAL = 1e-3
"""The cosine between 1/γ and the all-ones vector."""


def is_nearly_orthogonal_to_ones(row: Tensor) -> bool:
    """Whether a shear along 1 with such a row cannot be told from what changes nothing."""
    return bool(row.sum().abs() < _NEARLY_ORTHOGONAL * row.norm() * math.sqrt(len(row)))


@dataclass(frozen=True)
class ShearAlongMean(Gauge):
    """W (I + c 1 hᵀ)⁻¹ replaces what reads x, and (I + c 1 hᵀ) A what writes it: nothing else sees the mean of x.

    Beside what A writes, x may be γ ⊙ n, h = 1/γ, which does not change. Of all c, the one for which W 1 has entries of
    mean square one.

    Attributes:
        writers: each A, and the axis along which it writes x; biases of norms, too.
        readers: each W, and the axis along which it reads x.
        shifted: weights that read γ ⊙ n + β alone, for the β among the writers that is named here, their axes, and
            their biases, which take the change of β up.
    """

    gain: str
    offset: float
    writers: tuple[tuple[str, int], ...]
    readers: tuple[tuple[str, int], ...]
    shifted: tuple[tuple[str, int, str, str], ...]

    said = "scaled along the mean, which only what reads the stream sees"

    @property
    def targets(self) -> tuple[str, ...]:
        return (*(n for n, _ in (*self.writers, *self.readers)), *(bias for *_, bias in self.shifted))

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.gain)[-1]}

    def fix(self, name: str, get: Get) -> Tensor:
        row = inverse(get(self.gain).double() + self.offset)
        means = [get(weight).double().sum(axis) for weight, axis in self.readers]
        length = torch.cat(means).square().mean().sqrt()
        if is_nearly_orthogonal_to_ones(row) or not bool(length):
            return get(name)
        share = (length - 1) / row.sum()
        for weight, axis in self.writers:
            if name == weight:
                written = get(name).movedim(axis, 0).double()
                return (written + share * (row @ written)).movedim(0, axis).to(get(name).dtype)
        for weight, axis in self.readers:
            if name == weight:
                read = get(name).movedim(axis, -1).double()
                return (read - share / length * torch.outer(read.sum(-1), row)).movedim(-1, axis).to(get(name).dtype)
        ((weight, axis, beta, _),) = (shifted for shifted in self.shifted if shifted[-1] == name)
        return get(name) - (share * (row @ get(beta).double()) * get(weight).double().sum(axis)).to(get(name).dtype)


@dataclass(frozen=True)
class _Value:
    """A value that linear maps read.

    Attributes:
        norms: of its terms, what norms write.
        writers: the weights of all other terms, and the axes along which they write; none if some are no such.
    """

    uses: tuple[VectorUse, ...]
    terms: frozenset[fx.Node]
    norms: frozenset[KeptNorm]
    writers: frozenset[_Weight] | None

    @property
    def readers(self) -> frozenset[str]:
        return frozenset(use.reading.weight for use in self.uses if use.reading is not None)


def shears_along_means(
    found: Interpretation,
    gone: Collection[str],
    zero: Collection[str],
    loses_mean: LosesMean,
) -> Iterator[ShearAlongMean]:
    """The gauges of all such values that norms write in part.

    Args:
        gone, zero: as for `kept_norms`.
    """
    norms = norms_that_stay(found, gone, zero)
    tops = dict.fromkeys(_top_of(node, found, loses_mean) for node in (*norms, *found.linear_uses))
    values = [value for value in (_value(node, norms, zero, found, loses_mean) for node in tops) if value.readers]
    for gain in dict.fromkeys(norm.gain for norm in norms.values()):
        together = _read_together([v for v in values if any(n.gain == gain for n in v.norms)], values)
        shear = _shear(together, found, loses_mean)
        if shear is not None and shear.gain == gain:
            yield shear


def _seeing(node: fx.Node, loses_mean: LosesMean) -> list[fx.Node]:
    """The users of a value that are not blind to its mean."""
    return [user for user in node.users if not loses_mean(user, node)]


def _is_stage(node: fx.Node, found: Interpretation) -> bool:
    """Whether a value is one that came before it in a stream, as it is or with other axes before the last, or a sum."""
    if is_sum_or_same(node):
        return True
    if len(node.all_input_nodes) != 1:
        return False
    (before,) = node.all_input_nodes
    value = before.meta["val"]
    if not isinstance(value, Tensor) or not value.dim():
        return False
    moved = moved_alone(node, before, entries_of(before), found)
    return moved is not None and in_order(moved)


def _top_of(node: fx.Node, found: Interpretation, loses_mean: LosesMean) -> fx.Node:
    """The last stage of the stream that a value is written into: what reads those before it never sees their mean."""
    while len(users := _seeing(node, loses_mean)) == 1 and _is_stage(users[0], found):
        (node,) = users
    return node


def _terms_of(
    top: fx.Node, norms: Mapping[fx.Node, KeptNorm], found: Interpretation, loses_mean: LosesMean
) -> Iterator[fx.Node]:
    """All that is written into the stream up to a stage."""
    parts = [top]
    while parts:
        part = parts.pop()
        alone = part is top or len(_seeing(part, loses_mean)) == 1
        if part not in norms and _is_stage(part, found) and alone:
            parts += part.all_input_nodes
        else:
            yield part


def _value(
    node: fx.Node,
    norms: Mapping[fx.Node, KeptNorm],
    zero: Collection[str],
    found: Interpretation,
    loses_mean: LosesMean,
) -> _Value:
    terms = frozenset(_terms_of(node, norms, found, loses_mean))
    written = frozenset(norms[term] for term in terms if term in norms)
    writers: set[_Weight] | None = {(norm.bias, 0) for norm in written if norm.bias is not None}
    for term in terms - set(norms):
        use, table = found.linear_uses.get(term), found.program.parameters.get(next(iter(term.all_input_nodes), term))
        if use is not None and len(found.weights[use.weight].axes) == 2 and writers is not None:
            writers.add((use.weight, 1 - use.in_axis))
            writers |= {(use.bias, 0)} if use.bias is not None and use.bias not in zero else set()
        elif does(term, Trait.LOOKS_UP_ROWS) and table is not None and writers is not None:
            writers.add((table, 1))
        else:
            writers = None
    alone = writers is not None and all(term is node or len(_seeing(term, loses_mean)) == 1 for term in terms)
    return _Value(tuple(vector_uses(node, found)), terms, written, frozenset(writers or ()) if alone else None)


def _read_together(first: list[_Value], values: list[_Value]) -> list[_Value]:
    """Some values, and all that share a reader with one of them."""
    found = first
    while True:
        readers = frozenset[str]().union(*(v.readers for v in found))
        more = [v for v in values if v in found or v.readers & readers]
        if len(more) == len(found):
            return found
        found = more


def _shear(values: list[_Value], found: Interpretation, loses_mean: LosesMean) -> ShearAlongMean | None:
    """The gauge of some values together, if there is one."""
    norms = {norm for value in values for norm in value.norms}
    writers = sorted({w for value in values for w in value.writers or ()})
    read = [use.reading for value in values for use in value.uses if use.reading is not None]
    blind = all(loses_mean(u.user, u.value) for value in values for u in value.uses if u.reading is None)
    if len(norms) != 1 or not blind or any(value.writers is None for value in values):
        return None
    (norm,) = norms
    beside = frozenset[str]().union(*(v.readers for v in values if (v.writers or set()) - {(norm.bias, 0)}))
    readers = tuple(sorted({(use.weight, use.in_axis) for use in read if use.weight in beside}))
    beta = norm.bias
    alone = {(use.weight, use.in_axis, use.bias) for use in read if use.weight not in beside and beta is not None}
    shifted = tuple(sorted((w, axis, beta, bias) for w, axis, bias in alone if beta and bias))
    names = [name for name, _ in (*writers, *readers)] + [bias for *_, bias in shifted]
    nodes = {use.node for use in read} | {term for value in values for term in value.terms}
    apart = len(names) == len(set(names)) and len(shifted) == len(alone)
    if not (readers and apart and used_only_by(names, nodes, found.program)):
        return None
    return ShearAlongMean(norm.gain, norm.offset, tuple(writers), readers, shifted)
