"""The values of all that a graph computes of constants alone: masks, position ids, rotary tables."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.tracing.nested import told_apart
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program
from hf_align.tracing.results import blank_like


def evaluate_constants(graph: fx.Graph, constants: dict[fx.Node, Any]) -> None:
    """Extend `constants` by every call whose operands are constants, or that reads nothing but their shapes.

    Layers compute the same of the same, so what was computed once is not computed again.
    """
    computed: dict[Hashable, Any] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            known = all(a in constants for a in node.all_input_nodes)
            first = constants[node.all_input_nodes[0]] if known and node.all_input_nodes else None
            if does(node, Trait.SAME) and not does(node, Trait.CASTS) and _is_laid_out_as(first, node):
                constants[node] = first  # nothing is written to either of them
            elif does(node, Trait.MAKES):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _constant_or_shape(n, constants))
                value = node.target(*args, **kwargs)
                blank = does(node, Trait.BLANK) and isinstance(value, Tensor)  # whatever memory held is no constant
                constants[node] = blank_like(value) if blank else value
            elif known:
                operands = fx.node.map_arg((node.args, node.kwargs), constants.__getitem__)
                call = told_apart(node.target, operands)
                if call not in computed or _draws(node):
                    computed[call] = node.target(*operands[0], **operands[1])
                constants[node] = computed[call]


def _draws(node: fx.Node) -> bool:
    """Whether an op gives something else each time."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_laid_out_as(value: Any, node: fx.Node) -> bool:
    """Whether a value lies in memory as what a node gave did: what shows it in another shape may count on that."""
    gave = node.meta.get("val")
    return isinstance(value, Tensor) and isinstance(gave, Tensor) and value.stride() == gave.stride()


def _constant_or_shape(node: fx.Node, constants: dict[fx.Node, Any]) -> Any:
    if node in constants:
        return constants[node]
    example = node.meta["val"]
    return torch.empty(example.shape, dtype=example.dtype) if isinstance(example, Tensor) else example


def hides_all(program: Program) -> bool:
    """Whether some position attends to nothing at all, so that the output is no number."""
    for node in program.graph.nodes:
        if does(node, Trait.FILLS) and node.args[2] == -math.inf:
            hidden = program.constants.get(node.args[1])
            if isinstance(hidden, Tensor) and bool(hidden.all(-1).any()):
                return True
    return False
