"""What a random copy must respect: parameters that have a root, and values without entries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_program import Data, OpExample, Statistic, Weight, draw_inputs, trace_op
from torch import Tensor

from hf_align.symmetry.certificate.random_copy import random_weights
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing.execute import execute

WITH_A_ROOT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "frozen norm": lambda x, v: x * (v.reshape(1, -1) + 1e-5).rsqrt(),
    "batch norm": lambda x, v: torch.nn.functional.batch_norm(x, torch.zeros(4, dtype=torch.float64), v),
    "logarithm": lambda x, v: x * v.log(),
}
WITHOUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "root of a square": lambda x, v: x * (v * v).sqrt(),
    "root of a difference": lambda x, v: x * (v.sigmoid() - 1e-5).abs().sqrt(),
    "one of less": lambda x, v: x * (v + torch.full((), -3.0)).abs().sqrt(),
}


@pytest.mark.parametrize("case", WITH_A_ROOT)
def test_what_has_a_root_is_positive(case: str) -> None:
    program = trace_op(OpExample("", WITH_A_ROOT[case], (Data((3, 4)), Statistic((4,))), case))
    spec, rng = derive(program), torch.Generator().manual_seed(0)
    assert spec.positive == {"statistics.of1"}
    weights = random_weights(spec, rng)
    assert weights["statistics.of1"].min() > 0 > weights["written.0"].min()
    assert execute(program, weights, draw_inputs(rng)).isfinite().all()


@pytest.mark.parametrize("case", WITHOUT)
def test_what_has_no_root_of_its_own_has_any_sign(case: str) -> None:
    program = trace_op(OpExample("", WITHOUT[case], (Data((3, 4)), Statistic((4,))), case))
    assert derive(program).positive == frozenset()


def test_a_rotary_part_of_no_coordinates_turns_nothing() -> None:
    """Heads of four have no pair left for each of three axes of places."""

    def turned(x: Tensor, w: Tensor) -> Tensor:
        part, rest = x[..., :0], x[..., 0:]
        pairs = part.unflatten(-1, (0, 2))
        halves = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
        angles = torch.ones(3, 0, dtype=torch.float64)
        return torch.cat([part * angles.cos() + halves * angles.sin(), rest], -1) @ w

    program = trace_op(OpExample("", turned, (Data((2, 3, 4)), Weight((4, 5))), ""))
    spec, rng = derive(program), torch.Generator().manual_seed(0)
    assert not spec.unknown_ops
    assert any(s.group is not None and s.group.dimension == 16 for s in spec.spaces.values())
    assert soundness(program, spec, random_weights(spec, rng), draw_inputs(rng), rng) < 1e-9


def test_noise_is_drawn_once() -> None:
    """So that a model which adds some is a function, of which noise is a part."""
    example = OpExample("", lambda x, w: (x + torch.randn_like(x)) @ w, (Data((3, 4)), Weight((4, 5))), "")
    program = trace_op(example)
    spec, rng = derive(program), torch.Generator().manual_seed(0)
    assert not spec.unknown_ops
    assert soundness(program, spec, random_weights(spec, rng), draw_inputs(rng), rng) < 1e-9


def test_windows_in_memory_are_the_same_of_what_is_laid_out_otherwise() -> None:
    """A copy to a narrower float is none where all is run in wide ones."""

    def windows(x: Tensor) -> Tensor:
        return torch.ops.aten.as_strided(x.expand(4, 4).to(torch.float32), [3, 2, 4], [4, 4, 1])

    program = trace_op(OpExample("", windows, (Data((1, 4)),), ""))
    weights, u = random_weights(derive(program), torch.Generator().manual_seed(0)), torch.ones(3, dtype=torch.float64)
    expected = weights["readers.0"] @ (weights["written.0"] @ u).repeat(6)
    torch.testing.assert_close(execute(program, weights, {"u": u}), expected)


@pytest.mark.parametrize("run", [(-2, None), (-3, -1), (1, 2**63 - 1), (1, None)])
def test_runs_that_are_counted_from_behind_are_replaced_in_many_copies_at_once(run: tuple[int, int | None]) -> None:
    def replaced(x: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.slice_scatter(x, y[:, : len(range(4)[slice(*run)])], 1, *run)

    program = trace_op(OpExample("", replaced, (Data((3, 4)), Data((3, 4))), ""))
    weights, u = random_weights(derive(program), torch.Generator().manual_seed(0)), torch.ones(3, dtype=torch.float64)
    both = torch.stack([weights["written.1"], -weights["written.1"]])
    found = torch.func.vmap(lambda w: execute(program, {**weights, "written.1": w}, {"u": u}))(both)
    x, y = ((weights[f"written.{i}"] @ u).view(3, 4) for i in (0, 1))
    for sign, result in zip((1, -1), found, strict=True):
        expected = x.clone()
        expected[:, slice(*run)] = sign * y[:, : expected[:, slice(*run)].shape[1]]
        torch.testing.assert_close(result, weights["readers.0"] @ expected.flatten())


def test_numbers_are_told_apart_in_many_copies_at_once() -> None:
    def told(x: Tensor) -> Tensor:
        return torch.ops.aten.one_hot(x.argmax(1), 4) * x

    program = trace_op(OpExample("", told, (Data((3, 4)),), ""))
    weights, u = random_weights(derive(program), torch.Generator().manual_seed(0)), torch.ones(3, dtype=torch.float64)
    both = torch.stack([weights["written.0"], -weights["written.0"]])

    def run(w: Tensor) -> Tensor:
        return execute(program, {**weights, "written.0": w}, {"u": u})

    found = torch.func.vmap(lambda w: torch.func.vjp(run, w)[0])(both)
    for sign, result in zip((1, -1), found, strict=True):
        x = sign * (weights["written.0"] @ u).view(3, 4)
        torch.testing.assert_close(result, weights["readers.0"] @ (torch.eye(4).double()[x.argmax(1)] * x).flatten())


@pytest.mark.parametrize("side", ["left", "right"])
def test_parts_of_several_lengths_are_filled_up_in_many_copies_at_once(side: str) -> None:
    def filled(x: Tensor) -> Tensor:
        return torch.ops.aten.pad_sequence([x[:1], x], True, 0.5, side)

    program = trace_op(OpExample("", filled, (Data((3, 4)),), ""))
    weights, u = random_weights(derive(program), torch.Generator().manual_seed(0)), torch.ones(3, dtype=torch.float64)
    both = torch.stack([weights["written.0"], -weights["written.0"]])
    found = torch.func.vmap(lambda w: execute(program, {**weights, "written.0": w}, {"u": u}))(both)
    for sign, result in zip((1, -1), found, strict=True):
        x = sign * (weights["written.0"] @ u).view(3, 4)
        torch.testing.assert_close(result, weights["readers.0"] @ filled(x).flatten())


def test_the_gain_of_a_norm_of_single_numbers_stays() -> None:
    """Views drop an axis of one entry, and who reads it behind them is not known."""

    def normed(x: Tensor, gain: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, [1], gain, 1e-2).squeeze(-1).tanh()

    program = trace_op(OpExample("", normed, (Data((3, 1)), Weight((1,))), ""))
    spec, rng = derive(program), torch.Generator().manual_seed(0)
    assert soundness(program, spec, random_weights(spec, rng), draw_inputs(rng), rng) < 1e-9
