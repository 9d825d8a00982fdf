"""Weights that read a value linearly, and ops that only pass a value on."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from torch import fx

from hf_align.symmetry.passing import stored_matrix
from hf_align.tracing.trace import Program, op_name, operand

# fmt: off
LINEAR = frozenset((
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t", "unsqueeze", "squeeze",
    "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem", "cat", "concat", "stack",
    "contiguous", "clone", "alias", "detach", "dropout", "to", "_to_copy", "neg", "expand_as", "view_as", "reshape_as",
    "type_as",
))
MOVES = frozenset((
    "pad", "roll", "flip", "repeat", "repeat_interleave", "index", "index_select", "movedim", "narrow", "unfold",
    "copy", "slice_scatter", "select_scatter", "tile", "gather",
))
"""Ops that move entries or leave some out, where the numbers that say which are fixed."""
# fmt: on


@dataclass(frozen=True)
class LinearReading:
    """output = source · weight (or its transpose, if its rows are outputs) + bias; `matrix` is the weight as it is
    read."""

    source: fx.Node
    matrix: fx.Node
    weight: fx.Node
    rows_out: bool
    bias: fx.Node | None


def linear_reading(node: fx.Node, program: Program) -> LinearReading | None:
    """What a node is as a linear map of one value by a stored matrix, if it is one."""
    places = {"linear": (0, 1, 2), "addmm": (1, 2, 0), "matmul": (0, 1, None), "mm": (0, 1, None)}
    if node.op != "call_function" or op_name(node) not in places:
        return None
    at, weight_at, bias_at = places[op_name(node)]
    source, matrix = operand(node, at), operand(node, weight_at)
    assert source is not None and matrix is not None
    found = stored_matrix(matrix, program)
    if found is None:
        return None
    weight, flipped = found
    bias = operand(node, bias_at) if bias_at is not None else None
    return LinearReading(source, matrix, weight, flipped != (op_name(node) == "linear"), bias)


def leads_to(user: fx.Node, readers: Container[fx.Node]) -> bool:
    """Whether a use of a weight is one of its readers, or only passes it on to them."""
    return user in readers or (op_name(user) in LINEAR and all(leads_to(u, readers) for u in user.users))
