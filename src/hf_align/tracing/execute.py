"""Run a Program on weights: the function that all symmetries must leave alone, in float64 from end to end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.tracing.program import Program, op_name

_CASTS = ("to", "_to_copy", "type_as", "float")
BATCH_NORMS = {"batch_norm": 7, "_native_batch_norm_legit_no_training": 6}
"""Where ε stands among the operands."""


def execute(program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    """The output of the model.

    Casts to float32 inside the modelling code keep the dtype of the weights, so that float64 weights give float64
    accuracy. Differentiable, and usable under torch.func transforms.
    """
    result = run(program, weights, inputs)[program.output]
    assert isinstance(result, Tensor)
    return result


def run(program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[fx.Node, Any]:
    """The values of all nodes up to the last that the model returns, but for constants."""
    values: dict[fx.Node, Any] = {n: weights[name] for n, name in program.parameters.items()}
    values.update({n: inputs[name] for n, name in program.inputs.items()})
    wide = next(iter(weights.values())).dtype
    returned = set(program.interface)

    def lookup(node: fx.Node) -> Any:
        value = values[node] if node in values else program.constants[node]
        return value.to(wide) if isinstance(value, Tensor) and value.is_floating_point() else value

    for node in program.graph.nodes:
        if node.op == "call_function" and node not in program.constants:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lookup)
            values[node] = call_wide(node, args, kwargs)
            returned.discard(node)
            if not returned:
                break
    return values


def call_wide(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run one node without casts to a narrower float: rounding is no part of the function."""
    name = op_name(node)
    if name in _CASTS and isinstance(args[0], Tensor) and args[0].is_floating_point():
        return args[0] if node.meta["val"].is_floating_point() else node.target(*args, **kwargs)  # type: ignore[operator]
    if name == "view" and isinstance(args[1], (list, tuple)):  # strides may differ from those that were traced
        return args[0].reshape(args[1])
    if name == "as_strided" and not bool(((places := places_shown(node)) < 0).any()):
        return args[0].reshape(-1)[places]
    if name in ("detach", "detach_"):  # stops gradients, not values: a weight behind it moves the outputs all the same
        return args[0]
    if name == "embedding":  # as padding does
        return args[0][args[1]]
    if name == "copy":  # torch has no forward derivative of it
        return args[1].to(args[0].dtype).expand(args[0].shape).clone()
    if name == "slice_scatter" and len(args) > 3:  # open ends do not survive vmap, nor such counted from behind
        start, stop, _ = slice(args[3], args[4] if len(args) > 4 else None).indices(args[0].shape[args[2]])
        args = (*args[:3], start, stop, *args[5:])
    if name in BATCH_NORMS:  # nor one by the statistics, which are weights here
        if args[3] is None or (name == "batch_norm" and args[5]):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        normed = _batch_norm(args[0], args[1], args[2], args[3], args[4], args[BATCH_NORMS[name]])
        return normed if name == "batch_norm" else (normed, args[3], args[4])
    if name in ("softmax", "log_softmax", "mean", "sum", "cumsum"):
        args = tuple(a for a in args if not isinstance(a, torch.dtype))
        kwargs = {k: v for k, v in kwargs.items() if k != "dtype"}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def places_shown(node: fx.Node) -> Tensor:
    """Of `as_strided`, where in the operand each entry of the result stands, counted in row-major order; -1 if
    nowhere."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    laid_out: Tensor = operand.meta["val"]
    size, stride, *start = node.args[1:]
    behind = sum((n - 1) * s for n, s in zip(laid_out.shape, laid_out.stride(), strict=True)) + 1
    memory = torch.full((behind,), -1)
    memory.as_strided(laid_out.shape, laid_out.stride()).copy_(torch.arange(laid_out.numel()).reshape(laid_out.shape))
    first = start[0] - int(laid_out.storage_offset()) if start and isinstance(start[0], int) else 0
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))  # type: ignore[arg-type]
    if first < 0 or last >= behind:
        return torch.full(size, -1)  # type: ignore[arg-type]
    return memory.as_strided(size, stride, first)  # type: ignore[arg-type]


def _batch_norm(
    value: Tensor, gain: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """y_nc… = γ_c (x_nc… - μ_c) / √(σ²_c + ε) + β_c."""
    shape = (-1, *[1] * (value.dim() - 2))
    scale = (variance + eps).rsqrt() * (1.0 if gain is None else gain)
    shift = (0.0 if bias is None else bias) - mean * scale
    return value * scale.reshape(shape) + shift.reshape(shape)
