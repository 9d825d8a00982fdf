"""Tables whose rows the inputs choose: which rows never meet which others.

Rows of two tables that are added at the same places may exchange a constant. Where the numbers of one follow from those
of the other (padding stands at the position of padding, and nothing else does), rows fall into classes that never meet,
and every class has a constant of its own.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, fx

from hf_align.tracing.execute import call_wide
from hf_align.tracing.trace import Program, op_name, upstream

_DRAWS = 64

Numbers = Mapping[fx.Node, Tensor]
"""Which rows some lookups choose, by lookup."""


@dataclass(frozen=True)
class Tables:
    """The tables of a program whose rows its inputs choose."""

    program: Program

    @cached_property
    def lookups(self) -> dict[fx.Node, fx.Node]:
        """Lookup -> the table."""
        program = self.program
        return {
            n: n.args[0]
            for n in program.graph.nodes
            if n.op == "call_function" and op_name(n) == "embedding"
            and n.args[0] in program.parameters and n.args[1] not in program.constants
        }  # fmt: skip

    def class_of_rows(self, table: fx.Node) -> Tensor:
        """Rows of all tables that are ever chosen at one place are in one class, [rows]."""
        return self._classes[table]

    def class_of_places(self, lookup: fx.Node, numbers: Numbers) -> Tensor | None:
        """The class at every place of a lookup; None where it depends on the weights."""
        if lookup not in numbers:
            return None
        return self._classes[self.lookups[lookup]][numbers[lookup]]

    @cached_property
    def samples(self) -> list[Numbers]:
        """What some inputs choose, enough of them that every class occurs wherever it can."""
        met = [self._met(numbers) for numbers in self._drawn]
        wanted = set[tuple[fx.Node, int]]().union(*met)
        chosen: list[Numbers] = []
        while wanted or not chosen:
            best = max(range(len(met)), key=lambda i: len(met[i] & wanted))
            wanted -= met[best]
            chosen.append(self._drawn[best])
        return chosen

    def _met(self, numbers: Numbers) -> set[tuple[fx.Node, int]]:
        rows = {lookup: self._classes[self.lookups[lookup]][chosen] for lookup, chosen in numbers.items()}
        return {(lookup, label) for lookup, labels in rows.items() for label in labels.unique().tolist()}

    @cached_property
    def _drawn(self) -> list[Numbers]:
        rng = torch.Generator().manual_seed(0)
        shapes = {name: tuple(node.meta["val"].shape) for node, name in self.program.inputs.items()}
        return [_numbers(self.program, self.lookups, self.program.example.random(shapes, rng)) for _ in range(_DRAWS)]

    @cached_property
    def _classes(self) -> dict[fx.Node, Tensor]:
        """Classes of one row, which meet nothing that their inputs choose, are one."""
        start, total = {}, 0
        for table in dict.fromkeys(self.lookups.values()):
            start[table] = total
            total += table.meta["val"].shape[0]
        pairs = [torch.zeros(2, 0, dtype=torch.long)]
        for numbers in self._drawn:
            rows = {u: start[self.lookups[u]] + numbers[u] for u in self._varying & numbers.keys()}
            pairs += [torch.stack([rows[a], rows[b]]).reshape(2, -1) for a, b in _at_same_places(rows)]
        label = _components(torch.cat(pairs, 1), total)
        return {t: label[s : s + t.meta["val"].shape[0]] for t, s in start.items()}

    @cached_property
    def _varying(self) -> set[fx.Node]:
        """Lookups that do not choose the same row everywhere, as types of tokens that are not told apart do."""
        return {u for numbers in self._drawn for u, rows in numbers.items() if len(rows.unique()) > 1}


def _at_same_places(numbers: Numbers) -> Iterable[tuple[fx.Node, fx.Node]]:
    by_shape: dict[torch.Size, list[fx.Node]] = defaultdict(list)
    for lookup, rows in numbers.items():
        by_shape[rows.shape].append(lookup)
    return (pair for lookups in by_shape.values() for pair in pairwise(lookups))


def _components(pairs: Tensor, size: int) -> Tensor:
    """Label the connected components of a graph, the largest first, and all of one vertex like that, [vertices]."""
    graph = coo_array((torch.ones(pairs.shape[1]).numpy(), tuple(pairs.numpy())), shape=(size, size))
    component = torch.as_tensor(connected_components(graph, directed=False)[1], dtype=torch.long)
    order = component.bincount().argsort(descending=True)
    rank = torch.where(component.bincount()[order] > 1, torch.arange(len(order)), 0)
    return torch.empty_like(rank).scatter(0, order, rank)[component]


def _numbers(program: Program, lookups: Iterable[fx.Node], inputs: Mapping[str, Tensor]) -> Numbers:
    """The rows that inputs choose, as far as no weight has a part in it."""
    values: dict[fx.Node, Any] = {node: inputs[name] for node, name in program.inputs.items()}
    known = ChainMap(values, program.constants)
    found = {}
    for lookup in lookups:
        numbers = lookup.args[1]
        assert isinstance(numbers, fx.Node)
        needed = upstream(numbers, program)
        if not needed & program.parameters.keys():
            for node in sorted(needed - values.keys()):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                values[node] = call_wide(node, args, kwargs)
            found[lookup] = values[numbers]
    return found
