"""Rotary embedding at true frequencies: what is derived at a few positions leaves the model alone at all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from op_program import Data, OpExample, trace_op
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.symmetry.certificate.random_copy import random_elements, transform
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.groups import RotaryCommutant
from hf_align.symmetry.interpreter import linear_regions
from hf_align.symmetry.interpreter.bounds import FIXED, Bound
from hf_align.symmetry.interpreter.rotations import Rotations
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import model_class
from hf_align.tracing.trace import trace

STRIDES = (1, 100, 1000, 2000)
_LENGTH = 64
_ROUNDING = 1e-9
"""What random elements may change about the largest logit in float64, norms and softmax included."""
_ROUNDING_OF_ALL = 1e-5
"""The same where weights are moved, and models run, in float32: sums of 4096 products."""


def rope(kind: str, theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def factors(size: int) -> dict[str, Any]:
    return {"short_factor": [1 + i / size for i in range(size // 2)], "long_factor": [1 + i for i in range(size // 2)]}


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "as it was": ("llama", rope("default")),
    "of Llama 3": ("llama", rope("default", 5e5)),
    "of a million": ("llama", rope("default", 1e6)),
    "of ten million": ("llama", rope("default", 1e7)),
    "of Llama 3.1": ("llama", rope("llama3", 5e5, **LLAMA3)),
    "linear": ("llama", rope("linear", factor=8.0)),
    "dynamic": ("llama", rope("dynamic", factor=4.0)),
    "yarn": ("llama", rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=32768)),
    "longrope": ("llama", rope("longrope", factor=32.0, original_max_position_embeddings=4096)),
    "partial": ("stablelm", rope("default", 5e5, partial_rotary_factor=0.25)),
    "proportional": ("llama", rope("proportional", 1e6, partial_rotary_factor=0.5)),
    "by neighbours": ("cohere", rope("default", 5e5)),
}


def config_of(kind: str, head: int) -> PretrainedConfig:
    family, fields = KINDS[kind]
    if kind == "longrope":
        fields["rope_parameters"].update(factors(head))
    sizes = dict(vocab_size=11, hidden_size=2 * head, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, max_position_embeddings=131072, tie_word_embeddings=False,
                 bos_token_id=0, eos_token_id=0, pad_token_id=0)  # fmt: skip
    names = {"llama": "LlamaForCausalLM", "stablelm": "StableLmForCausalLM", "cohere": "CohereForCausalLM"}
    return transformers.AutoConfig.for_model(family, **sizes, **fields, architectures=[names[family]])


def changes(config: PretrainedConfig, spec: SymmetrySpec, dtype: torch.dtype = torch.float64) -> list[float]:
    """What random elements change about the logits, beside the largest of them, by stride of the positions. Norms and
    softmax, which modelling code takes in `torch.float32`, are taken in the dtype of the model."""
    rng = torch.Generator().manual_seed(0)
    model = model_class(config)(config, dtype=dtype, attn_implementation="eager").eval()
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=rng, dtype=dtype)
        weight.data = 1 + 0.2 * noise if weight.dim() == 1 else noise * (1.5 / weight.shape[-1] ** 0.5)
    weights = {name: p.data for name, p in model.named_parameters()}
    moved = transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng))
    ids = torch.randint(config.vocab_size, (1, _LENGTH), generator=rng)

    single = torch.float32

    def as_it_is(value: Tensor) -> Tensor:
        return value if value.dtype == dtype else value.to(single)

    def logits(used: dict[str, Tensor], stride: int) -> Tensor:
        arguments = {"input_ids": ids, "position_ids": stride * torch.arange(_LENGTH)[None], "use_cache": False,
                     "attention_mask": torch.ones_like(ids)}  # fmt: skip
        with torch.no_grad(), patch.object(torch, "float32", dtype), patch.object(Tensor, "float", as_it_is):
            found: Tensor = torch.func.functional_call(model, used, (), arguments).logits
        return found

    before = {stride: logits(weights, stride) for stride in STRIDES}
    return [float((logits(moved, s) - x).abs().max() / x.abs().max()) for s, x in before.items()]


@pytest.mark.parametrize("head", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_at_positions_far_out(kind: str, head: int) -> None:
    config = config_of(kind, head)
    spec = derive(trace(config))
    (rotary,) = {s.group for s in spec.spaces.values() if isinstance(s.group, RotaryCommutant)}
    size = head // 4 if kind == "partial" else head  # the rest of a head is a space of its own
    turning = head // 2 if kind == "proportional" else size
    assert rotary.size == size and len(rotary.rotations.still) == size - turning
    assert [len(planes) for planes in rotary.rotations.planes] == [1] * (turning // 2)
    assert max(changes(config, spec)) < _ROUNDING


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "hidden, dtype, rounding", [(256, torch.float64, _ROUNDING), (14336, torch.float32, _ROUNDING_OF_ALL)]
)
def test_two_layers_of_llama_31_8b_stay_at_positions_far_out(hidden: int, dtype: torch.dtype, rounding: float) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=4096, intermediate_size=hidden, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, architectures=["LlamaForCausalLM"],
        **rope("llama3", 5e5, **LLAMA3),
    )  # fmt: skip
    assert max(changes(config, derive(trace(config)), dtype)) < rounding


NEXT = float(np.nextafter(np.float32(0.25), np.float32(1)))
FREQUENCIES = [1.0, 0.25, 0.0, 0.25, 1e-9, NEXT, -0.25]
"""Of planes (k, k + 7); two coordinates behind them are only passed on."""


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Halves of the first 14 coordinates turned towards each other, [7, 16]."""
    left, right, rest = x[:, :7], x[:, 7:14], x[:, 14:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], 1)


def from_a_range(x: Tensor) -> Tensor:
    return turned(x, torch.arange(7)[:, None].float() * torch.tensor(FREQUENCIES))


def from_stored_numbers(x: Tensor) -> Tensor:
    return turned(x, torch.tensor([3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])[:, None] * torch.tensor(FREQUENCIES))


def from_angles(x: Tensor) -> Tensor:
    return turned(x, torch.tensor([[p * f for f in FREQUENCIES] for p in range(7)], dtype=torch.float32))


def from_one_place(x: Tensor) -> Tensor:
    return turned(x, (torch.arange(1) + 11)[:, None].float() * torch.tensor(FREQUENCIES))


def from_angles_of_one_place(x: Tensor) -> Tensor:
    return turned(x, torch.tensor([[11 * f for f in FREQUENCIES]]))


def from_whole_frequencies_at_one_place(x: Tensor) -> Tensor:
    return turned(x, (torch.arange(1) + 11)[:, None].float() * torch.tensor([1.0, 2.0, 0.0, 2.0, 3.0, 4.0, -2.0]))


def from_neighbours(x: Tensor) -> Tensor:
    """As a step with a cache does: neighbours turn towards each other, and are laid out as halves."""
    even, odd, rest = x[:, 0:14:2], x[:, 1:14:2], x[:, 14:]
    angles = (torch.arange(1) + 11)[:, None].float() * torch.tensor(FREQUENCIES)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin, rest], 1)


def neighbours_side_by_side(x: Tensor, sign: float = 1) -> Tensor:
    """Neighbours turn towards each other, are stacked, and are laid out as they lay before."""
    even, odd = x[:, ::2], x[:, 1::2]
    angles = torch.arange(7)[:, None].float() * torch.tensor([*FREQUENCIES, 0.5])
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, odd * cos + sign * even * sin], -1).flatten(1)


def planes_of(
    call: Callable[[Tensor], Tensor], places: int = 7
) -> tuple[set[frozenset[tuple[int, int]]], tuple[int, ...]]:
    spec = derive(trace_op(OpExample("cat", call, (Data((places, 16)),), "")))
    (group,) = {s.group for s in spec.spaces.values() if isinstance(s.group, RotaryCommutant)}
    return set(map(frozenset, group.rotations.planes)), group.rotations.still


@pytest.mark.parametrize("call", [from_a_range, from_stored_numbers])
def test_only_equal_frequencies_turn_alike_and_only_zero_stands_still(call: Callable[[Tensor], Tensor]) -> None:
    alone = [(0, 7), (4, 11), (5, 12)]
    expected = {frozenset([plane]) for plane in alone} | {frozenset([(1, 8), (3, 10), (13, 6)])}
    assert planes_of(call) == (expected, (2, 9, 14, 15))


def test_what_is_not_seen_to_turn_at_given_angles_might_at_others() -> None:
    planes, still = planes_of(from_angles)
    assert frozenset([(2, 9)]) in planes and still == (14, 15)
    assert frozenset([(5, 12)]) in planes and frozenset([(4, 11)]) in planes


@pytest.mark.parametrize("call", [from_one_place, from_whole_frequencies_at_one_place])
def test_one_place_says_as_much_as_many(call: Callable[[Tensor], Tensor]) -> None:
    alone = [(0, 7), (4, 11), (5, 12)]
    expected = {frozenset([plane]) for plane in alone} | {frozenset([(1, 8), (3, 10), (13, 6)])}
    assert planes_of(call, 1) == (expected, (2, 9, 14, 15))


def test_angles_of_one_place_leave_in_doubt_what_stands_still() -> None:
    planes, still = planes_of(from_angles_of_one_place, 1)
    assert frozenset([(2, 9)]) in planes and still == (14, 15)


def test_neighbours_that_are_laid_out_as_halves_are_found_at_one_place() -> None:
    program = trace_op(OpExample("cat", from_neighbours, (Data((1, 16)),), ""))
    (region,) = linear_regions.find_rotations(program).values()
    alone = [(0, 1), (8, 9), (10, 11)]
    expected = {frozenset([p]) for p in alone} | {frozenset([(2, 3), (6, 7), (13, 12)])}
    assert set(map(frozenset, region.rotations.planes)) == expected and region.rotations.still == (4, 5, 14, 15)
    assert region.order == (*range(0, 14, 2), *range(1, 14, 2), 14, 15)


def test_neighbours_that_are_stacked_and_laid_out_again_turn() -> None:
    alone = [(0, 1), (8, 9), (10, 11), (14, 15)]
    expected = {frozenset([p]) for p in alone} | {frozenset([(2, 3), (6, 7), (13, 12)])}
    assert planes_of(neighbours_side_by_side) == (expected, (4, 5))


def test_trap_neighbours_that_are_stacked_and_laid_out_need_not_turn() -> None:
    program = trace_op(OpExample("stack", lambda x: neighbours_side_by_side(x, -1), (Data((7, 16)),), ""))
    assert not linear_regions.find_rotations(program)


def test_coordinates_that_only_pass_by_are_not_looked_at_at_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, look = list[int](), linear_regions._rotations

    def counted(nodes: Any, base: Any, output: Any, known: Any) -> Any:
        looked_at.append(base.meta["val"].shape[-1])
        return look(nodes, base, output, known)

    monkeypatch.setattr(linear_regions, "_rotations", counted)
    spec = derive(trace(config_of("partial", 64)))
    (rotary,) = {s.group for s in spec.spaces.values() if isinstance(s.group, RotaryCommutant)}
    assert set(looked_at) == {rotary.size} == {16}


A = Rotations(6, (((0, 1), (2, 3)),), (4, 5))
MEETINGS = {
    "itself": (A, A),
    "another frequency": (Rotations(6, (((0, 1),), ((2, 3),)), (4, 5)), Rotations(6, (((0, 1),), ((2, 3),)), (4, 5))),
    "the other way": (Rotations(6, (((1, 0), (3, 2)),), (4, 5)), A),
    "one the other way": (Rotations(6, (((0, 1), (3, 2)),), (4, 5)), Rotations(6, (((0, 1),), ((2, 3),)), (4, 5))),
    "more that turns": (Rotations(6, (((0, 1), (2, 3), (4, 5)),), ()), Rotations(6, (((0, 1), (2, 3)), ((4, 5),)), ())),
    "less that turns": (Rotations(6, (((0, 1),),), (2, 3, 4, 5)), Rotations(6, (((0, 1),), ((2, 3),)), (4, 5))),
    "other planes": (Rotations(6, (((0, 2), (1, 3)),), (4, 5)), None),
    "a plane half of which stood still": (Rotations(6, (((0, 4),),), (1, 2, 3, 5)), None),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_two_families_of_rotations_meet_in_what_commutes_with_both(name: str) -> None:
    other, expected = MEETINGS[name]
    met = Bound(rotations=A).meet(Bound(rotations=other))
    assert met == (FIXED if expected is None else Bound(rotations=expected))
    if expected is not None:
        both = torch.cat([RotaryCommutant(6, r).tangents().flatten(1) for r in (A, other)])
        shared = sum(RotaryCommutant(6, r).dimension for r in (A, other)) - int(torch.linalg.matrix_rank(both))
        assert RotaryCommutant(6, expected).dimension == shared
