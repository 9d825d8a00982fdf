"""Whether a call looks up what is not there: recorded without values, a table seems to have any row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from hf_align.tracing.program import Program, op_name


def looks_outside(program: Program) -> bool:
    """Whether a run would fail, since an index that no input changes lies beyond the end of what it is used on."""
    for node in program.graph.nodes:
        if node.op == "call_function":
            for size, index in _lookups(node):
                known = program.constants.get(index) if isinstance(index, fx.Node) else None
                if isinstance(known, Tensor) and known.numel() and not -size <= known.min() <= known.max() < size:
                    return True
    return False


def _lookups(node: fx.Node) -> Iterator[tuple[int, object]]:
    """What an op looks up, as the extent of the axis and the index."""
    name = op_name(node)
    args: tuple[Any, ...] = node.args
    if name == "embedding":
        yield _extents(args[0])[0], args[1]
    elif name in ("index_select", "gather"):
        yield _extents(args[0])[args[1]], args[2]
    elif name == "index":
        yield from zip(_extents(args[0]), args[1], strict=False)


def _extents(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
