"""A table that is read by the weights that read a value too, of which some combination of entries is constant.

Where hᵀy = c in every instance of a value y (what a LayerNorm writes), and the weights W that read y are those that
read what a table holds behind a norm of its own, r, they may become W + W a hᵀ for any a: from y they read W a c more,
which their biases take up, and from r the same as before where it becomes r - a (hᵀr - c). Such are the relative
embeddings of DeBERTa.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, fx

from hf_align.symmetry.certificate.own_norms import OwnNorm
from hf_align.symmetry.certificate.readings import LINEAR, LinearReading, leads_to
from hf_align.symmetry.certificate.shears import Streams
from hf_align.symmetry.certificate.spans import Constant, Spans
from hf_align.symmetry.passing import keeps_last, takes_rows
from hf_align.tracing.trace import Program, op_name


def shared_readers(streams: Streams, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The directions at these weights, each as changes of some parameters."""
    program, spans = streams.program, Spans(streams.program, weights)
    for norm, own in streams.own_norms.items():
        of_table = {n: r for n, r in streams.readings.items() if _origin(r.source, program) is norm}
        reading = {r.weight for r in of_table.values()}
        others = {n: r for n, r in streams.readings.items() if r.weight in reading and n not in of_table}
        every = of_table | others
        alone = all(leads_to(user, of_table) for user in norm.users) and all(
            leads_to(user, every) for r in every.values() for part in (r.weight, r.bias) if part for user in part.users
        )
        if not alone or {r.weight for r in others.values()} != reading or not _one_bias_each(every.values()):
            continue
        for constant in _in_all([spans.constants(r.source) for r in others.values()]):
            for a in torch.eye(len(constant.row), dtype=torch.float64):
                yield _changes(own, others.values(), a, constant, program, weights)


def _origin(node: fx.Node, program: Program) -> fx.Node:
    """What a value is, but for the order and the choice of its rows."""
    while (op_name(node) in LINEAR and len(node.all_input_nodes) == 1 and keeps_last(node)) or (
        op_name(node) == "index" and takes_rows(node, program)
    ):
        node = node.all_input_nodes[0]
    return node


def _one_bias_each(readings: Iterable[LinearReading]) -> bool:
    """Whether every weight is always read with the same bias, and none without."""
    biases: dict[fx.Node, set[fx.Node | None]] = defaultdict(set)
    for reading in readings:
        biases[reading.weight].add(reading.bias)
    return all(None not in found and len(found) == 1 for found in biases.values())


def _in_all(values: list[list[Constant]]) -> list[Constant]:
    """The combinations that are the same constant in several values."""

    def has(found: list[Constant], one: Constant) -> bool:
        return any(c.matches(one) and torch.allclose(c.value, one.value) for c in found)

    return [one for one in values[0] if all(has(found, one) for found in values[1:])]


def _changes(
    own: OwnNorm,
    readings: Iterable[LinearReading],
    a: Tensor,
    constant: Constant,
    program: Program,
    weights: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    turn = -torch.outer(a, constant.row)
    changes = own.changes(turn, weights)
    changes[own.bias] = turn @ weights[own.bias] + constant.value * a
    for reading in readings:
        assert reading.bias is not None
        weight = weights[program.parameters[reading.weight]]
        read = weight @ a if reading.rows_out else a @ weight
        more = torch.outer(read, constant.row)
        changes[program.parameters[reading.weight]] = more if reading.rows_out else more.T
        changes[program.parameters[reading.bias]] = -constant.value * read
    return changes
