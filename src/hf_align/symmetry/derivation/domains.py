"""Which parameters must be positive, because the model takes their root or their logarithm as it is."""

from __future__ import annotations

from torch import Tensor, fx

from hf_align.tracing.arguments import Arguments
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program


def positive_parameters(program: Program) -> frozenset[str]:
    """v of √(v + ε), 1/√(v + ε) and log v, however v is laid out: variances that frozen norms keep as buffers."""
    found = set()
    for node in program.graph.nodes:
        if does(node, Trait.OF_POSITIVES):
            found.add(_parameter(node.all_input_nodes[0], program))
        elif does(node, Trait.STORED_STATISTICS):
            found.add(_parameter(Arguments(node).ask("running_var", None), program))
    return frozenset(name for name in found if name is not None)


def _parameter(node: object, program: Program) -> str | None:
    """The parameter that a value shows, but for a constant of no negative entry that is added."""
    while isinstance(node, fx.Node) and node not in program.parameters:
        sources = [a for a in node.all_input_nodes if a not in program.constants]
        if len(sources) != 1 or not (does(node, Trait.MOVES) or _adds_positive(node, program)):
            return None
        node = sources[0]
    return program.parameters[node] if isinstance(node, fx.Node) else None


def _adds_positive(node: fx.Node, program: Program) -> bool:
    if not does(node, Trait.ADDS) or node.kwargs or len(node.args) > 2:
        return False
    values = [program.constants.get(a) if isinstance(a, fx.Node) else a for a in node.args[:2]]
    known = [v for v in values if isinstance(v, (int, float, Tensor))]
    return len(known) == 1 and bool((known[0] >= 0) if not isinstance(known[0], Tensor) else (known[0] >= 0).all())
