"""Every rule against the op that it is about: on free operands, what a rule allows must leave the results alone.

The tables are in `op_examples.py`. A rule without an example there fails here, and so does one whose demands could be
forgotten without the check noticing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from op_examples import EXAMPLES
from op_program import OpExample, draw_inputs, draw_weights, trace_op

import hf_align.symmetry.rules  # noqa: F401  (fills the table)
from hf_align.symmetry.certificate.random_copy import random_elements, transform
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.interpreter.call import RULES, Call
from hf_align.symmetry.interpreter.values import Value
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.execute import execute
from hf_align.tracing.ops import op_name
from hf_align.tracing.program import Program

BY_NAME = {example.name: example for example in EXAMPLES}
OPS = sorted({example.op for example in EXAMPLES})
_DRAWS, _LIVE = 24, 4
"""Draws of weights to try, and how many of them must show the op at work."""


@cache
def traced(name: str) -> Program:
    return trace_op(BY_NAME[name])


@cache
def spec_of(name: str) -> SymmetrySpec:
    return derive(traced(name))


def examples_of(op: str) -> list[OpExample]:
    return [e for e in EXAMPLES if e.op == op]


def largest_change(example: OpExample, spec: SymmetrySpec) -> float:
    """What random elements of all groups change about the outputs, relative to them, over some draws of weights.

    Not a number if moving the weights takes an operand out of the domain of the op.
    """
    program, changes = traced(example.name), []
    for seed in range(_DRAWS):
        rng = torch.Generator().manual_seed(seed)
        weights, inputs = draw_weights(example, program, rng), draw_inputs(rng)
        before = execute(program, weights, inputs)
        if not (before.isfinite().all() and before.abs().max() > 1e-9):
            continue
        moved = transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng))
        changes.append(float((execute(program, moved, inputs) - before).abs().max() / before.abs().max()))
        if len(changes) == _LIVE:
            return math.nan if any(map(math.isnan, changes)) else max(changes)
    raise AssertionError(f"{example.name}: the outputs are zero or not finite at almost all weights")


def test_every_rule_has_an_example() -> None:
    assert set(RULES) - set(OPS) == set()
    assert set(OPS) - set(RULES) == set()
    assert len(BY_NAME) == len(EXAMPLES)


@pytest.mark.parametrize("op", OPS)
def test_what_a_rule_allows_changes_nothing(op: str) -> None:
    for example in examples_of(op):
        assert op in {op_name(n) for n in traced(example.name).graph.nodes}, example.name
        spec = spec_of(example.name)
        assert not spec.unknown_ops, example.name
        assert largest_change(example, spec) < 1e-9, example.name


def shape_of(spec: SymmetrySpec) -> object:
    """A spec without the names of its spaces."""

    def group(space: str | None) -> object:
        return None if space is None else (spec.spaces[space].group, len(spec.spaces[space].index))

    return len(spec.spaces), {
        name: [[[(f.size, group(f.space), f.power) for f in segment] for segment in axis] for axis in axes]
        for name, axes in spec.parameters.items()
    }


def forgetful(example: OpExample, demand: str, monkeypatch: pytest.MonkeyPatch) -> SymmetrySpec:
    """The spec if the rule of the op asked nothing of one kind ("lower" or "unify") of what it touches."""
    with monkeypatch.context() as patch:
        for method in (demand, f"{demand}_all"):
            if (asks := getattr(Call, method, None)) is not None:
                patch.setattr(Call, method, _deaf_to(example.op, asks))
        return derive(traced(example.name))


def _deaf_to(op: str, asks: Callable[..., None]) -> Callable[..., None]:
    def ask(call: Call, *arguments: object) -> None:
        if op_name(call.node) != op:
            asks(call, *arguments)

    return ask


NEEDLESS = {
    ("lower", "div a scalar weight"): "one scalar along all axes is a factor, not a sum",
    ("lower", "matmul of a batch with one"): "the batch axis of one operand alone is free",
    ("lower", "any of all"): "zeros and ones: only those that vanish count",
    ("lower", "all of all"): "zeros and ones: only those that vanish count",
}
"""Demands that are not needed for what the check sees: where a rule could allow more."""


@pytest.mark.parametrize("demand", ["lower", "unify"])
@pytest.mark.parametrize("op", OPS)
def test_no_demand_can_be_forgotten(op: str, demand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for example in examples_of(op):
        spec = forgetful(example, demand, monkeypatch)
        if shape_of(spec) != shape_of(spec_of(example.name)):
            needless = largest_change(example, spec) < 1e-9
            assert needless == ((demand, example.name) in NEEDLESS), example.name


def _operand_as_it_is(call: Call) -> Value:
    for name in Arguments(call.node).names:
        call.argument(name)
    return Value(call.value(call.argument(0)).axes)


@pytest.mark.parametrize(
    "name",
    ["silu", "relu", "tanh", "abs", "cumsum", "roll", "tril", "softmax", "layer_norm plain", "rms_norm gain, along",
     "group_norm plain", "batch_norm", "add constants", "mul constants", "to integers"],
)  # fmt: skip
def test_a_rule_that_returns_its_operand_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest_change(BY_NAME[name], spec_of(name)) < 1e-9
    monkeypatch.setitem(RULES, BY_NAME[name].op, _operand_as_it_is)
    assert not largest_change(BY_NAME[name], derive(traced(name))) < 1e-9


GL, O, O1 = "GeneralLinear", "Orthogonal", "OrthogonalFixingOnes"  # noqa: E741
SIGNED_O1 = "OrthogonalFixingOnesUpToSign"
S, SIGNED, POSITIVE, SCALED = "Permutation", "SignedPermutation", "PositiveScaledPermutation", "ScaledPermutation"
TORUS = "TorusPermutation"
ALLOWED = {
    "neg": (GL, GL),
    "view split": (GL, GL, GL),
    "permute": (GL, GL, GL),
    "slice": (GL, GL),
    "cat": (GL, GL, GL),
    "linear without bias": (GL, GL, GL),
    "linear of a weight": (GL, GL, O1),
    "matmul": (GL, GL, GL),
    "matmul with itself": (GL, O),
    "bmm": (GL, GL, GL, S),
    "inner of matrices": (GL, GL, GL),
    "outer": (GL, GL),
    "einsum ij,jk->ik": (GL, GL, GL),
    "einsum bij,bjk->bik": (GL, GL, GL, S),
    "conv2d without bias": (GL, GL, GL),
    "conv2d in groups": (GL, GL, O1, S),
    "conv2d by channel": (O1, TORUS),
    "conv_transpose2d": (GL, GL, O1),
    "avg_pool2d": (GL, GL),
    "max_pool2d": (POSITIVE, POSITIVE),
    "pixel_shuffle": (GL, GL),
    "silu": (S, S),
    "relu": (POSITIVE, POSITIVE),
    "tanh": (SIGNED, SIGNED),
    "add data": (GL, GL),
    "add a row": (GL, O1),
    "sub its mean": (GL, SIGNED_O1),
    "mul data": (TORUS, TORUS),
    "mul a gain, along": (GL,),
    "mul a number": (GL, GL),
    "mul constants": (GL,),
    "mul zeros, added to": (GL, GL, S, S),
    "cat zeros": (GL, GL, GL, GL),
    "mul summed": (GL, S),
    "where zeros": (GL,),
    "glu": (S, SCALED),
    "layer_norm plain": (SIGNED_O1, S),
    "layer_norm with gain and bias, along": (SIGNED_O1,),
    "rms_norm gain, along": (O,),
    "rms_norm plain": (O, S),
    "softmax": (S, S),
    "mean": (GL, O1),
    "sum of a square": (O, S),
    "amax": (S, S),
    "cumsum": (GL,),
    "linalg_vector_norm": (O, S),
    "cdist": (O, S, S),
    "as_strided windows": (GL, GL),
    "as_strided of a transpose": (GL, GL),
    "var": (SIGNED_O1, S),
    "group_norm plain": (SIGNED_O1, S, S),
    "embedding": (GL,),
    "embedding by data": (GL, S, S),
    "topk gathered": (S, S),
    "index by data": (GL, S, S),
    "one_hot": (S, S),
    "index_put": (GL,),
    "index_put matrices": (GL, GL),
    "index_put two numbers": (GL, GL),
    "index_put matrices by a mask": (GL, GL),
    "index_put one number": (O1, O1),
    "index_add matrices": (GL, GL),
    "index_copy places of heads": (GL, GL),
    "slice_scatter": (GL, GL, GL),
    "slice_scatter of zeros, in blocks": (GL, GL),
    "pad": (GL, GL),
    "expand": (GL, O1),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_rule_leaves_free(name: str) -> None:
    spec = spec_of(name)
    assert sorted(s.group.name for s in spec.spaces.values() if s.group) == sorted(ALLOWED[name])
