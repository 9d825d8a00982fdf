"""Whether two plain modules compute the same with the same weights: their programs are compared, op by op."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from transformers import PretrainedConfig

from hf_align.errors import IncompatibleModels
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.modules import ModuleConfig, ModuleModel
from hf_align.tracing.program import Program, evidence
from hf_align.tracing.trace import trace_module


def require_same_program(refs: tuple[str, str], a: PretrainedConfig, b: PretrainedConfig) -> None:
    """Refuse two modules, at least one of them plain, whose calls run other programs, or that hold other weights.

    Args:
        refs: what the user calls them.

    Raises:
        IncompatibleModels: the message says where they differ first.
    """
    if not (isinstance(a, ModuleConfig) and isinstance(b, ModuleConfig)):
        plain, other = refs if isinstance(a, ModuleConfig) else refs[::-1]
        raise IncompatibleModels(f"{plain} is a plain module, but {other} is none: give inputs= for both of them")
    if a.program == b.program:
        return
    models = build_without_weights(a), build_without_weights(b)
    shapes = [inventory(model).shapes for model in models]
    for name in {**shapes[0], **shapes[1]}:
        sizes = [list(s[name]) if name in s else None for s in shapes]
        if None in sizes:
            has, lacks = refs if sizes[1] is None else refs[::-1]
            raise IncompatibleModels(f"{lacks} has no parameter {name}, which {has} has; they do not align")
        if sizes[0] != sizes[1]:
            raise IncompatibleModels(
                f"{name} is {sizes[0]} in {refs[0]}, but {sizes[1]} in {refs[1]}; they do not align"
            )
    raise IncompatibleModels(f"{refs[0]} and {refs[1]} compute differently: {_difference(*models)}")


def _difference(*models: Any) -> str:
    """Where the first call of one departs from that of the other."""
    one, other = models
    assert isinstance(one, ModuleModel) and isinstance(other, ModuleModel)
    for name, example in one.calls.items():
        if name not in other.calls:
            return f"only one of them takes {name} as a call of its own"
        programs = trace_module(one, example), trace_module(other, example)
        steps = [[n for n in p.graph.nodes if n.op == "call_function"] for p in programs]
        for x, y in zip(*steps, strict=False):
            if x.target != y.target or _said(programs[0], x) != _said(programs[1], y):
                lines = " and ".join(dict.fromkeys(evidence(n, "").line or str(n.target) for n in (x, y)))
                return f"they run other ops, or the same on other numbers, at {lines}"
        if len(steps[0]) != len(steps[1]):
            return "one of them goes on where the other ends"
    return "they differ in what is shared or saved"


def _said(program: Program, node: fx.Node) -> str:
    """The arguments of an op, constants by their values."""
    known = {n: v.tolist() if isinstance(v, Tensor) else v for n, v in program.constants.items()}
    return str(fx.node.map_arg((node.args, node.kwargs), lambda n: known.get(n, program.parameters.get(n, n.name))))
