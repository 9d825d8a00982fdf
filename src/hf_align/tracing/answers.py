"""Which results of a graph are its answers, and which are stages on the way to them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, fx, nn

from hf_align.tracing.modules import ModuleModel
from hf_align.tracing.ops import Trait, does

ANSWER = "answer"
"""Under which the node of a result notes that it is an answer by its name."""
_STAGES = ("hidden_state", "hidden_states", "attentions", "key_values", "router_logits", "loss")
"""What a name ends with under which models return what their layers compute on the way, or what training asks for."""
_SHOW = Trait.SAME | Trait.RESHAPES | Trait.REORDERS_AXES | Trait.ADDS_UNIT_AXES


def answers_by_name(model: nn.Module, results: Any) -> dict[str, Any]:
    """The tensors that a model returns as an answer, though they may be stages on the way to the first: scores, what is
    pooled, what it calls its embeddings, and of code that is not that of transformers what has a name that is none of a
    stage. A stage has a name of the output class of transformers, ends like one of `_STAGES`, or may be given to the
    next call. Without names, tensors are answers, but not what stands in tuples of its own: that is something of each
    layer.

    Args:
        results: with tensors, or their nodes.
    """
    is_own = not _is_of_transformers(type(model))
    if not isinstance(results, Mapping):
        several = results if is_own and isinstance(results, (tuple, list)) else ()
        return {str(i): value for i, value in enumerate(several) if isinstance(value, (Tensor, fx.Node))}
    found, stages = dict[str, Any](), {*inspect.signature(model.forward).parameters, *_declared(type(results))}
    for name, value in results.items():
        if isinstance(value, (Tensor, fx.Node)) and _is_score(name):
            found[name] = value
        elif is_own and not (name in stages or str(name).endswith(_STAGES)):
            parts = answers_by_name(model, value) if isinstance(value, Mapping) else _leaves("", value)
            found |= {f"{name} {path}".rstrip(): leaf for path, leaf in dict(parts).items()}
    return found


def _is_of_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def _declared(kind: type) -> Iterable[str]:
    """The results that an output class of transformers has; nothing for other classes."""
    return (f.name for f in fields(kind)) if is_dataclass(kind) and _is_of_transformers(kind) else ()


def _is_score(name: str) -> bool:
    return "logits" in name or name in ("pooler_output", "embeddings")


def _leaves(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """The tensors in what is returned under a name, with where they stand."""
    if isinstance(value, (Tensor, fx.Node)):
        yield path, value
    for i, part in enumerate(value) if isinstance(value, (tuple, list)) else ():
        yield from _leaves(f"{path} {i}".lstrip(), part)


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
