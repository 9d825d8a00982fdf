"""A program: one forward pass as a graph, and where each fact about it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from transformers import PretrainedConfig

from hf_align.tracing.branches.rewritten import Taken
from hf_align.tracing.example import Example
from hf_align.tracing.farther import farther
from hf_align.tracing.mode import extent
from hf_align.tracing.nested import leaves
from hf_align.tracing.ops import op_name
from hf_align.tracing.reasons import HELPERS

WORKED_OUT = "worked out"
"""Under which the last node of a recorded graph notes the shapes and bytes of what was computed of constants alone."""


@dataclass(frozen=True)
class Evidence:
    """Where a fact comes from: the op, the module it runs in, and the line of the modelling code."""

    role: str
    op: str
    module: str
    line: str


@dataclass(frozen=True)
class Inventory:
    """What a model saves: the `shapes`, `ties` and `buffers` of its Program."""

    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    buffers: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Program:
    """One forward pass as a graph.

    Attributes:
        config: what it was traced from.
        graph: aten ops; every placeholder is in one of the next two.
        parameters: placeholder -> name in memory of a parameter that is read.
        inputs: placeholder -> argument name of `forward`.
        shapes: parameter name -> shape. Tied weights appear once.
        ties: other names of a tied weight -> the name in `shapes`.
        buffers: names of persistent buffers that are saved with the weights, with their values' shapes.
        constants: nodes that depend on neither inputs nor weights, with their values.
        example: the arguments that it was traced with.
        candidate: their number among `first_calls`.
        modes: the calls that it consists of, by name.
        opened: the parameters that some op reads, be it for nothing that is returned; but not for nothing at all, which
            is what a tensor without entries holds.
        taken: the conditions of the model's own code that were met, and whether they held.
        untried: lines of the model's own code that went one way in all calls, and may go the other with an argument of
            a kind that none of them had.
        idle: products by masks that hide only what nobody sees -> what they multiply, which could stand in their place.
    """

    config: PretrainedConfig
    graph: fx.Graph
    parameters: dict[fx.Node, str]
    inputs: dict[fx.Node, str]
    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    buffers: dict[str, tuple[int, ...]]
    constants: dict[fx.Node, Any]
    example: Example
    candidate: int = 0
    modes: tuple[str, ...] = ()
    opened: frozenset[str] = frozenset()
    taken: Taken = field(default_factory=dict)
    untried: tuple[str, ...] = ()
    idle: Mapping[fx.Node, fx.Node] = field(default_factory=dict)

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        """Where each node stands in the graph."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    @property
    def extents(self) -> list[int]:
        """The lengths of what the model computes, [rows, length, width], the most frequent first."""
        rows = extent(self.example)[0]
        values = (n.meta.get("val") for n in self.graph.nodes if n.op == "call_function")
        shapes = [v.shape for v in values if isinstance(v, Tensor) and v.dim() == 3 and v.shape[0] == rows]
        return [length for length, _ in Counter(int(s[1]) for s in shapes).most_common(3)]

    @property
    def unread(self) -> tuple[str, ...]:
        """The parameters that no call reads: another call may."""
        return tuple(name for name in self.shapes if name not in self.opened)

    @property
    def interface(self) -> tuple[fx.Node, ...]:
        """What the model answers, floating point tensors first: what it returns but for constants and, of a model of
        transformers, stages on the way to the first."""
        (results,) = next(n for n in self.graph.nodes if n.op == "output").args
        assert isinstance(results, tuple)
        return tuple(node for node in results if node not in self.constants)

    @property
    def output(self) -> fx.Node:
        """The tensor that the model is judged by: the first of the interface, but for a loss that stands before it."""
        values = (node for node in self.interface if node.meta["val"].dim())
        return next(values, self.interface[0])

    @cached_property
    def _farther(self) -> dict[fx.Node, Any]:
        return farther(self.graph.nodes, self.constants)

    def values(self, argument: object) -> list[Tensor]:
        """What a constant is in this call, and what it would be in a far longer text if that is something else."""
        here = self.constants.get(argument) if isinstance(argument, fx.Node) else argument
        there = self._farther.get(argument) if isinstance(argument, fx.Node) else None
        both = [torch.as_tensor(value) for value in (here, there) if isinstance(value, (bool, int, float, Tensor))]
        return [value for value in both if value.shape == both[0].shape]

    def varies(self, argument: object, dim: int) -> bool:
        """Whether a constant is not the same all along an axis, here or in a far longer text."""
        return any(bool((value != value.narrow(dim, 0, 1)).any()) for value in self.values(argument))

    def is_always(self, argument: object, number: int) -> bool:
        """Whether an argument is a number everywhere, and computed of that number alone: what is made of others, as a
        mask is of positions, may be so only because the text is short."""
        seen, waiting = {argument}, [argument]
        while waiting:
            value = waiting.pop()
            known = self.constants.get(value) if isinstance(value, fx.Node) else value
            if not all(_is_everywhere(leaf, number) for leaf in leaves(known)):
                return False
            above = value.all_input_nodes if isinstance(value, fx.Node) else ()
            waiting += [a for a in above if a in self.constants and a not in seen]
            seen.update(waiting)
        return True


def _is_everywhere(value: object, number: int) -> bool:
    if isinstance(value, Tensor):
        return bool((value == number).all())
    return isinstance(value, (bool, int, float)) and value == number


def operand(node: fx.Node, position: int) -> fx.Node | None:
    """An argument that is another node's value, else None."""
    argument = node.args[position] if len(node.args) > position else None
    return argument if isinstance(argument, fx.Node) else None


def upstream(nodes: Iterable[fx.Node], program: Program) -> set[fx.Node]:
    """What values are computed from, they included and constants left out."""
    needed, stack = set[fx.Node](), list(nodes)
    while stack:
        last = stack.pop()
        if last not in needed and last not in program.constants:
            needed.add(last)
            stack.extend(last.all_input_nodes)
    return needed


def evidence(node: fx.Node, role: str) -> Evidence:
    """Where a node comes from: its op, module path, and the line of the modelling code."""
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    own = [line for line in files if not any(library in line for library in HELPERS)]
    return Evidence(role, op_name(node), module, _short((own or files)[-1]) if files else "")


def _short(frame: str) -> str:
    """`File "/…/modeling_llama.py", line 70, in forward` -> `modeling_llama.py:70`."""
    path, _, rest = frame.removeprefix('File "').partition('"')
    number = rest.partition("line ")[2].partition(",")[0]
    return f"{Path(path).name}:{number}"
