"""Where a gauge holds, and where its condition nearly does, but not quite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from conftest import matched, tiny_llama
from torch import Tensor
from traps import biases
from traps.tower import TowerConfig

from hf_align.errors import HfAlignError
from hf_align.symmetry.certificate.null_directions import null_directions
from hf_align.symmetry.certificate.random_copy import (
    raise_epsilons,
    random_elements,
    random_inputs,
    random_weights,
    transform,
)
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.derivation.unseen import without_unseen
from hf_align.symmetry.gauges import row_means
from hf_align.symmetry.gauges.angle_tables import TurnTable
from hf_align.symmetry.gauges.canonical import CanonicalWeights, Gauge, Get, Slices
from hf_align.symmetry.gauges.carried_biases import CarryBias
from hf_align.symmetry.gauges.common_scales import CommonScale
from hf_align.symmetry.gauges.constant_queries import ReadConstant, SeenKeys
from hf_align.symmetry.gauges.folds import FoldNorm
from hf_align.symmetry.gauges.free_scores import FreeScores
from hf_align.symmetry.gauges.inputs import FoldDivisor, MoveSubtrahend, Shown
from hf_align.symmetry.gauges.kept_norms import FreeReader
from hf_align.symmetry.gauges.kernels import ChannelWriter, LevelKernels
from hf_align.symmetry.gauges.lengths import LevelDirection, LevelLength
from hf_align.symmetry.gauges.linked_gains import LinkedGain
from hf_align.symmetry.gauges.masked_readers import MaskedReader
from hf_align.symmetry.gauges.moves import MoveConstant, MoveMean, ShortenConstant, Stored
from hf_align.symmetry.gauges.norm_readers import reading_of_all
from hf_align.symmetry.gauges.parts import OnParts
from hf_align.symmetry.gauges.read_streams import ShearStream, ShortenWriter
from hf_align.symmetry.gauges.shears import ShearAlongMean
from hf_align.symmetry.gauges.spectra import LevelSpectrum
from hf_align.symmetry.groups import GeneralLinear
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.join import join
from hf_align.tracing.modes import find_modes
from hf_align.tracing.program import Program
from hf_align.tracing.trace import trace

_TRAPS = [
    import_module(f"traps.{name}")
    for name in ("abreast", "angles", "biases", "carried", "centred", "convolved", "idle", "joined", "learned",
                 "linked", "looked_up", "masked", "means", "normed", "paths", "pooled", "scaled", "scales",
                 "stored", "streams")
]  # fmt: skip


@cache
def program(part: str, **sizes: int) -> Program:
    """Of a decoder with some part that is not as usual."""
    names = {"model_type": f"tower_{part.lower()}", "__init__": TowerConfig.__init__}
    config_class = type(f"{part}Config", (TowerConfig,), names)
    (base,) = {getattr(m, f"{part}Tower") for m in _TRAPS if hasattr(m, f"{part}Tower")}
    kind = type(part, (base,), {"config_class": config_class})
    hf.AutoConfig.register(names["model_type"], config_class)
    hf.AutoModelForCausalLM.register(config_class, kind)
    return trace(config_class(architectures=[part], **{"num_hidden_layers": 1} | sizes), length=10)


def gauges(part: str, **sizes: int) -> tuple[Gauge, ...]:
    """Those of a decoder with some part, if the canonical weights compute the same."""
    spec, rng = derive(program(part, **sizes)), torch.Generator().manual_seed(0)
    for _ in range(3):
        inputs = random_inputs(program(part, **sizes), rng)
        assert soundness(program(part, **sizes), spec, random_weights(spec, rng), inputs, rng) < 1e-9
    return spec.gauges


def is_canonical(weights: Mapping[str, Tensor], gauges: tuple[Gauge, ...]) -> bool:
    """Whether the gauges leave weights as they are."""
    once = dict(weights)
    again = CanonicalWeights(once, gauges)
    return all(torch.allclose(again[name], once[name], atol=1e-10) for name in once)


def one(kind: type[Gauge], part: str, **sizes: int) -> Gauge | None:
    """The one gauge of a kind of a decoder with some part, if it has one, and if what is canonical stays as it is."""
    found = [gauge for gauge in gauges(part, **sizes) if isinstance(gauge, kind)]
    spec = derive(program(part, **sizes))
    weights = random_weights(spec, torch.Generator().manual_seed(1))
    assert is_canonical(CanonicalWeights(weights, spec.gauges), spec.gauges)
    assert len(found) < 2
    return found[0] if found else None


def moved(part: str, stored: Stored) -> bool:
    """Whether some constant that is stored so goes into biases."""
    moves = [gauge for gauge in gauges(part) if isinstance(gauge, MoveConstant)]
    return any(gauge.taken and gauge.source.stored is stored for gauge in moves)


@pytest.mark.parametrize(
    ("part", "moves"), [("Beside", True), ("Fainter", False), ("Doubled", False), ("Measured", False)]
)
def test_values_without_bias_keep_their_constant_unless_a_bias_is_added_once(part: str, moves: bool) -> None:
    assert moved(part, Stored.READER) == moves


@pytest.mark.parametrize(
    ("part", "moves"), [("Behind", True), ("BehindHalf", False), ("BehindSlopes", False), ("BehindShifted", False)]
)
def test_positions_keep_their_constant_unless_all_that_sees_it_has_a_bias(part: str, moves: bool) -> None:
    assert moved(part, Stored.TABLE) == moves


@pytest.mark.parametrize(
    ("part", "alike"),
    [("Joined", 2), ("JoinedThree", 3), ("JoinedAgain", 2), ("JoinedTwice", 0), ("JoinedTurned", 0), ("JoinedBare", 0),
     ("JoinedSeen", 0), ("JoinedSum", 0), ("JoinedMark", 2), ("JoinedMarkSeen", 0), ("JoinedMarkAcross", 1)],
)  # fmt: skip
def test_constants_that_are_joined_go_together_if_every_place_shows_one(part: str, alike: int) -> None:
    found = [(g.source, *g.alike) for g in gauges(part) if isinstance(g, MoveConstant)]
    norms = [moved for moved in found if any(c.parameter.startswith("enter.") for c in moved)]
    assert [len(moved) for moved in norms] == [alike] * bool(alike)


@pytest.mark.parametrize("part", ["Joined", "JoinedThree", "JoinedAgain"])
def test_constants_that_are_joined_leave_nothing_open(part: str) -> None:
    joined = raise_epsilons(program(part), 0.01)
    assert not len(null_directions(joined, derive(joined), torch.Generator().manual_seed(0)).open)


_SCALED = {"Scaled": True, "ScaledBiased": True, "ScaledFilled": True, "ScaledTwice": True, "ScaledNoConstant": True,
           "ScaledThrough": True, "ScaledCentred": True,
           "Resampled": True, "ResampledBent": False, "ResampledAcross": False,
           "ScaledOnes": False, "ScaledSome": False, "ScaledItself": False, "ScaledInverse": False,
           "ScaledStatistics": False, "BareStatistics": False, "BiasedStatistics": True}  # fmt: skip


@pytest.mark.parametrize(("part", "goes"), _SCALED.items())
def test_a_norm_goes_whole_into_what_reads_its_vectors_times_numbers_if_that_has_room(part: str, goes: bool) -> None:
    folds = [g for g in gauges(part) if isinstance(g, FoldNorm) and g.gain == "enter.weight"]
    assert any(fold.exclusive for fold in folds) == goes


@pytest.mark.parametrize(("part", "moves"), [("", True), ("Padded", False), ("Bent", False)])
def test_a_constant_is_one_between_places_too(part: str, moves: bool) -> None:
    found = [g for g in gauges(f"ResampledLinear{part}") if isinstance(g, MoveConstant)]
    assert any(g.source.parameter == "enter.bias" for g in found) == moves


@pytest.mark.parametrize(
    "part", ["Scaled", "ScaledBiased", "ScaledFilled", "ScaledTwice", "ScaledNoConstant", "Resampled"]
)
def test_what_reads_vectors_times_numbers_leaves_nothing_open(part: str) -> None:
    scaled = raise_epsilons(program(part), 0.01)
    assert not len(null_directions(scaled, derive(scaled), torch.Generator().manual_seed(0)).open)


@pytest.mark.parametrize(
    ("part", "moves"), [("Grouped", True), ("GroupedPadded", False), ("GroupedBent", False), ("GroupedSlopes", False)]
)
def test_a_constant_goes_through_groups_of_channels_that_read_one_place(part: str, moves: bool) -> None:
    assert moved(part, Stored.TABLE) == moves


@pytest.mark.parametrize(
    ("part", "moves"),
    [("Channels", True), ("ChannelsPadded", False), ("ChannelsBent", False), ("ChannelsSlopes", False)],
)
def test_the_bias_of_a_norm_over_channels_goes_into_what_reads_one_place(part: str, moves: bool) -> None:
    found = [g for g in gauges(part) if isinstance(g, MoveConstant) and g.source.parameter.endswith("mlp.norm.bias")]
    assert [t.bias.endswith("places.bias") for g in found for t in g.taken] == [True] * moves


@pytest.mark.parametrize(
    ("part", "moves", "frees"),
    [("", True, True), ("Clamped", False, False), ("Otherwise", False, False), ("Partly", False, False),
     ("Total", False, False), ("Rounded", False, False), ("Itself", False, False), ("Wide", True, False)],
)  # fmt: skip
def test_what_reads_a_mean_by_factors_reads_constants_whole_only_if_these_sum_to_one(
    part: str, moves: bool, frees: bool
) -> None:
    found = gauges(f"Masked{part}")
    assert any(isinstance(g, MoveConstant) and g.source.parameter == "pooled.bias" for g in found) == moves
    assert any(isinstance(g, FreeReader) and g.weight == "read.weight" for g in found) == frees


@pytest.mark.parametrize(
    ("part", "idle"),
    [("", True), ("Lowered", True), ("Unbound", True), ("Fixed", True), ("FixedAhead", False),
     ("FixedWeighed", False), ("Weighed", False), ("Ahead", False), ("First", False), ("Unless", False),
     ("Returned", False), ("Otherwise", False), ("Mixed", False), ("Shifted", False), ("Multiplied", False),
     ("Fainter", False), ("Louder", False), ("Summed", False), ("Recurrent", True), ("Convolved", True),
     ("Widened", False)],
)  # fmt: skip
def test_the_bias_of_a_norm_goes_through_a_mask_only_if_nobody_sees_what_that_hides(part: str, idle: bool) -> None:
    found = gauges(f"Idle{part}")
    assert any(isinstance(g, MoveConstant) and g.source.parameter.endswith("first.bias") for g in found) == idle
    assert any(isinstance(g, FreeReader) and g.weight.endswith("attn.q.weight") for g in found) == idle


@pytest.mark.parametrize(
    ("part", "free"),
    [("", {}), ("Square", {"q": ((0, 8),), "k": ((0, 4),)}), ("Returned", {"k": ((0, 4),)}),
     ("Ahead", {"q": ((0, 8),)}), ("Fused", {"proj": ((0, 12), (18, 30))}),
     ("FusedUnbiased", {"proj": ((6, 12), (24, 30))}), ("FusedLocal", {"proj": ((0, 6), (18, 24))}),
     ("FusedKept", {"proj": ((6, 12), (24, 30))}), ("SquareTwice", {}), ("SquareTurned", {}), ("SquareBeside", {})],
)  # fmt: skip
def test_readers_behind_a_mask_are_free_where_nobody_sees_what_they_read_of_padding(
    part: str, free: dict[str, Slices]
) -> None:
    found = [gauge for gauge in gauges(f"Idle{part}") if isinstance(gauge, MaskedReader)]
    assert {gauge.weight.split(".")[-2]: gauge.rows for gauge in found} == free


@pytest.mark.parametrize(
    ("part", "frees"),
    [("", True), ("Biased", True), ("Uncentred", False), ("Padded", False), ("Wider", False), ("Narrow", False),
     ("Bent", False), ("Across", False), ("Beside", False), ("Twice", False), ("Some", False)],
)  # fmt: skip
def test_scores_lose_what_a_softmax_over_places_never_sees_of_a_norm(part: str, frees: bool) -> None:
    assert (one(FreeScores, f"Learned{part}") is not None) == frees
    gauges(f"Learned{part}")


def test_scores_stay_as_they_are_where_the_map_before_them_or_the_gain_loses_something() -> None:
    gauge = one(FreeScores, "Learned")
    assert isinstance(gauge, FreeScores)
    first = torch.tensor([[2.0, 1], [1, 2], [1, -1], [1, 1]]).unsqueeze(-1)
    weights = {gauge.weight: torch.ones(3, 4, 1), gauge.first: first, gauge.gain: torch.ones(4)}
    changed = [gauge.fix(gauge.weight, weights.__getitem__)]
    for name in gauge.first, gauge.gain:
        lost = weights[name].clone()
        lost[2] = 0
        changed.append(gauge.fix(gauge.weight, {**weights, name: lost}.__getitem__))
    assert [torch.equal(after, weights[gauge.weight]) for after in changed] == [False, True, True]


def test_elements_do_not_differ_over_a_space_that_stands_twice_in_one_product() -> None:
    """A query's heads are the groups of the stream, and so are the halves of each head, which keys have, too."""
    assert gauges("GroupedThroughout")
    spaces = derive(program("GroupedThroughout")).spaces.values()
    assert any(isinstance(s.group, GeneralLinear) for s in spaces)
    assert not any(s.index for s in spaces if isinstance(s.group, GeneralLinear))


@pytest.mark.parametrize(
    ("part", "width", "loses"),
    [("Unbiased", 8, True), ("Unbiased", 4, False), ("UnbiasedSeen", 8, False), ("UnbiasedBent", 8, False)],
)
def test_values_lose_what_outputs_do_not_see_if_nothing_else_does(part: str, width: int, loses: bool) -> None:
    found = gauges(part, head_dim=width, num_key_value_heads=2)
    assert any(isinstance(gauge, ShortenConstant) for gauge in found) == loses


@pytest.mark.slow
@pytest.mark.parametrize("part", biases.PARTS)
def test_canonical_weights_compute_the_same_where_constants_are_seen(part: str) -> None:
    gauges(part.removesuffix("Tower"))


def test_the_gain_of_a_norm_without_bias_is_no_constant() -> None:
    """Its ε is not torch's, so that the bias which it has not is written down before it."""
    config = hf.ModernBertConfig(
        vocab_size=13, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, norm_eps=1e-6,
        pad_token_id=0, architectures=["ModernBertForMaskedLM"],
    )  # fmt: skip
    program = trace(config)
    spec, rng = derive(program), torch.Generator().manual_seed(0)
    assert not [g for g in spec.gauges if isinstance(g, MoveConstant) and g.source.parameter == "head.norm.weight"]
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-9


@pytest.mark.parametrize(
    "part",
    ["Bent", "Beside", "Up", "Shown", "Twice", "ByItself", "Otherwise"],
)
def test_slopes_keep_their_factor_unless_all_that_sees_it_is_linear_in_it(part: str) -> None:
    assert one(CommonScale, f"Sloped{part}") is None


def test_slopes_give_their_factor_to_what_reads_the_units() -> None:
    gauge = one(CommonScale, "Sloped")
    assert isinstance(gauge, CommonScale) and gauge.unit.endswith("beta")
    powers = {part.weight.rsplit("mlp.", 1)[1]: part.power for part in gauge.parts}
    assert powers == {"beta": -1, "above": -1, "below": -1, "down.weight": 1}


@pytest.mark.parametrize(
    ("part", "opens"),
    [("Valve", True), ("ValveHidden", True), ("ValveFilled", False), ("ValveOpen", False), ("ValveBeside", False),
     ("ValveAgain", False), ("ValveNormed", False), ("ValveSeen", False), ("ValveShared", False)],
)  # fmt: skip
def test_a_gate_goes_into_what_writes_through_it_if_all_of_that_does(part: str, opens: bool) -> None:
    gauge = one(CommonScale, part)
    assert (gauge is not None) == opens
    if isinstance(gauge, CommonScale):
        assert {part.weight.rsplit("mlp.", 1)[1] for part in gauge.parts} == {"open", "down.weight", "down.bias"}


@pytest.mark.parametrize(
    ("part", "found"),
    [("Dials", [((0, 1),), ((1, 2),)]), ("DialsCrossed", [None]), ("DialsAdded", []), ("DialsBeside", [])],
)
def test_numbers_of_one_vector_go_one_by_one_if_they_are_read_so(part: str, found: list[Slices | None]) -> None:
    scales = [g for g in gauges(part) if isinstance(g, CommonScale)]
    assert [g.entries for g in scales] == found
    if part == "Dials":
        assert [[p.entries for p in g.parts if p.power > 0] for g in scales] == [[((0, 12),)], [((12, 24),)]]


def test_a_gate_of_either_sign_is_opened_as_far_and_a_closed_one_leaves_nothing() -> None:
    gauge, weights = one(CommonScale, "Valve"), {"tower": torch.eye(2).double()}
    assert isinstance(gauge, CommonScale)
    for value in (-0.3, 0.0):
        names = {name: torch.ones(4, dtype=torch.float64) for name in gauge.targets}
        weights = names | {gauge.unit: torch.tensor([value], dtype=torch.float64)}
        fixed = CanonicalWeights(weights, (gauge,))
        assert fixed[gauge.unit].item() == 1
        (bias,) = (name for name in gauge.targets if name.endswith("bias"))
        assert torch.allclose(torch.tanh(fixed[gauge.unit]) * fixed[bias], torch.tensor(value).double().tanh())


@pytest.mark.parametrize(("part", "shares"), [("Bypass", True), ("BypassSeen", False), ("BypassMixed", False)])
def test_what_passes_by_gives_its_factor_to_the_rows_that_are_beside_it(part: str, shares: bool) -> None:
    gauge = one(CommonScale, part)
    assert (gauge is not None) == shares
    if isinstance(gauge, CommonScale):
        rows = {part.weight.rsplit("mlp.", 1)[1]: part.entries for part in gauge.parts}
        assert rows["up.weight"] == rows["up.bias"] == ((10, 20),)


@pytest.mark.parametrize(
    ("part", "levels"),
    [("Between", True), ("Averaged", True), ("Merged", True), ("Shifted", True), ("Raw", True), ("RawLaid", True),
     ("RawHalves", False), ("RawCrossed", False), ("RawLeaning", False), ("RawEarly", False), ("RawInner", False),
     ("Before", False), ("Leaning", False), ("Uncentred", False), ("Bent", False), ("Beside", False), ("Two", False),
     ("Scaled", False)],
)  # fmt: skip
def test_a_gain_between_two_streams_is_levelled_if_nothing_else_keeps_these_from_turning(
    part: str, levels: bool
) -> None:
    gauge = one(LevelSpectrum, f"Streams{part}")
    assert (gauge is not None) == levels
    if isinstance(gauge, LevelSpectrum):
        assert bool(gauge.readers) == (part in ("Raw", "RawLaid"))
    assert bool(one(ShearAlongMean, f"Streams{part}")) == (part in ("Raw", "RawLaid"))


@pytest.mark.parametrize(
    ("part", "weights"),
    [("Cosine", {"q": 2, "k": 1}), ("CosineByHand", {"q": 2, "k": 1}), ("CosineOfAll", {"q": 1, "k": 1}),
     ("MixedUnit", {"v": 1}), ("UnitUp", {"up": 1}), ("CosineFloored", {}), ("CosineNearly", {}), ("CosineSquared", {}),
     ("CosineSummed", {}), ("CosineBeside", {}), ("CosineAcross", {"q": 1, "k": 1}), ("MixedUnitShown", {}),
     ("UnitUpAgain", {}), ("UnitOfANorm", {"norm": 1}), ("UnitOfANormChosen", {"norm": 1}), ("UnitOfANormSeen", {}),
     ("UnitOfANormShifted", {})],
)  # fmt: skip
def test_what_is_divided_by_its_length_has_one_only_where_nothing_sees_it(part: str, weights: dict[str, int]) -> None:
    """By weight, how many sets of its rows have a length of their own."""
    found = [g for g in gauges(part) if isinstance(g, LevelLength)]
    assert {g.weight.split(".")[-2]: len(g.rows) for g in found} == weights


@pytest.mark.parametrize(
    ("part", "weights"),
    [("Normed", {"up": 0, "down": 0}), ("NormedAtOnce", {"up": None}), ("NormedShown", {"down": 0})],
)
def test_what_is_stored_as_a_direction_has_no_length_where_nothing_sees_it(
    part: str, weights: dict[str, object]
) -> None:
    """By weight, the axis along which its slices are directions."""
    found = [g for g in gauges(part) if isinstance(g, LevelDirection)]
    assert {g.weight.split(".")[3]: g.axis for g in found} == weights


@pytest.mark.parametrize(
    ("part", "has"),
    [("Taps", True), ("TapsShifted", False), ("TapsShown", False), ("TapsPassing", False),
     ("TapsSized", False)],
)  # fmt: skip
def test_a_channel_has_a_factor_only_where_nothing_but_its_kernel_sees_it(part: str, has: bool) -> None:
    gauge = one(LevelKernels, part)
    assert (gauge is not None) == has
    if gauge is not None:
        spec = derive(program(part))
        weights = CanonicalWeights(random_weights(spec, torch.Generator().manual_seed(1)), spec.gauges)
        kernel, written = (weights[name].flatten(1).square().mean(1) for name in gauge.targets)
        assert torch.allclose(kernel, written)


def test_kernels_may_be_zero_or_huge() -> None:
    gauge = LevelKernels("k", (ChannelWriter("w", 1, "b", (2, 0, -1)),))
    for size in (0.0, 1e-200, 1.0, 1e200):
        kernel, weight = size * torch.ones(3, 1, 2).double(), torch.arange(12.0).reshape(3, 4).double()
        fixed = CanonicalWeights({"k": kernel, "w": weight, "b": torch.ones(4).double()}, (gauge,))
        assert fixed["k"].isfinite().all() and torch.equal(fixed["k"][2], kernel[2])
        assert torch.equal(fixed["w"][:, [1, 3]], weight[:, [1, 3]])
        for channel, row in ((0, 2), (1, 0)):
            before, after = kernel[channel, 0, 0] * weight[:, row], fixed["k"][channel, 0, 0] * fixed["w"][:, row]
            assert torch.allclose(before, after, atol=0)
            assert torch.allclose(kernel[channel, 0, 0], fixed["k"][channel, 0, 0] * fixed["b"][row], atol=0)


def test_lengths_may_be_zero_or_huge() -> None:
    gauge = LevelLength("w", 0, "b", (((0, 2),), ((2, 3), (4, 5))))
    for size in (0.0, 1e-9, 1.0, 1e200):
        weight = size * torch.arange(15.0).reshape(5, 3).double()
        fixed = CanonicalWeights({"w": weight, "b": torch.zeros(5).double()}, (gauge,))["w"]
        assert fixed.isfinite().all() and torch.equal(fixed[3], weight[3])
        assert torch.equal(fixed, weight) == (size < 1)
        if size >= 1:
            rows = torch.cat([fixed[[2, 4]], torch.zeros(2, 1)], 1)
            assert torch.allclose(rows.square().mean(), torch.ones(()).double())
            assert torch.allclose(fixed[0] * weight[1] / size, fixed[1] * weight[0] / size)


@pytest.mark.parametrize(
    ("part", "divisor", "subtrahend"),
    [("Centred", True, True), ("CentredUnbiased", True, False), ("CentredBefore", True, False),
     ("CentredTable", True, True), ("CentredTableSeen", True, False), ("CentredTableTwice", True, False),
     ("CentredBent", False, False), ("CentredTwice", False, False), ("CentredHalf", False, False),
     ("CentredAgain", False, False)],
)  # fmt: skip
def test_a_map_takes_up_how_its_inputs_are_scaled_if_nothing_else_sees_it(
    part: str, divisor: bool, subtrahend: bool
) -> None:
    found = gauges(part)
    assert any(isinstance(g, FoldDivisor) for g in found) == divisor
    assert any(isinstance(g, MoveSubtrahend) for g in found) == subtrahend


def test_a_table_takes_up_what_pictures_of_several_sizes_are_centred_by() -> None:
    config = hf.RadioConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, patch_size=2, image_size=8, max_img_size=8,
        patch_dim=12, architectures=["RadioModel"],
    )  # fmt: skip
    joined = join({mode.name: raise_epsilons(call, 0.01) for mode, call in find_modes(build_without_weights(config))})
    assert len(joined.interface) > 1
    spec = derive(joined)
    (moved,) = (gauge for gauge in spec.gauges if isinstance(gauge, MoveSubtrahend))
    assert [table for _, table in moved.reads] == ["embeddings.position_embedding"]
    rng = torch.Generator().manual_seed(0)
    assert soundness(joined, spec, random_weights(spec, rng), random_inputs(joined, rng), rng) < 1e-9


def test_a_model_that_divides_by_zero_is_refused() -> None:
    gauge = FoldDivisor("deviation", (Shown("up", 1, ((0, 2),)),))
    weights = {"deviation": torch.tensor([1.0, 0.0]), "up": torch.ones(3, 2)}
    with pytest.raises(HfAlignError, match="deviation has entries that are exactly zero"):
        CanonicalWeights(weights, (gauge,))["up"]


@pytest.mark.parametrize(
    ("part", "turns"),
    [("Table", True), ("TableOfNeighbours", True), ("TableShifted", False), ("TableSquared", False),
     ("TableUneven", False), ("TableMirrored", False), ("TableBeside", False), ("TableOfUnits", False),
     ("TableShown", False)],
)  # fmt: skip
def test_a_table_turns_back_into_the_queries_and_keys_that_it_turns(part: str, turns: bool) -> None:
    gauge = one(TurnTable, part, num_key_value_heads=1)
    assert (gauge is not None) == turns
    if isinstance(gauge, TurnTable):
        assert {t.weight.split(".")[-2]: len(t.rows) for t in gauge.turned} == {"q": 2, "k": 1}


def test_a_table_of_true_angles_stays_as_it_is() -> None:
    """A position of zero turns by one; and a table of zeros stays, too."""
    angles = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1])).double()
    gauge = one(TurnTable, "Table", num_key_value_heads=1)
    assert isinstance(gauge, TurnTable)
    weights = {name: torch.randn(8, 3).double() for t in gauge.turned for name in (t.weight,)}
    for table in (torch.cat([angles.cos(), angles.sin()], 1), torch.zeros(64, 4).double()):
        fixed = CanonicalWeights(weights | {gauge.table: table}, (gauge,))
        assert all(torch.allclose(fixed[name], w) for name, w in (weights | {gauge.table: table}).items())


@pytest.mark.parametrize(
    ("part", "moves"),
    [("Means", True), ("MeansUnbiased", False), ("MeansTwice", False), ("MeansUncentred", False), ("MeansBent", False),
     ("MeansFactor", False)],
)  # fmt: skip
def test_the_mean_of_a_constant_goes_into_the_bias_of_a_head_that_alone_sees_it(part: str, moves: bool) -> None:
    found = [g for g in gauges(part) if isinstance(g, MoveMean)]
    assert bool(found) == moves
    assert all([t.bias for t in g.taken] == ["head.bias"] for g in found)


def test_a_mean_goes_into_a_bias_that_moves_on_once_more() -> None:
    """Keys have lost their bias by the time that the norm before them adds to it."""
    found = gauges("MeansReused", num_hidden_layers=2)
    assert [g for g in found if isinstance(g, MoveMean) and "layers.1.attn.k.bias" in g.targets]
    weights = random_weights(derive(program("MeansReused", num_hidden_layers=2)), torch.Generator().manual_seed(1))
    once = CanonicalWeights(weights, found)
    assert once["layers.1.attn.k.bias"].abs().max() < 1e-12
    assert is_canonical(once, found)


@pytest.mark.parametrize(
    ("part", "first", "second"),
    [
        ("", ["v"], []),
        ("Uncentred", ["v"], None),
        ("Less", [], []),
        ("Half", [], []),
        ("Turned", [], []),
        ("Bent", None, []),
        ("Shared", None, []),
        ("Kept", ["v"], ["down.bias"]),
        ("KeptTwice", ["v"], []),
        ("Again", ["v"], None),
        ("Doubled", [], []),
        ("Measured", [], []),
    ],
)
def test_readers_without_bias_carry_what_a_norm_before_them_loses(
    part: str, first: list[str] | None, second: list[str] | None
) -> None:
    found = {g.bias.split(".")[-2]: g for g in gauges(f"Carried{part}") if isinstance(g, CarryBias)}
    other = {
        norm: [w.removesuffix(".weight").split(".")[-1] for w, _ in gauge.given]
        + [".".join(t.bias.split(".")[-2:]) for t in gauge.taken or ()]
        for norm, gauge in found.items()
    }
    assert (other.get("first"), other.get("attn_norm")) == (first, second)


@pytest.mark.parametrize("part", ["Carried", "CarriedKept", "CarriedDoubled"])
def test_a_bias_that_readers_carry_stays_where_it_is_put(part: str) -> None:
    spec = derive(program(part))
    once = dict(CanonicalWeights(random_weights(spec, torch.Generator().manual_seed(0)), spec.gauges))
    again = CanonicalWeights(once, spec.gauges)
    assert all(torch.allclose(again[name], once[name], atol=1e-9) for name in once)


def test_a_bias_stays_where_the_mean_is_hardly_along_what_its_readers_do_not_see() -> None:
    gauge = CarryBias("gain", "bias", 0.0, (("w", 1),), None)
    weights = {"gain": torch.tensor([1.0, -1.0]), "bias": torch.tensor([3.0, 4.0]), "w": torch.eye(2)}
    assert all(torch.equal(CanonicalWeights(weights, (gauge,))[name], w) for name, w in weights.items())


@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        ("", {ReadConstant, SeenKeys}),
        ("Fused", {ReadConstant, SeenKeys}),
        ("ProbeSeen", {ReadConstant, SeenKeys}),
        ("TwoProbes", set()),
        ("KeysSeen", {ReadConstant}),
        ("KeysShared", {ReadConstant}),
        ("KeysNormed", {ReadConstant}),
        ("QueriesUneven", {ReadConstant}),
        ("ScoresBent", {ReadConstant}),
        ("QueriesRead", set()),
        ("FusedMeasured", set()),
    ],
)
def test_of_keys_that_meet_one_query_only_what_it_sees_stays(part: str, kinds: set[type[Gauge]]) -> None:
    one(SeenKeys, f"Pooled{part}")
    found = [gauge.gauge if isinstance(gauge, OnParts) else gauge for gauge in gauges(f"Pooled{part}")]
    assert {type(gauge) for gauge in found} & {ReadConstant, SeenKeys} == kinds
    assert all(gauge.exclusive == (part != "ProbeSeen") for gauge in found if isinstance(gauge, ReadConstant))


def test_without_them_what_one_query_never_sees_is_open() -> None:
    part, rng = raise_epsilons(program("PooledFused"), 0.01), torch.Generator().manual_seed(0)
    spec = derive(part)
    fewer = replace(spec, gauges=tuple(g for g in spec.gauges if not isinstance(g, OnParts)))
    assert not len(null_directions(part, spec, rng).open)
    assert len(null_directions(part, fewer, rng).open) > 2 * 12


@pytest.mark.parametrize(("part", "moves"), [("Stored", True), ("StoredBent", False)])
def test_constants_of_a_stream_go_through_norms_that_know_their_statistics(part: str, moves: bool) -> None:
    sources = {g.source.parameter for g in gauges(part) if isinstance(g, MoveConstant)}
    assert "layers.0.attn.o.bias" in sources  # of what bends, it goes into the bias of the norm
    for name in ("layers.0.attn_norm.bias", "layers.0.mlp_norm.bias"):
        assert (name in sources) == moves


@pytest.mark.parametrize(
    ("part", "moves"),
    [("", [(0, 10)]), ("Seen", []), ("Twice", []), ("Rolled", [(0, 10)]), ("Half", [(0, 5)])],
)
def test_a_constant_goes_into_the_bias_of_a_norm_that_knows_its_statistics(
    part: str, moves: list[tuple[int, int]]
) -> None:
    found = [g for g in gauges(f"StoredBehind{part}") if isinstance(g, MoveConstant)]
    assert [e for g in found if g.source.parameter.endswith("up.bias") for e in g.entries] == moves


def test_a_bias_before_a_norm_that_knows_its_statistics_leaves_nothing_open() -> None:
    behind = raise_epsilons(program("StoredBehind"), 0.01)
    assert not len(null_directions(behind, derive(behind), torch.Generator().manual_seed(0)).open)


def test_a_table_that_is_added_gives_its_mean_to_what_moves_on() -> None:
    part = raise_epsilons(program("StoredTable"), 0.01)
    assert not len(null_directions(part, derive(part), torch.Generator().manual_seed(0)).open)
    moves = {g.source.parameter: g.source.stored for g in gauges("StoredTable") if isinstance(g, MoveConstant)}
    assert moves["places"] is Stored.TABLE


def test_outputs_are_followed_only_where_a_norm_may_centre_them(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = list[int]()
    monkeypatch.setattr(row_means, "follow", lambda starts, found: followed.append(1) or iter(()))
    derive(trace(tiny_llama()))
    assert not followed


@pytest.mark.parametrize(
    ("part", "goes"),
    [("Linked", FoldNorm), ("LinkedTurned", FoldNorm), ("LinkedBehind", None), ("LinkedVarying", None),
     ("LinkedShifted", None), ("LinkedTwice", None), ("LinkedShown", None), ("LinkedMeasured", None),
     ("LinkedNormed", LinkedGain), ("LinkedNormedShown", None), ("LinkedNormedBeside", None)],
)  # fmt: skip
def test_a_scale_behind_a_link_goes_where_nothing_tells_it_from_a_weight(part: str, goes: type[Gauge] | None) -> None:
    one(LinkedGain, part)
    found = [type(gauge) for gauge in gauges(part) if any(name.endswith("attn.scale") for name in gauge.targets)]
    assert found == ([goes] if goes else [])


@pytest.mark.parametrize(
    ("part", "goes"),
    [("Weighed", True), ("WeighedBeside", False), ("WeighedShifted", False), ("WeighedAgain", False),
     ("WeighedRead", False)],
)  # fmt: skip
def test_a_gain_goes_into_all_that_writes_what_it_multiplies(part: str, goes: bool) -> None:
    found = [gauge for gauge in gauges(part) if any(name.endswith("mlp.weight") for name in gauge.targets)]
    assert [type(gauge) for gauge in found] == ([FoldNorm] if goes else [])


@pytest.mark.parametrize(("part", "goes"), [("Merged", True), ("MergedBent", False), ("MergedBeside", False)])
def test_a_gain_that_blocks_share_goes_into_what_reads_all_of_them(part: str, goes: bool) -> None:
    found = [gauge for gauge in gauges(part) if any(name.endswith("mlp.norm.weight") for name in gauge.targets)]
    assert any(isinstance(gauge, FoldNorm) for gauge in found) == goes


@pytest.mark.parametrize("part", ["Linked", "LinkedNormed", "Weighed"])
def test_scales_about_free_weights_leave_nothing_open(part: str) -> None:
    raised, rng = raise_epsilons(program(part), 0.01), torch.Generator().manual_seed(0)
    assert not len(null_directions(raised, derive(raised), rng).open)


@pytest.mark.parametrize(
    ("part", "folds"),
    [("Convolved", True), ("ConvolvedUnbiased", True), ("ConvolvedInside", True), ("ConvolvedBent", False),
     ("ConvolvedBeside", False), ("ConvolvedMasked", False), ("ConvolvedRolled", False), ("ConvolvedAcross", False)],
)  # fmt: skip
def test_a_norm_goes_whole_into_a_convolution_that_alone_reads_its_channels_in_order(part: str, folds: bool) -> None:
    read = {r.weight for g in gauges(part) if isinstance(g, FoldNorm) and g.exclusive and g.centred for r in g.reads}
    assert ("layers.0.mlp.places.weight" in {name.removeprefix("model.") for name in read}) is folds


@pytest.mark.parametrize(
    ("part", "lies"),
    [("Abreast", (2, 1)), ("AbreastBiased", (2, 1)), ("AbreastInterleaved", (1, 2)), ("AbreastTwice", (2, 1)),
     ("AbreastMixed", None), ("AbreastRolled", None), ("AbreastPadded", None), ("AbreastBothWays", None),
     ("AbreastSeen", None)],
)  # fmt: skip
def test_a_norm_goes_whole_into_what_alone_reads_several_of_its_vectors_in_order(
    part: str, lies: tuple[int, int] | None
) -> None:
    folds = [g for g in gauges(part) if isinstance(g, FoldNorm) and g.centred and g.exclusive]
    assert [(r.before, r.behind) for g in folds for r in g.reads] == ([lies] if lies else [])


@pytest.mark.parametrize(
    ("entries", "lies"),
    [([0, 1, 2, 3, 4, 5], (2, 1)), ([3, 4, 5, 0, 1, 2], (2, 1)), ([0, 3, 1, 4, 2, 5], (1, 2)), ([0, 1, 2], (1, 1)),
     ([0, 4, 5, 3, 1, 2], None), ([0, 1, 2, 3, 4, 2], None), ([1, 2, 0, 4, 5, 3], None), ([0, 1, 2, -3, -2, -1], None),
     ([0, 1], None), ([0, 0, 0, 0, 0, 0], None)],
)  # fmt: skip
def test_only_whole_vectors_are_read_together(entries: list[int], lies: tuple[int, int] | None) -> None:
    axes = [SimpleNamespace(size=4), SimpleNamespace(size=len(entries))]
    found = cast("Interpretation", SimpleNamespace(weights={"w": SimpleNamespace(axes=axes)}))
    reading = reading_of_all(LinearUse(Mock(), Mock(), "w", 1, None), torch.tensor([entries, entries]), 3, found)
    assert (reading and (reading.before, reading.behind)) == lies


@pytest.mark.parametrize("part", ["Abreast", "AbreastInterleaved", "AbreastBiased"])
def test_what_reads_several_vectors_at_once_leaves_nothing_open(part: str) -> None:
    raised, rng = raise_epsilons(program(part), 0.01), torch.Generator().manual_seed(0)
    assert not len(null_directions(raised, derive(raised), rng).open)


@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        ("Means", {ShearStream}),
        ("MeansUnbiased", {ShearStream}),
        ("MeansNarrow", {ShearStream, ShortenWriter}),
        ("MeansWide", {ShearStream}),
        ("MeansBeside", {ShearStream}),
        ("MeansGained", {ShearStream}),
        ("MeansGainedCopies", {ShearStream}),
        ("MeansGainedViews", {ShearStream}),
        ("MeansPadded", {ShearStream}),
        ("MeansCopied", {ShearStream}),
        ("MeansGainedTwice", set()),
        ("MeansBentBefore", set()),
        ("MeansScaledBefore", set()),
        ("MeansDoubled", set()),
        ("MeansTwice", set()),
        ("MeansJoined", set()),
        ("MeansShifted", set()),
        ("MeansUncentred", set()),
        ("MeansBent", set()),
        ("MeansFactor", set()),
        ("MeansWritten", set()),
    ],
)
def test_a_stream_turns_its_mean_for_a_head_that_alone_sees_it(part: str, kinds: set[type[Gauge]]) -> None:
    found = [gauge for gauge in gauges(part) if isinstance(gauge, (ShearStream, ShortenWriter))]
    assert {type(gauge) for gauge in found} == kinds
    for gauge in found:
        one(type(gauge), part)
        if isinstance(gauge, ShortenWriter):
            assert {name for name, _ in gauge.written} == {"layers.0.mlp.down.weight", "layers.0.mlp.down.bias"}


def test_what_the_one_reader_of_a_map_loses_leaves_it() -> None:
    (shortened,) = (gauge for gauge in gauges("MeansPressed") if isinstance(gauge, ShortenWriter))
    assert dict(shortened.written) == {"head.first.weight": 0, "head.first.bias": 0}
    raised, rng = raise_epsilons(program("MeansPressed"), 0.01), torch.Generator().manual_seed(0)
    spec = derive(raised)
    assert not len(null_directions(raised, spec, rng).open)
    weights = random_weights(spec, rng)
    match = matched(spec, weights, transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng)))
    assert match.after and match.before and match.after / match.before < 1e-4


@pytest.mark.parametrize("part", ["MeansMixed", "MeansSkewed"])
def test_what_a_map_loses_of_several_tokens_stays(part: str) -> None:
    assert not any(isinstance(gauge, ShortenWriter) for gauge in gauges(part))


@pytest.mark.parametrize("depths", [[1, 1], [1, 2]], ids=["windows", "windows that are shifted"])
def test_a_stream_turns_its_mean_in_calls_of_several_sizes(depths: list[int]) -> None:
    config = hf.DonutSwinConfig(
        image_size=8, patch_size=2, embed_dim=6, depths=depths, num_heads=[2, 2], window_size=2, mlp_ratio=1.5,
        num_labels=9, architectures=["DonutSwinForImageClassification"],
    )  # fmt: skip
    calls = {mode.name: raise_epsilons(call, 0.01) for mode, call in find_modes(build_without_weights(config))}
    joined = join(calls)
    assert len(joined.interface) > 1
    found = [gauge for gauge in derive(joined).gauges if isinstance(gauge, (ShearStream, ShortenWriter))]
    assert {type(gauge) for gauge in found} == {ShearStream, ShortenWriter}


def test_what_an_unread_weight_may_see_stays_as_it_is() -> None:
    """An unseen call may add a weight to a stream, or read its mean; of a gauge that says nothing, all may be seen."""

    class Silent(Gauge):
        targets = ("layers.0.mlp.up.weight",)

        def fix(self, name: str, get: Get) -> torch.Tensor:
            return get(name)

    spec = derive(program("MeansNarrow"))
    (sheared,) = (gauge for gauge in spec.gauges if isinstance(gauge, ShearStream))
    weight, axis = sheared.writers[0]
    width, (name,) = spec.shape(weight)[axis], Silent.targets
    spec = replace(spec, gauges=(*spec.gauges, Silent()))
    for size, gone in ((width, ShearStream), (spec.shape(name)[0], Silent)):
        unread = next(n for n in spec.parameters if spec.shape(n) == (size,))
        assert not any(isinstance(gauge, gone) for gauge in without_unseen(replace(spec, unread=(unread,))).gauges)
    assert without_unseen(spec).gauges == spec.gauges


def test_parts_without_entries_carry_nothing() -> None:
    """Of DINOv3's tokens, none are registers here."""
    config = hf.DINOv3ViTConfig(
        hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
        num_register_tokens=0, architectures=["DINOv3ViTModel"],
    )  # fmt: skip
    assert derive(trace(config)).gauges


def test_a_total_of_a_masked_value_that_nothing_divides() -> None:
    """Its square, in the loss of ViTMAE: a masked mean is looked for there, and is none."""
    config = hf.ViTMAEConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=10, decoder_hidden_size=8,
        decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=6, image_size=8,
        patch_size=2, num_channels=1, architectures=["ViTMAEForPreTraining"],
    )  # fmt: skip
    assert derive(trace(config)).gauges
