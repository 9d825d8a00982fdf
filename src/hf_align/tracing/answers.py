"""Which results of a graph are its answers, and which are stages on the way to them."""

from __future__ import annotations

from torch import Tensor, fx, nn

from hf_align.tracing.modules import ModuleModel
from hf_align.tracing.ops import Trait, does

ANSWER = "answer"
"""Under which the node of a result notes that it is an answer by its name."""
_SHOW = Trait.SAME | Trait.RESHAPES | Trait.REORDERS_AXES | Trait.ADDS_UNIT_AXES


def return_answers(model: nn.Module, graph: fx.Graph) -> None:
    """Return the floating point results that are answers, and all whole numbers, which are in no basis."""
    end = next(n for n in graph.nodes if n.op == "output")
    returned = [n for n in end.all_input_nodes if isinstance(n.meta["val"], Tensor)]
    floating = [n for n in returned if n.meta["val"].is_floating_point()]
    answers = floating if isinstance(model, ModuleModel) else _without_stages(floating)
    end.args = ((*answers, *(n for n in returned if n not in floating and answers)),)


def _without_stages(results: list[fx.Node]) -> list[fx.Node]:
    """The first result, by which a model of transformers is judged, those that are no stage on the way to it, nor show
    one in another shape, and those that are asked for by name: any other stage that is returned is free to change."""
    stages, stack = set[fx.Node](), results[:1]
    while stack:
        before = [n for n in stack.pop().all_input_nodes if n not in stages]
        stages.update(before)
        stack.extend(before)
    return [n for n in results if n is results[0] or value_shown(n) not in stages
            or (ANSWER in n.meta and value_shown(n) is not value_shown(results[0]))]  # fmt: skip


def value_shown(node: fx.Node) -> fx.Node:
    """The value that a result shows in another shape."""
    while does(node, _SHOW):
        node = node.all_input_nodes[0]
    return node
