"""Whether a call looks up what is not there: recorded without values, a table seems to have any row."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from hf_align.tracing.arguments import Arguments
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


def _lookups(node: fx.Node) -> Iterator[tuple[int, object]]:
    """What an op looks up, as the extent of the axis and the index."""
    sizes: tuple[int, ...] = tuple(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    if does(node, Trait.TAKES_ENTRIES):
        yield from zip(sizes, node.args[1], strict=False)  # type: ignore[arg-type]
    else:
        arguments = Arguments(node)
        yield sizes[arguments.ask("dim", 0)], arguments.ask("index", arguments.ask("indices", None))
