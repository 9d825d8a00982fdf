"""Rotary embedding by a table that is saved: it turns coordinates of queries and keys by complex numbers c + is.

What the table writes is M(T) x, and M(zT) = M(T) R(z) for any complex numbers z, one for each pair of columns. So they
may go from the table into the weights that write x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get
from hf_align.symmetry.gauges.index_provenance import follow, numbered, present, rows_shown
from hf_align.symmetry.interpreter.linear_regions import LinearRegion
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.patterns import used_only_by
from hf_align.tracing.execute import run_node

_SMALL = 1e-9
"""Rounding, of numbers around one."""

Turn = tuple[tuple[int, int, int], ...]
"""J of one pair of columns: (Jx)_i is x_j or -x_j, as (i, j, 1 or -1) for every i that it does not leave alone."""


@dataclass(frozen=True)
class Turned:
    """A weight of which some rows write what a table turns.

    Attributes:
        axis: along which it writes.
        rows: for each head, the rows of its coordinates, in order.
        turns: J for each pair of columns of the table.
    """

    weight: str
    axis: int
    bias: str | None
    rows: tuple[tuple[int, ...], ...]
    turns: tuple[Turn, ...]

    def by(self, numbers: Tensor, tensor: Tensor, axis: int) -> Tensor:
        """R(z) times a tensor, for all z as [pairs, 2]."""
        written = tensor.movedim(axis, 0)
        result = written
        for rows in self.rows:
            for (real, imaginary), turn in zip(numbers, self.turns, strict=True):
                here = torch.tensor([rows[i] for i, _, _ in turn], device=tensor.device)
                there = torch.tensor([rows[j] for _, j, _ in turn], device=tensor.device)
                signs = torch.tensor([sign for *_, sign in turn]).to(tensor).reshape(-1, *[1] * (tensor.dim() - 1))
                result = result.index_copy(0, here, real * written[here] + imaginary * signs * written[there])
        return result.movedim(0, axis)


@dataclass(frozen=True)
class TurnTable(Gauge):
    """T/z replaces the columns c + is of a table, and R(z) W what writes for them; |z|² is the mean of |c + is|², and
    the first of them that is not zero has the phase of z.

    Attributes:
        pairs: the numbers of the columns c and s.
    """

    table: str
    pairs: tuple[tuple[int, int], ...]
    turned: tuple[Turned, ...]

    said = "a table of angles, turned as the weights that meet it allow"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.table, *(n for t in self.turned for n in (t.weight, t.bias) if n is not None))

    def fix(self, name: str, get: Get) -> Tensor:
        table = get(self.table).double()
        numbers = torch.stack([_unit(table[:, list(pair)]) for pair in self.pairs])
        stored = get(name)
        if name == self.table:
            for (c, s), (real, imaginary) in zip(self.pairs, numbers, strict=True):
                square = real.square() + imaginary.square()
                pair = torch.tensor([c, s], device=table.device)
                x, y = table[:, c] / square, table[:, s] / square
                table = table.index_copy(1, pair, torch.stack([x * real + y * imaginary, y * real - x * imaginary], 1))
            return table.to(stored.dtype)
        (turned,) = (t for t in self.turned if name in (t.weight, t.bias))
        return turned.by(numbers, stored.double(), turned.axis if name == turned.weight else 0).to(stored.dtype)


def _unit(columns: Tensor) -> Tensor:
    """z of a pair of columns, [places, 2]; one where they are zero."""
    largest = columns.detach().abs().max()
    if not bool(largest):
        return torch.stack([columns.new_ones(()), columns.new_zeros(())])
    lengths = (columns / largest).norm(dim=1)
    first = int((lengths.detach() > 0).int().argmax())
    mean = (columns / largest).square().sum(1).mean().sqrt()
    return columns[first] / lengths[first] * mean


def turned_tables(found: Interpretation) -> Iterator[TurnTable]:
    """The gauges of all tables that do nothing but to turn what weights write."""
    program = found.program
    regions = [region for region in found.regions.values() if region.coefficients]
    for name in dict.fromkeys(program.parameters.values() if regions else ()):
        nodes = [node for node, other in program.parameters.items() if other == name]
        if len(nodes) > 1 or nodes[0].meta["val"].dim() != 2:
            continue
        made = _made_of(nodes[0], found)
        turning = [region for region in regions if region.coefficients & made]
        inside = frozenset[fx.Node]().union(*(_nodes(region) for region in turning))
        if not turning or not all(user in inside or user in made for node in made for user in node.users):
            continue
        turns = [_turns(region, nodes[0], made, found) for region in turning]
        turned = [_turned(region, turn, inside, found) for region, turn in zip(turning, turns, strict=True) if turn]
        whole = [t for t in turned if t is not None]
        pairs = {tuple(turn) for turn in turns if turn}
        names = [n for t in dict.fromkeys(whole) for n in (t.weight, t.bias) if n is not None]
        if len(whole) == len(turning) and len(pairs) == 1 and len(names) == len(set(names)):
            yield TurnTable(name, pairs.pop(), tuple(dict.fromkeys(whole)))


def _nodes(region: LinearRegion) -> frozenset[fx.Node]:
    return region.inner | {region.output}


def _made_of(table: fx.Node, found: Interpretation) -> frozenset[fx.Node]:
    """A table and all that is made of it and of constants."""
    made = {table}
    for node in found.program.graph.nodes:
        above = node.all_input_nodes if node.op == "call_function" else []
        if not made.isdisjoint(above) and all(a in made or a in found.program.constants for a in above):
            made.add(node)
    return frozenset(made)


def _turns(
    region: LinearRegion, table: fx.Node, made: frozenset[fx.Node], found: Interpretation
) -> dict[tuple[int, int], Turn] | None:
    """J for each pair of columns, in order; none if the table does anything else in the region."""
    if not region.coefficients <= made:
        return None
    rows, columns = table.meta["val"].shape
    size = region.base.meta["val"].shape[-1]
    maps = []
    for unit in torch.eye(columns, dtype=torch.float64):
        images = [_run(region, table, unit.expand(rows, columns), e, made, found) for e in torch.eye(size).double()]
        maps.append(torch.stack([image.reshape(-1, size)[0] for image in images], 1))
    real = [c for c, m in enumerate(maps) if torch.equal(m @ m, m) and torch.equal(m, m.diagonal().diag())]
    pairs = {}
    for c in real:
        match = [s for s, m in enumerate(maps) if s not in real and torch.equal(m @ m, -maps[c])]
        if len(match) != 1:
            return None
        turn = maps[match[0]]
        if not torch.equal(turn.abs().sum(1), maps[c].diagonal()):
            return None
        pairs[c, match[0]] = tuple((i, j, int(turn[i, j])) for i, j in turn.nonzero().tolist())
    if 2 * len(pairs) != columns or len({s for _, s in pairs}) != len(pairs):
        return None
    return pairs if _go_through(pairs, region, table, made, found) else None


def _go_through(
    pairs: Mapping[tuple[int, int], Turn], region: LinearRegion, table: fx.Node, made: frozenset[fx.Node],
    found: Interpretation,
) -> bool:  # fmt: skip
    """Whether M(zT) x = M(T) R(z) x at random z, T and x: both sides are polynomials."""
    rng = torch.Generator().manual_seed(0)
    numbers = torch.randn(len(pairs), 2, generator=rng).double()
    stored = torch.randn(table.meta["val"].shape, generator=rng).double()
    value = torch.randn(region.base.meta["val"].shape, generator=rng).double()
    times = stored.clone()
    for (c, s), (x, y) in zip(pairs, numbers, strict=True):
        times[:, c], times[:, s] = x * stored[:, c] - y * stored[:, s], x * stored[:, s] + y * stored[:, c]
    every = Turned("", 0, None, (tuple(range(value.shape[-1])),), tuple(pairs.values()))
    left = _run(region, table, times, value, made, found)
    right = _run(region, table, stored, every.by(numbers, value, -1), made, found)
    return bool((left - right).abs().max() < _SMALL)


def _run(
    region: LinearRegion, table: fx.Node, stored: Tensor, value: Tensor, made: frozenset[fx.Node],
    found: Interpretation,
) -> Tensor:  # fmt: skip
    """What a region makes of a value, copied to all places, for some numbers in the table."""
    values: dict[fx.Node, Any] = {table: stored, region.base: value.expand(region.base.meta["val"].shape)}
    for node in sorted(made | _nodes(region)):
        if node not in values:
            values[node] = run_node(node, lambda n: values[n] if n in values else found.program.constants[n])
    result = values[region.output]
    assert isinstance(result, Tensor)
    return result


def _turned(
    region: LinearRegion, turns: Mapping[tuple[int, int], Turn], inside: frozenset[fx.Node], found: Interpretation
) -> Turned | None:
    """The weight that writes the base of a region, if its rows are seen nowhere else."""
    written = rows_shown(region.base, found)
    if written is None:
        return None
    use, labels = written
    heads = torch.unique(labels.reshape(-1, labels.shape[-1]), dim=0)
    alike = {r.node: numbered(r) for r in found.linear_uses.values() if r.weight == use.weight}
    places = {(r.in_axis, r.bias) for r in found.linear_uses.values() if r.weight == use.weight}
    apart = len(heads.unique()) == heads.numel() and len(places) == 1
    alone = used_only_by((use.weight, use.bias), alike, found.program)
    rows = set(heads.flatten().tolist())
    unseen = all(
        other.user in inside or rows.isdisjoint(present(other.labels).tolist()) for other in follow(alike, found)
    )
    if not (apart and alone and unseen):
        return None
    return Turned(use.weight, 1 - use.in_axis, use.bias, tuple(map(tuple, heads.tolist())), tuple(turns.values()))
