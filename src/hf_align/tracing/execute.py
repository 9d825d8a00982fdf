"""Run a Program on weights: the function that all symmetries must leave alone, in float64 from end to end."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import Tensor, fx

from hf_align.tracing.ops import run_of
from hf_align.tracing.program import Program


def execute(program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    """The output of the model.

    Casts to float32 inside the modelling code keep the dtype of the weights, so that float64 weights give float64
    accuracy. Differentiable, and usable under torch.func transforms.
    """
    result = run(program, weights, inputs)[program.output]
    assert isinstance(result, Tensor)
    return result


def run(
    program: Program,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    only: Container[fx.Node] | None = None,
) -> dict[fx.Node, Any]:
    """The values of all nodes up to the last that the model returns, but for constants.

    Args:
        only: nodes that are run, with all that they are computed from; all by default.
    """
    values: dict[fx.Node, Any] = {n: weights[name] for n, name in program.parameters.items()}
    values.update({n: inputs[name] for n, name in program.inputs.items()})
    wide = next(iter(weights.values())).dtype
    returned = set(program.interface)

    def lookup(node: fx.Node) -> Any:
        value = values[node] if node in values else program.constants[node]
        return value.to(wide) if isinstance(value, Tensor) and value.is_floating_point() else value

    for node in program.graph.nodes:
        if node.op == "call_function" and node not in program.constants and (only is None or node in only):
            values[node] = run_node(node, lookup)
            returned.discard(node)
            if not returned:
                break
    return values


def run_node(node: fx.Node, lookup: Callable[[fx.Node], Any]) -> Any:
    """As `call_wide`, with operands that are looked up."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lookup)
    return call_wide(node, args, kwargs)


def call_wide(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run one node without casts to a narrower float: rounding is no part of the function."""
    run_it = run_of(node)
    return run_it(node, args, kwargs) if run_it is not None else node.target(*args, **kwargs)  # type: ignore[operator]
