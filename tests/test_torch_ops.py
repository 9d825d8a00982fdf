"""Every op in torch's own list of examples: it is written down as it runs, and what a spec allows changes nothing.

Nobody has chosen these calls with this package in mind; most of the ops have no rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from op_program import Data, OpExample, Weight, draw_inputs, draw_weights, positive, trace_op
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hf_align.symmetry.certificate.soundness import decided_soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing.record import record

pytestmark = pytest.mark.slow

_SHARES = 16
_SAMPLES = 5
"""Of each op: the first that differ in their shapes or numbers."""
_LARGEST = 600
"""Numbers in the operands of a sample."""
Op = Callable[..., list[Tensor]]


def samples(share: int) -> Iterator[tuple[str, Op, list[Tensor]]]:
    """A part of all calls: the op, what it gives for its operands, and these; none whose result is drawn at random."""
    listed = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    for op in listed.op_db[share::_SHARES]:
        if not op.supports_dtype(torch.float64, "cpu") or op.name.startswith(("jiterator", "empty", "new_empty")):
            continue
        known = set[str]()
        for sample in op.sample_inputs("cpu", torch.float64, requires_grad=False):
            whole, form = tree_flatten(((sample.input, *sample.args), sample.kwargs))
            at = [i for i, leaf in enumerate(whole) if _is_operand(leaf)]
            seen = repr([leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in whole])
            is_sparse = any(isinstance(leaf, Tensor) and leaf.layout != torch.strided for leaf in whole)
            if (
                is_sparse
                or not at
                or seen in known
                or sum(whole[i].numel() for i in at) > _LARGEST
                or len(known) == _SAMPLES
            ):
                continue
            known.add(seen)
            call = _called(op.op, whole, form, at)
            if _is_determined(call, operands := [whole[i] for i in at]):
                yield op.formatted_name, call, operands


def _is_operand(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float64 and leaf.numel() > 0


def _called(op: Callable[..., Any], whole: list[Any], form: Any, at: list[int]) -> Op:
    """The op as a function of its operands alone, which gives all tensors that it makes of them."""

    def call(*operands: Tensor) -> list[Tensor]:
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in whole]
        for i, operand in zip(at, operands, strict=True):
            leaves[i] = operand
        args, kwargs = tree_unflatten(leaves, form)
        results = [t for t in tree_leaves(op(*args, **kwargs)) if isinstance(t, Tensor) and t.layout == torch.strided]
        found = [t.resolve_conj() if t.is_complex() else t for t in results if t.numel()]
        return [torch.view_as_real(t) if t.is_complex() else t for t in found]

    return call


def _is_determined(call: Op, operands: list[Tensor]) -> bool:
    """Whether it runs, and gives the same twice, whatever seed the example asks for."""
    results = list[list[Tensor]]()
    with patch("torch.manual_seed"):
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            try:
                results.append(call(*(t.clone() for t in operands)))
            except Exception:  # some ask for another device, or another build
                return False
    return bool(results[0]) and all(map(_is_close, *results))


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-6, equal_nan=True)


class Called(nn.Module):
    """An op of weights that are multiplied by what the model is given."""

    def __init__(self, call: Op, operands: list[Tensor]) -> None:
        super().__init__()
        self.operands = nn.ParameterList(nn.Parameter(t.clone(), requires_grad=False) for t in operands)
        self.call = call

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for t in self.call(*(weight * x for weight in self.operands)) if t.is_floating_point())


@pytest.mark.parametrize("share", range(_SHARES))
def test_every_op_is_written_down_as_it_runs(share: int) -> None:
    """At other weights and another input than those it was written down with."""
    for name, call, operands in samples(share):
        model, one = Called(call, operands), torch.tensor(1.0, dtype=torch.float64)
        try:
            graph = record(model, {"x": one}, [n for n, _ in model.named_parameters()], ["x"])
        except Exception:  # what cannot be written down is refused
            continue
        rng = Generator().manual_seed(0)
        for weight in model.operands:
            weight.mul_(0.95 + 0.1 * torch.rand(weight.shape, generator=rng, dtype=weight.dtype))
        with torch.no_grad():
            try:
                expected = model(1.03 * one)
            except RuntimeError:  # of numbers that must lie between others
                continue
            found = graph(1.03 * one)
        for value in expected:
            assert any(_is_close(value, other) for other in found), name


@pytest.mark.parametrize("kind", ["computed", "stored", "read along"])
@pytest.mark.parametrize("share", range(_SHARES))
def test_what_a_spec_of_an_op_allows_changes_nothing(share: int, kind: str) -> None:
    """Of operands that the model computes, of which all but the first are stored, and with results that are read along
    their last axis alone."""
    for name, call, operands in samples(share):
        shapes = [tuple(t.shape) for t in operands]
        others = Weight if kind == "stored" else Data
        given = (Data(shapes[0], positive), *(others(shape, positive) for shape in shapes[1:]))
        example = OpExample(name, call, given, "", along=kind == "read along")
        try:
            program = trace_op(example)
        except Exception:  # what cannot be traced is refused
            continue
        spec, rng = derive(program), Generator().manual_seed(0)
        error, undecided = decided_soundness(program, spec, draw_weights(example, program, rng), draw_inputs(rng), rng)
        assert error < 1e-6 or undecided is not None or error != error, (name, shapes, error)
