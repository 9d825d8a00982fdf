"""Lookups of what is not there: recorded without values, a table seems to have any row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor, fx

from hf_align.tracing.answers import value_shown
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.example import Example
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program


def looks_outside(program: Program) -> bool:
    """Whether a run would fail, since an index that no input changes lies beyond the end of what it is used on."""
    for node in program.graph.nodes:
        if does(node, Trait.LOOKS_UP):
            for size, index in _lookups(node):
                known = program.constants.get(index) if isinstance(index, fx.Node) else None
                if isinstance(known, Tensor) and known.numel() and not -size <= known.min() <= known.max() < size:
                    return True
    return False


def within_tables(example: Example, graph: fx.Graph, arguments: Mapping[fx.Node, str]) -> Example:
    """The same call in tokens that are in every table in which they are looked up.

    Args:
        arguments: placeholders of the graph -> the names of free arguments.
    """
    tokens = dict(example.tokens)
    for node in graph.nodes:
        if does(node, Trait.LOOKS_UP_ROWS):
            table, index = node.args[:2]
            name = arguments.get(value_shown(index)) if isinstance(index, fx.Node) else None
            if name in tokens:
                tokens[name] = tokens[name][tokens[name] < table.meta["val"].shape[0]]
    fewer = {name: allowed for name, allowed in tokens.items() if len(allowed) < len(example.tokens[name])}
    given = {n: fewer[n][t % len(fewer[n])] if n in fewer else t for n, t in example.arguments.items()}
    return replace(example, arguments=given, tokens=tokens).ended() if fewer else example


def _lookups(node: fx.Node) -> Iterator[tuple[int, object]]:
    """What an op looks up, as the extent of the axis and the index."""
    sizes: tuple[int, ...] = tuple(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    if does(node, Trait.TAKES_ENTRIES):
        yield from zip(sizes, node.args[1], strict=False)  # type: ignore[arg-type]
    else:
        arguments = Arguments(node)
        yield sizes[arguments.ask("dim", 0)], arguments.ask("index", arguments.ask("indices", None))
