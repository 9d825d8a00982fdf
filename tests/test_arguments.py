"""No argument unseen: an op called in another way than its rule knows is either read rightly or named as unknown.

Every example of `op_examples.py` is changed in one argument of its op's schema at a time, one value after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_examples import EXAMPLES
from op_program import Data, OpExample, Statistic, draw_inputs, draw_weights, trace_op
from torch import Tensor, fx

from hf_align.symmetry.certificate.random_copy import random_elements, transform
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.interpreter.call import Call
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.execute import call_wide, execute
from hf_align.tracing.ops import op_name
from hf_align.tracing.program import Program

aten = torch.ops.aten
OPS = sorted({example.op for example in EXAMPLES})
_WORDS = ("floor", "trunc", "tanh", "none", "reflect", "replicate", "constant", "circular", "same", "valid", "add",
          "multiply", "sum", "prod", "mean", "amax", "amin", "ortho", "forward")  # fmt: skip
_DRAWS, _LIVE = 12, 3
NO_FUNCTION = {
    ("topk", "sorted"): "in which order the largest entries then come is not said",
    ("_reshape_alias", "size"): "it reads memory that is not the operand's",
    **{
        (f"_upsample_{kind}2d_aa", scale): "beside a size that contradicts it, it reads memory that is nobody's"
        for kind in ("bilinear", "bicubic")
        for scale in ("scales_h", "scales_w")
    },
    ("_weight_norm of all", "dim"): "along an axis, it reads memory behind the one number that its gain has",
}
"""Arguments with which an op's result is not defined, by the op or an example of it."""


def other_values(argument: Any, now: Any, program: Program, node: fx.Node) -> Iterator[Any]:
    """Values of the same type as the one that a node is given."""
    kind = str(argument.type)
    if "Tensor" in kind and now is None:
        before = list(program.graph.nodes)[: list(program.graph.nodes).index(node)]
        yield from (n for n in before if n in program.parameters or op_name(n) in ("view", "linear"))
    elif argument.name in ("interpolation_mode", "padding_mode"):
        yield from (0, 1, 2)
    elif argument.name.endswith("dtype"):
        yield from (torch.float64, torch.int64)
    elif "List" in kind and "int" in kind:
        if isinstance(now, (list, tuple)):
            yield from ([*now[:i], n + d, *now[i + 1 :]] for i, n in enumerate(now) for d in (1, -1))
        yield from ([], [0], [-1], [1], [0, 1])
    elif "bool" in kind:
        yield from (True, False)
    elif "str" in kind:
        yield from _WORDS
    elif "int" in kind:
        yield from (0, 1, 2, 3, -1, -2)
    elif "number" in kind or "float" in kind:
        yield from (2.5, 0.3, -1.5, 0.0, 1, 3)


def mutants(example: OpExample) -> Iterator[tuple[str, Any, Program]]:
    """The example with one argument of its op changed, wherever that still runs."""
    traced = trace_op(example)
    schema = next(n.target._schema for n in traced.graph.nodes if op_name(n) == example.op and n not in traced.constants
                  and hasattr(n.target, "_schema"))  # fmt: skip
    for argument in schema.arguments:
        if "Tensor" in str(argument.type) and "Optional" not in str(argument.type):
            continue
        for number in range(16):
            program = deepcopied(traced)
            node = next(n for n in program.graph.nodes if op_name(n) == example.op and n not in program.constants)
            now = Arguments(node).ask(argument.name, None)
            values = [v for v in other_values(argument, now, program, node) if v != now]
            if number >= len(values):
                break
            set_argument(node, argument, values[number])
            if (refreshed := with_new_shapes(program)) is not None:
                yield argument.name, values[number], refreshed


def deepcopied(program: Program) -> Program:
    """The same program with a graph of its own."""
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in program.graph.nodes:
        copied[node] = graph.node_copy(node, lambda n: copied[n])
        copied[node].meta = dict(node.meta)
    return replace(
        program,
        graph=graph,
        parameters={copied[n]: name for n, name in program.parameters.items()},
        inputs={copied[n]: name for n, name in program.inputs.items()},
        constants={copied[n]: deepcopy(value) for n, value in program.constants.items()},
        shapes=dict(program.shapes),
    )


def set_argument(node: fx.Node, argument: Any, value: Any) -> None:
    """Give a call another value; what stands before it is given, too."""
    if argument.kwarg_only:
        node.kwargs = {**node.kwargs, argument.name: value}
        return
    known = Arguments(node)
    at = known.names.index(argument.name)
    given = [known.ask(name, None) for name in known.names[: max(at + 1, len(node.args))]]
    given[at] = value
    node.args = tuple(given)


def with_new_shapes(program: Program) -> Program | None:
    """The program with the shapes that now come out, and a reader that fits them; None if it does not run."""
    rng = torch.Generator().manual_seed(0)
    values: dict[fx.Node, Any] = {n: torch.rand(program.shapes[name], generator=rng, dtype=torch.float64)
                                  for n, name in program.parameters.items()}  # fmt: skip
    values.update({n: draw_inputs(rng)[name] for n, name in program.inputs.items()})
    values.update(program.constants)
    for node in program.graph.nodes:
        if node.op != "call_function" or node in values:
            continue
        try:
            if op_name(node) in ("view", "reshape") and len(node.args[1]) == 1:
                node.args = (node.args[0], [values[node.args[0]].numel()])
            if op_name(node) == "linear" and "readers" in program.parameters.get(node.args[1], ""):
                width = values[node.args[0]].shape[-1]
                program.shapes[program.parameters[node.args[1]]] = (2, width)
                values[node.args[1]] = torch.randn(2, width, generator=rng, dtype=torch.float64)
                node.args[1].meta["val"] = values[node.args[1]]
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = call_wide(node, args, kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):
            return None
        node.meta["val"] = values[node]
    return program if program.output.meta["val"].numel() else None


def largest_change(example: OpExample, program: Program, spec: SymmetrySpec) -> float:
    """As in `test_rules.py`; none where the outputs are zero or no numbers."""
    changes = [0.0]
    for seed in range(_DRAWS):
        rng = torch.Generator().manual_seed(seed)
        weights, inputs = draw_weights(example, program, rng), draw_inputs(rng)
        try:
            before = execute(program, weights, inputs)
        except RuntimeError:  # numbers beyond the end
            continue
        if not (before.isfinite().all() and before.abs().max() > 1e-9):
            continue
        moved = transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng))
        changes.append(float((execute(program, moved, inputs) - before).abs().max() / before.abs().max()))
        if len(changes) > _LIVE:
            break
    return math.nan if any(map(math.isnan, changes)) else max(changes)


@pytest.mark.parametrize("op", OPS)
def test_an_argument_is_read_or_the_op_is_unknown(op: str) -> None:
    for example in [e for e in EXAMPLES if e.op == op and op != "getitem"]:
        for name, value, program in mutants(example):
            if {(op, name), (example.name, name)} & NO_FUNCTION.keys():
                continue
            spec = derive(program)
            if not any(unknown.split(" with ")[0] == op for unknown in spec.unknown_ops):
                assert largest_change(example, program, spec) < 1e-9, f"{example.name} with {name}={value}"


@pytest.mark.parametrize("op", ["dropout", "alpha_dropout", "batch_norm", "_reshape_alias"])
def test_without_the_check_it_would_be_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "unseen", lambda call: [])
    with pytest.raises(AssertionError, match=f"{op}.* with"):
        test_an_argument_is_read_or_the_op_is_unknown(op)


def test_an_unseen_argument_is_named() -> None:
    example = next(e for e in EXAMPLES if e.name == "batch_norm")
    program = next(p for name, value, p in mutants(example) if name == "training" and value is True)
    assert list(derive(program).unknown_ops) == ["batch_norm with training"]


OVERLOADS = {
    "view with dtype": OpExample("view", lambda x: aten.view(x, torch.int64).to(torch.float64), (Data((3, 4)),), ""),
    "instance_norm with running_mean and running_var": OpExample(
        "instance_norm", lambda x, m, v: aten.instance_norm(x, None, None, m, v, False, 0.1, 1e-2, False),
        (Data((2, 3, 4)), Statistic((3,)), Statistic((3,))), ""),
}  # fmt: skip


@pytest.mark.parametrize("unknown", OVERLOADS)
def test_another_overload_is_not_taken_for_the_one_that_is_known(unknown: str) -> None:
    assert unknown in derive(trace_op(OVERLOADS[unknown])).unknown_ops


@pytest.mark.parametrize("call", [lambda x: aten.sum(x, []), lambda x: aten.sum(x, None), lambda x: aten.mean(x, [])])
def test_no_axis_is_all_axes(call: Callable[[Tensor], Tensor]) -> None:
    example = OpExample("sum", call, (Data((3, 4)),), "")
    program = trace_op(example)
    assert largest_change(example, program, derive(program)) < 1e-9
