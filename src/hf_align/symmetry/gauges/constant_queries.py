"""Queries that no input changes, as of heads that pool with a learned probe: they are a vector, and show one of keys.

Of q = Wp + b for a weight p only the sum is seen; it may be b alone. And of the keys K of a head only Kq is, so that
W may lose, of what it writes for them, all that is orthogonal to q.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get
from hf_align.symmetry.gauges.constant_sources import is_vector
from hf_align.symmetry.gauges.index_provenance import follow, numbered, row_of, rows_shown
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import scales, used_only_by
from hf_align.tracing.ops import Trait, does, factors_of


@dataclass(frozen=True)
class ReadConstant(Gauge):
    """b + Wp replaces b, and zero W, which reads nothing but the weight p; zero replaces p where nothing else sees it.

    Attributes:
        axis: along which W reads.
        exclusive: whether W alone sees p.
    """

    constant: str
    weight: str
    axis: int
    bias: str
    exclusive: bool

    said = "what reads a weight and nothing else, moved into its bias"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight, self.bias, *([self.constant] if self.exclusive else []))

    def fix(self, name: str, get: Get) -> Tensor:
        if name != self.bias:
            return torch.zeros_like(get(name))
        return get(name) + get(self.weight).movedim(self.axis, -1) @ get(self.constant).flatten()


@dataclass(frozen=True)
class SeenKeys(Gauge):
    """q qᵀW / qᵀq replaces the rows of W that write the keys of a head, for the one query q that all of them meet.

    Attributes:
        query: the weight whose entries are the queries of all heads.
        axis: along which W writes.
        heads: by head, the entries of its query, and the rows of W that they meet, in order.
    """

    query: str
    weight: str
    axis: int
    heads: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    said = "keys without what their one query never sees"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight,)

    def fix(self, name: str, get: Get) -> Tensor:
        every = get(self.query).double().flatten()
        keys = get(name).double().movedim(self.axis, 0)
        for entries, rows in self.heads:
            at = torch.tensor(rows, device=keys.device)
            query = _unit(every[list(entries)])
            seen = torch.tensordot(query, keys.index_select(0, at), 1)
            keys = keys.index_copy(0, at, query.reshape(-1, *[1] * seen.dim()) * seen)
        return keys.movedim(0, self.axis).to(get(name).dtype)


def _unit(vector: Tensor) -> Tensor:
    """A vector over its length, or zero, however large or small its entries are."""
    largest = vector.detach().abs().max()
    if not bool(largest):
        return vector
    scaled = vector / largest
    return scaled / scaled.norm()


def read_constants(found: Interpretation) -> Iterator[ReadConstant]:
    """The linear maps that read weights and nothing else."""
    program = found.program
    readings: dict[tuple[str, LinearUse], None] = {}
    seen = set[str]()
    for node, name in program.parameters.items():
        if not is_vector(node):
            continue
        shape = node.meta["val"].shape
        for use in follow({node: torch.arange(shape.numel()).reshape(shape)}, found):
            reading = found.reading(use.user, use.value)
            whole = ((0, shape.numel()),)
            if reading is not None and row_of(reading, use.labels, found) == whole:
                readings[name, reading] = None
            else:
                seen.add(name)
    maps: dict[tuple[str, str, int, str | None], set[fx.Node]] = defaultdict(set)
    for name, reading in readings:
        maps[name, reading.weight, reading.in_axis, reading.bias].add(reading.node)
    for (name, weight, axis, bias), nodes in maps.items():
        matrix = len(found.weights[weight].axes) == 2
        if bias is not None and matrix and used_only_by((weight, bias), nodes, program):
            alone = name not in seen and sum(n == name for n, *_ in maps) == 1
            yield ReadConstant(name, weight, axis, bias, alone)


def seen_keys(found: Interpretation, read: tuple[ReadConstant, ...]) -> Iterator[SeenKeys]:
    """The gauges of all keys that meet one query each.

    Args:
        read: the maps that have gone into their biases.
    """
    queries = _queries(found, read)
    keys: dict[str, list[tuple[fx.Node, SeenKeys]]] = defaultdict(list)
    for node, (name, labels) in queries.items():
        for user in node.users:
            gauge = _gauge_at(user, node, name, labels, found)
            if gauge is not None:
                keys[gauge[1].weight].append(gauge)
    for weight, ways in keys.items():
        products = {product for product, _ in ways}
        starts = {u.node: numbered(u) for u in found.linear_uses.values() if u.weight == weight}
        biases = {u.bias for u in found.linear_uses.values() if u.weight == weight}
        rows = {row for _, gauge in ways for _, head in gauge.heads for row in head}
        alone = used_only_by((weight,), starts, found.program) and len({gauge for _, gauge in ways}) == 1
        unseen = all(
            use.user in products for use in follow(starts, found) if not rows.isdisjoint(use.labels.unique().tolist())
        )
        if alone and unseen and len(biases) == 1:
            yield ways[0][1]


def _queries(found: Interpretation, read: tuple[ReadConstant, ...]) -> dict[fx.Node, tuple[str, Tensor]]:
    """The values that show nothing but entries of a vector, times one number, and which of them where."""
    starts: dict[str, dict[fx.Node, Tensor]] = defaultdict(dict)
    gone = {(gauge.weight, gauge.bias): gauge.bias for gauge in read}
    for node, name in found.program.parameters.items():
        if is_vector(node):
            starts[name][node] = torch.arange(node.meta["val"].numel()).reshape(node.meta["val"].shape)
    for reading in found.linear_uses.values():
        bias = gone.get((reading.weight, reading.bias or ""))
        if bias is not None:
            starts[bias][reading.node] = numbered(reading)
    queries: dict[fx.Node, tuple[str, Tensor]] = {}
    for name, nodes in starts.items():
        waiting = [nodes]
        while waiting:  # what is scaled starts anew, for beside entries that are not it is no vector times one number
            for use in follow(waiting.pop(), found):
                if bool((use.labels >= 0).all()):
                    queries[use.value] = (name, use.labels)
                if _scales(use.user, use.value):
                    waiting.append({use.user: use.labels})
    return queries


def _scales(user: fx.Node, node: fx.Node) -> bool:
    """Whether an op multiplies or divides a value by a number."""
    numbers = [a for a in user.args if a is not node]
    return scales(user, node) and len(numbers) == 1 and isinstance(numbers[0], (int, float))


def _gauge_at(
    user: fx.Node, query: fx.Node, name: str, labels: Tensor, found: Interpretation
) -> tuple[fx.Node, SeenKeys] | None:
    """A product, and the keys that it shows to a query, if each of them meets one alone."""
    factors = factors_of(user) if does(user, Trait.CONTRACTS) else None
    if factors is None or factors[2] is not None or user.args[factors[0]] is not query or user.kwargs:
        return None
    key = user.args[factors[1]]
    written = rows_shown(key, found) if isinstance(key, fx.Node) and key is not query else None
    if written is None or written[1].dim() < 2 or labels.dim() < 2:
        return None
    use, shown = written
    batch = torch.broadcast_shapes(labels.shape[:-2], shown.shape[:-2])
    size, places = labels.shape[-1], shown.shape[-1]
    met = torch.cat([
        labels[..., :, None, :].expand(*batch, -1, places, -1).reshape(-1, size),
        shown.mT[..., None, :, :].expand(*batch, labels.shape[-2], -1, -1).reshape(-1, size),
    ], 1)  # fmt: skip
    pairs = torch.unique(met, dim=0)
    rows = pairs[:, size:].flatten()
    if len(rows.unique()) < len(rows) or size < 2 or any(len(p[:size].unique()) < size for p in pairs):
        return None
    heads = tuple((tuple(p[:size].tolist()), tuple(p[size:].tolist())) for p in pairs)
    return user, SeenKeys(name, use.weight, 1 - use.in_axis, heads)
