"""Null directions are moved, fixed, flat or open, without a word about ops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import tiny_bert
from test_symmetries import CASES, derived, traced
from torch import Tensor

from hf_align.symmetry.certificate import flat as flatness
from hf_align.symmetry.certificate import null_directions as counting
from hf_align.symmetry.certificate import null_space as null_spaces
from hf_align.symmetry.certificate.count import (
    Look,
    glances,
    looks,
    moving,
    reached,
    telling_looks,
    without_any_effect,
)
from hf_align.symmetry.certificate.kinks import within_reach
from hf_align.symmetry.certificate.null_directions import canonical_weights, null_directions, orthonormal
from hf_align.symmetry.certificate.null_space import without_effect
from hf_align.symmetry.certificate.random_copy import Weights, random_weights, with_tokens
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.gauges.lengths import LevelLength
from hf_align.symmetry.gauges.moves import MoveConstant
from hf_align.symmetry.gauges.row_means import CentreWriter
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.join import join
from hf_align.tracing.modes import find_modes
from hf_align.tracing.program import Program
from hf_align.tracing.trace import trace

_OF_EACH_GAUGE = ("gpt2", "gptj", "bert tied", "resnet", "persimmon", "beit", "starcoder2", "heads beside windows",
                  "patches left out")  # fmt: skip


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        ("llama", (74, 24, 0, 0)),
        ("gpt2", (85, 143, 7, 0)),
        ("gpt2 tied", (64, 104, 0, 0)),
        ("bert tokens", (64, 137, 14, 0)),
        ("mixtral", (60, 32, 0, 0)),
        ("lora", (78, 24, 0, 24)),
    ],
)
def test_every_null_direction_is_of_one_kind(case: str, counts: tuple[int, ...]) -> None:
    found = null_directions(traced(case), derived(case), rng())
    assert tuple(map(len, (found.moved, found.fixed, found.flat, found.open))) == counts
    together = torch.cat([found.found, found.open])
    assert torch.allclose(together @ together.T, torch.eye(found.nullity).double(), atol=1e-8)
    assert float((found.derivatives @ together.T).norm()) < 1e-9 * float(found.derivatives.norm())


def test_words_and_positions_exchange_a_constant_at_all_weights() -> None:
    """Of the eight directions the mean is fixed: every writer loses it."""
    found = null_directions(traced("gpt2"), derived("gpt2"), rng())
    assert len(found.flat) == 7


def test_a_symmetry_that_depends_on_the_weights_is_open_without_its_gauge() -> None:
    """One value bias for each channel of a head goes into the output bias by way of the output weight."""
    program, spec = traced("gpt2"), derived("gpt2")
    kept = tuple(g for g in spec.gauges if not isinstance(g, MoveConstant))
    whole, found = (null_directions(program, replace(spec, gauges=g), rng()) for g in (spec.gauges, kept))
    assert (found.nullity, len(found.open)) == (whole.nullity, 8)
    assert set(found.by_parameter()) >= {"transformer.h.0.attn.c_attn.bias", "transformer.h.0.attn.c_proj.bias"}


def test_a_symmetry_that_does_not_is_flat_without_its_gauge() -> None:
    program, spec = traced("gpt2"), derived("gpt2")
    table = "transformer.wpe.weight"
    kept = tuple(g for g in spec.gauges if not (isinstance(g, CentreWriter) and g.parameter == table))
    whole, found = (null_directions(program, replace(spec, gauges=g), rng()) for g in (spec.gauges, kept))
    assert len(found.open) == 0
    assert len(found.flat) == len(whole.flat) + derived("gpt2").shape(table)[0]


@pytest.mark.slow
def test_a_factor_that_depends_on_the_weights_is_open_though_a_norm_has_it_too() -> None:
    """Of W n for a norm's n = γ m + β, only the direction is seen. A factor of γ and β is null at all weights, but is
    none of canonical ones: there it is one of W, and the mean of W and 2W is neither."""
    program, spec = traced("clip"), derived("clip")
    kept = tuple(g for g in spec.gauges if not isinstance(g, LevelLength))
    whole, found = (null_directions(program, replace(spec, gauges=g), rng()) for g in (spec.gauges, kept))
    assert (len(whole.open), len(found.open)) == (0, 2)


def test_what_only_a_small_result_sees_is_looked_at_in_more_contexts() -> None:
    """Else most of what one vector for each context depends on would seem to have no effect."""
    program = trace(tiny_bert(architectures=["BertModel"]), length=10)
    hidden, pooled = program.interface
    sizes = {name: 640 if name.startswith("pooler") else 1 for name in program.shapes}
    first, more = looks(program, sizes, 2.0)
    assert (first.results, more.results) == ((hidden, pooled), (pooled,))
    assert (first.contexts + more.contexts) * pooled.meta["val"].numel() >= 2.0 * 2 * 640


def test_what_a_first_look_leaves_is_looked_at_in_all_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what one call of several does not see moved would be null, and might be called flat."""
    whole = null_directions(traced("llama"), derived("llama"), rng())
    few = (Look((traced("llama").interface[-1],), 1, 10.0),)
    monkeypatch.setattr(counting, "telling_looks", lambda *_, **__: iter(few))
    found = null_directions(traced("llama"), derived("llama"), rng())
    assert (found.nullity, len(found.open)) == (whole.nullity, 0)


def test_rows_of_a_table_are_seen_in_as_many_contexts_as_they_were_looked_up_in() -> None:
    """Few contexts of ten tokens leave some of 128 out, whose rows would seem to have no effect."""
    config = with_tokens(CASES["llama"](), 128)
    assert config is not None
    program = trace(config, length=10)
    found = null_directions(program, derive(program), rng())
    assert bool(found.reached.all())
    assert tuple(map(len, (found.moved, found.fixed, found.flat, found.open))) == (74, 24, 0, 0)


def test_what_was_not_read_is_not_seen_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that opens in one context of a thousand: what a group leaves of the other weights has an effect there."""
    program, spec = traced("llama"), derived("llama")
    sizes = {name: math.prod(spec.shape(name)) for name in spec.parameters}
    rare = torch.cat([torch.arange(size) < (size // 4 if "embed" in name else 0) for name, size in sizes.items()])
    found_at = counting.reached
    monkeypatch.setattr(counting, "reached", lambda *given: found_at(*given) & ~rare)
    found = null_directions(program, spec, rng())
    assert int((~found.reached).sum()) == int(rare.sum())
    assert len(found.moved) == 74 and not len(found.open)
    assert float((found.derivatives @ found.found.T).norm()) < 1e-9 * float(found.derivatives.norm())


def test_a_weight_that_no_call_computes_with_is_not_reached() -> None:
    program, spec = traced("llama"), derived("llama")
    weights = random_weights(spec, rng())
    beside = {"nowhere": torch.ones(3, dtype=torch.float64)}
    found = reached(program, beside | weights, 64, rng())
    assert not found[:3].any() and found[3:].equal(reached(program, weights, 64, rng()))


@pytest.mark.parametrize("few", [1, 8])
def test_what_one_result_alone_sees_is_found_however_few_outputs_are_looked_at_first(few: int) -> None:
    """Ten directions of twelve have an effect, eight in one result and two in another."""
    program = trace(tiny_bert(architectures=["BertModel"]), length=10)
    sees = torch.eye(12, dtype=torch.float64)
    parts = dict(zip(program.interface, (sees[:8], sees[8:10]), strict=True))
    asked: dict[object, list[int]] = {}

    def jacobians(look: Look) -> list[Tensor]:
        (result,) = look.results
        asked.setdefault(result, []).append(int(look.wanted))
        mixes = torch.randn(few * int(look.wanted), 12, generator=rng(), dtype=torch.float64)
        return [mixes @ torch.diag(parts[result].sum(0))]

    left = without_any_effect(sees, program, jacobians, 2.0, zero=1e-12)
    assert len(left) == 2 and float(left[:, :10].norm()) < 1e-9
    assert asked.keys() == {*program.interface}
    for outputs in asked.values():
        assert outputs == sorted(set(outputs)), "more outputs after each look that found an effect"


@pytest.mark.parametrize("faint", [1e-2, 1e-6, 1e-8])
def test_what_rounding_leaves_of_faint_directions_takes_none_of_the_null_ones(
    faint: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directions of twelve have an effect in all results, but nearly none in that which is looked at first: so much
    more of them is left in the two that have none, and seen where their effect is large."""
    program = trace(tiny_bert(architectures=["BertModel"]), length=10)
    first, second = program.interface
    turn = torch.linalg.qr(torch.randn(12, 12, generator=rng()).double())[0]
    sizes = {first: torch.tensor([1.0] * 8 + [faint] * 2), second: torch.tensor([0.0] * 8 + [1.0] * 2)}
    drawn = torch.Generator().manual_seed(1)

    def jacobian(program: Program, weights: Weights, looks: list[Look], rng: torch.Generator) -> Tensor:
        ((result,),) = (look.results for look in looks)
        mixes = torch.randn(40, 10, generator=drawn).double()
        return mixes @ (sizes[result].double()[:, None] * turn[:10])

    monkeypatch.setattr(counting, "jacobian", jacobian)
    monkeypatch.setattr(counting, "glances", lambda *_: {first: torch.zeros(0, 12).double()})
    monkeypatch.setattr(counting, "telling_looks", lambda *_, **__: [Look((first,), 1)])
    monkeypatch.setattr(counting, "moving", lambda *_: {})
    nothing, all_read = torch.zeros(0, 12).double(), torch.ones(12, dtype=torch.bool)
    _, rest = counting._beyond(program, {}, nothing, all_read, 4, rng())
    assert len(rest) == 2 and float((rest @ turn[:10].T).norm()) < 1e-9


@pytest.mark.parametrize(
    ("sizes", "null"),
    [
        ((1.0, 1e-3, 1e-6, 1e-8), 0),
        ((1.0, 3e-3, 1e-7, 2e-10), 0),
        ((1.0, 3e-3, 1e-7, 1e-13), 1),
        ((1.0, 1e-3, 1e-6, 1e-13), 1),
        ((1.0, 1e-3, 1e-13, 1e-16), 2),
    ],
)
def test_small_effects_are_effects(sizes: tuple[float, ...], null: int) -> None:
    """Also where no direction is without any: else the smallest would be taken for rounding."""
    turn = torch.linalg.qr(torch.randn(4, 4, generator=rng()).double())[0]
    effects = torch.tensor(sizes).double()[:, None] * turn
    assert len(without_effect(torch.eye(4).double(), [effects], zero=1e-12)) == null


@pytest.mark.parametrize(("faint", "flat"), [(1e-4, 0), (1e-7, 0), (1e-12, 1), (0.0, 1)])
def test_a_small_effect_at_other_weights_is_none_of_a_flat_direction(
    faint: float, flat: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = trace(tiny_bert(architectures=["BertModel"]), length=10)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=rng()).double())[0]
    drawn = torch.Generator().manual_seed(1)

    def jacobian(*_: object) -> Tensor:
        return torch.randn(8, 3, generator=drawn).double() @ (torch.tensor([1.0, 0.5, faint]).double()[:, None] * turn)

    monkeypatch.setattr(flatness, "jacobian", jacobian)
    found = flatness.flat_directions(program, [{}], torch.eye(3).double(), torch.ones(3, dtype=torch.bool), rng())
    assert len(found) == flat


def test_a_result_that_sees_nothing_takes_no_direction() -> None:
    every, nothing = torch.eye(3).double(), torch.zeros(2, 3).double()
    assert len(without_effect(every, [nothing], zero=1e-12)) == 3
    assert len(without_effect(every, [nothing, every[:1]], zero=1e-12)) == 2


def test_a_result_that_no_input_changes_is_not_looked_at_first() -> None:
    """A mask that hides all sounds leaves what reads them without an effect, which the graph does not show."""
    config = transformers.HubertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6, conv_dim=(8, 8),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_length=1, architectures=["HubertModel"],
    )  # fmt: skip
    program = join({mode.name: program for mode, program in find_modes(build_without_weights(config))})
    spec = derive(program)
    sizes = {name: math.prod(spec.shape(name)) for name in spec.parameters}
    moved = moving(glances(program, weights := canonical_weights(program, spec, rng()), rng()), weights)
    blind = {result for result, names in moved.items() if not any("conv_layers" in name for name in names)}
    first, *_ = telling_looks(program, 1.0, most=sum(sizes.values()))
    best, *_ = telling_looks(program, 1.0, most=sum(sizes.values()), read=moved)
    assert blind.issuperset(first.results) and blind.isdisjoint(best.results)


def test_a_first_look_sees_every_parameter_once() -> None:
    """Of two towers, no result sees both: each is looked at for what the others do not see."""
    program = traced("clip")
    sizes = {name: torch.Size(shape).numel() for name, shape in program.shapes.items()}
    found = [*telling_looks(program, 1.0, most=sum(sizes.values()))]
    assert len({look.results for look in found}) == len(found) <= len(program.interface)
    assert sum(sizes.values()) <= sum(look.wanted for look in found) + 1
    assert sum(look.wanted for look in found) <= sum(sizes.values())


@pytest.mark.parametrize(("count", "rank"), [(3, 3), (40, 7), (300, 64), (300, 65), (300, 100), (500, 120)])
def test_a_basis_of_many_rows_that_depend_on_each_other(count: int, rank: int) -> None:
    factors = torch.randn(count, rank, generator=rng()).double(), torch.randn(rank, 120, generator=rng()).double()
    rows = factors[0] @ factors[1]
    rows = rows / rows.norm(dim=1, keepdim=True)
    basis = orthonormal(rows)
    assert basis.shape == (rank, 120)
    assert torch.allclose(basis @ basis.T, torch.eye(rank).double())
    assert torch.allclose((rows @ basis.T) @ basis, rows)


@pytest.mark.parametrize("case", [c if c in _OF_EACH_GAUGE else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_canonical_weights_are_their_own_canonical_form(case: str) -> None:
    weights = canonical_weights(traced(case), derived(case), rng())
    again = CanonicalWeights(weights, derived(case).gauges)
    assert max(float((again[name] - weight).abs().max()) for name, weight in weights.items() if weight.numel()) < 1e-12


def test_where_an_svd_does_not_converge_another_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Wav2Vec2's, where many directions have the same effect."""
    rows = torch.randn(5, 9, generator=rng(), dtype=torch.float64)
    expected = null_spaces.null_space(rows)

    def fails(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    found = null_spaces.null_space(rows)
    assert found.shape == expected.shape == (4, 9)
    assert torch.allclose(found.T @ found, expected.T @ expected, atol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_limit_that_another_hides_has_the_other_sign(sign: int) -> None:
    """xIELU takes the smaller of x and a stored number where x is negative: a positive one says nothing."""
    program, spec = traced("activation with learned slopes"), derived("activation with learned slopes")
    weights = random_weights(spec, rng())
    limits = {name: sign * w.abs() for name, w in weights.items() if name.endswith("act_fn.eps")}
    reached = within_reach(program, spec, weights | limits, rng())
    assert limits and all((reached[name] < 0).all() for name in limits)
    assert all(torch.equal(reached[name], w) for name, w in weights.items() if name not in limits)
