"""Every derived symmetry is exact, and none is missing: the counts are those worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from torch import Tensor, fx, nn

from hf_align.symmetry.certificate.certify import Certificate, certify
from hf_align.symmetry.certificate.draws import draws
from hf_align.symmetry.certificate.null_directions import null_directions
from hf_align.symmetry.certificate.null_space import missing_directions
from hf_align.symmetry.certificate.random_copy import raise_epsilons, with_eps, with_room, with_tokens
from hf_align.symmetry.certificate.tangents import _steps, tangents
from hf_align.symmetry.derivation import derive
from hf_align.symmetry.gauges import constants
from hf_align.symmetry.gauges.softmax_shift import reaches_softmax
from hf_align.symmetry.groups import GeneralLinear, Orthogonal, Scaling
from hf_align.symmetry.interpreter.call import RULES, Call, Rule
from hf_align.symmetry.interpreter.values import Value
from hf_align.tracing.trace import trace

CASES = {
    "llama, one layer": (tiny_llama(), 78),
    "llama, two layers": (tiny_llama(num_hidden_layers=2), 120),
    "llama, tied": (tiny_llama(tie_word_embeddings=True), 42),
    "llama, grouped queries": (tiny_llama(num_attention_heads=4, num_key_value_heads=2), 98),
    "llama, attention bias": (tiny_llama(attention_bias=True), None),
    "gpt2, one layer": (tiny_gpt2(), 223),
    "gpt2, two layers": (tiny_gpt2(n_layer=2), 381),
    "gpt2, tied, one layer": (tiny_gpt2(tie_word_embeddings=True), 168),
    "gpt2, tied, two layers": (tiny_gpt2(tie_word_embeddings=True, n_layer=2), 326),
    "bert, masked": (tiny_bert(), 193),
    "bert, tokens": (tiny_bert(architectures=["BertForTokenClassification"], num_labels=9), None),
    "vit": (tiny_vit(), 387),
}


def holds(certificate: Certificate) -> bool:
    return certificate.sound and certificate.complete and certificate.leak < 1e-9 and not certificate.unknown_ops


@pytest.mark.parametrize("case", CASES)
def test_sound_and_complete(case: str) -> None:
    """In all modes together, and in the first call alone, whose nullity was counted by hand."""
    config, nullity = CASES[case]
    for certificate in (certify(config), alone := certify(config, traced=trace(with_eps(config, 1e-2), length=10))):
        assert certificate.max_error < 1e-9
        assert (certificate.found, certificate.missing) == (certificate.nullity, {})
        assert holds(certificate)
    if nullity is not None:
        assert alone.nullity == nullity


def _silu_as_if_linear(call: Call) -> Value:
    return Value(call.value(call.argument(0)).axes)


@pytest.mark.parametrize(
    ("op", "weakened"),
    [
        ("silu", _silu_as_if_linear),
        ("gelu", _silu_as_if_linear),
        pytest.param("layer_norm", _silu_as_if_linear, marks=pytest.mark.slow),
    ],
)
def test_a_weakened_rule_is_caught(op: str, weakened: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    certify(tiny_llama())  # fills the table
    monkeypatch.setitem(RULES, op, weakened)
    config = {"silu": tiny_llama(), "layer_norm": tiny_gpt2(), "gelu": tiny_bert()}[op]
    assert not holds(certify(config))


@pytest.mark.quick
def test_a_removed_rule_pins_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    certify(tiny_llama())
    monkeypatch.setattr("hf_align.symmetry.certificate.draws._DRAWS", 1)  # the whole llama is complete at the first
    monkeypatch.delitem(RULES, "mean")
    certificate = certify(tiny_llama(), traced=trace(with_eps(tiny_llama(), 1e-2), length=10))
    assert certificate.unknown_ops == ("mean",)
    assert certificate.sound
    assert not certificate.complete
    assert "model.embed_tokens.weight" in certificate.missing


def test_a_pinned_gate_leaves_only_the_scale_of_what_it_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "silu")
    spec = derive.derive(trace(tiny_llama()))
    ((factor,),) = spec.parameters["model.layers.0.mlp.down_proj.weight"][1:][0]
    assert isinstance(spec.spaces[str(factor.space)].group, Scaling)
    assert certify(tiny_llama()).sound


def test_an_unfolded_gain_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive, "find_gauges", lambda *_: ())
    assert not certify(tiny_llama()).sound


def test_a_value_bias_taken_for_a_key_bias_is_unsound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_is_lost", lambda use, program: constants._is_right_factor(use.value, use.user))
    monkeypatch.setattr(constants, "sums_to_one", lambda left, program: False)
    assert not certify(tiny_gpt2()).sound


def test_what_a_model_returns_is_not_lost_in_a_softmax() -> None:
    graph = fx.Graph()
    scores = graph.placeholder("scores")
    shifted = graph.call_function(torch.ops.aten.add.Tensor, (scores, 1.0))
    scores.meta["val"] = shifted.meta["val"] = torch.zeros(2, 3)
    graph.output((shifted,))
    program = replace(trace(tiny_llama()), graph=graph)
    assert not reaches_softmax(scores, program)


@pytest.mark.parametrize(("shape", "lost"), [((2, 3, 2, 2), True), ((2, 3, 4, 1), True), ((2, 6, 2), False)])
def test_scores_laid_out_as_a_grid_reach_a_softmax(shape: tuple[int, ...], lost: bool) -> None:
    """Relative positions may be added to rows and columns of keys apart; not so where keys of two queries are mixed."""
    graph = fx.Graph()
    scores = graph.placeholder("scores")
    grid = graph.call_function(torch.ops.aten.view.default, (scores, list(shape)))
    added = graph.call_function(torch.ops.aten.add.Tensor, (grid, grid))
    back = graph.call_function(torch.ops.aten.view.default, (added, [2, 3, 4]))
    seen = back if lost else added
    result = graph.call_function(torch.ops.aten.softmax.int, (seen, -1))
    scores.meta["val"] = back.meta["val"] = torch.zeros(2, 3, 4)
    grid.meta["val"] = added.meta["val"] = torch.zeros(shape)
    result.meta["val"] = torch.zeros_like(seen.meta["val"])
    graph.output((result,))
    program = replace(trace(tiny_llama()), graph=graph)
    assert reaches_softmax(scores, program) is lost


def test_all_vocabularies_of_one_size_grow_together() -> None:
    """What is generated for one language is looked up in the table of the other."""
    config = transformers.FSMTConfig(src_vocab_size=16, tgt_vocab_size=16, langs=["de", "en"])
    larger = with_tokens(config, 48)
    assert larger is not None
    assert (larger.src_vocab_size, larger.tgt_vocab_size, larger.vocab_size) == (48, 48, 48)
    assert with_tokens(larger, 48) is None


def test_tables_of_each_layer_grow_with_the_vocabulary() -> None:
    larger = with_tokens(transformers.Gemma4TextConfig(vocab_size=16, vocab_size_per_layer_input=16), 48)
    assert larger is not None and (larger.vocab_size, larger.vocab_size_per_layer_input) == (48, 48)


def test_small_pictures_grow_and_so_do_last_stages_of_one_layer() -> None:
    larger = with_room(transformers.PvtV2Config(image_size=[8, 8], depths=[1, 1, 1, 1]))
    assert larger is not None and (larger.image_size, larger.depths) == ([16, 16], [1, 1, 1, 2])
    assert with_room(transformers.PvtV2Config(image_size=[64, 64], depths=[1, 1, 1, 2])) is None
    assert with_room(tiny_llama()) is None


def test_what_has_no_room_to_grow_is_counted_as_it_is() -> None:
    def derived(larger: object) -> tuple[object, object]:
        raise RuntimeError("these sizes do not go together")

    program = trace(tiny_vit(image_size=4))
    drawn = [*draws(tiny_vit(image_size=4), (program, derive.derive(program)), derived)]  # type: ignore[arg-type]
    assert all(draw.program is program for draw in drawn)


@pytest.mark.slow
def test_a_query_that_no_input_changes_is_not_the_model_s_own() -> None:
    """With one layer in the last stage the class token is a weight behind a norm; the model has two."""
    sizes = dict(hidden_sizes=[8, 8], num_attention_heads=[2, 2], sequence_reduction_ratios=[1, 1], mlp_ratios=[1, 1])
    config = transformers.PvtConfig(image_size=32, num_encoder_blocks=2, depths=[1, 1], patch_sizes=[4, 2],
                                    strides=[3, 2], num_labels=9, **sizes,
                                    architectures=["PvtForImageClassification"])  # fmt: skip
    for depths, query in ([1, 1], True), ([1, 2], False):
        config.depths = depths
        program = trace(with_eps(config, 1e-2))
        found = null_directions(program, derive.derive(program), torch.Generator().manual_seed(0)).by_parameter()
        assert any(".self.query.weight" in name and mass > 1 for name, mass in found.items()) is query


def test_an_epsilon_that_is_an_op_s_default_is_raised_like_others() -> None:
    """BART's norms have PyTorch's epsilon, not the config's: next to it, the scale of a stream has hardly an effect."""
    config = transformers.BartConfig(
        vocab_size=23, d_model=8, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=6,
        max_position_embeddings=16, is_decoder=True, is_encoder_decoder=False, architectures=["BartForCausalLM"],
    )  # fmt: skip
    least = []
    for raised in True, False:
        program = trace(with_eps(config, 1e-2))
        program = raise_epsilons(program, 1e-2) if raised else program
        found = null_directions(program, derive.derive(program), torch.Generator().manual_seed(0))
        assert not len(found.open)
        effects = torch.linalg.svdvals(found.derivatives)
        rank = found.derivatives.shape[1] - found.nullity
        least.append(float(effects[rank - 1] / effects[0]))
    assert least[0] > 100 * least[1]


@pytest.mark.parametrize("index", [(), (3,)])
def test_a_group_larger_than_what_it_acts_on_moves_it_in_all_directions(index: tuple[int, ...]) -> None:
    weight = torch.randn(*index, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few = _steps(GeneralLinear(6), index, weight.numel())
    assert len(few) == weight.numel()
    assert torch.linalg.matrix_rank((few @ weight).flatten(1)) == weight.numel()


def test_weights_without_entries_move_in_no_direction() -> None:
    spec = derive.derive(trace(tiny_llama()))
    assert len(tangents(spec, {name: torch.zeros(0) for name in spec.parameters})) == 0


@pytest.mark.parametrize("index", [(), (3,), (2, 2)])
def test_a_basis_of_tangents_stands_at_every_index(index: tuple[int, ...]) -> None:
    group, places = Orthogonal(4), math.prod(index)
    steps = _steps(group, index, 1000)
    assert torch.linalg.matrix_rank(steps.flatten(1)) == len(steps) == group.dimension * places
    assert torch.equal((steps != 0).flatten(-2).any(-1).reshape(len(steps), -1).sum(1), torch.ones(len(steps)).long())


@pytest.mark.parametrize("known", [2, 5])
def test_a_small_derivative_is_not_taken_for_none(known: int) -> None:
    """Where nothing is missing, the widest gap is that above the known directions, however small the rest is."""
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(60, 60, generator=rng, dtype=torch.float64))[0].T
    sizes = torch.cat([torch.ones(50), torch.tensor([1e-3, 1e-5, 2e-8, 1e-8, 5e-11]), torch.zeros(5)]).double()
    jacobian = torch.linalg.qr(torch.randn(80, 60, generator=rng, dtype=torch.float64))[0] @ (sizes[:, None] * basis)
    assert len(missing_directions(jacobian, basis[60 - known :])) == 5 - known


@pytest.mark.parametrize("small", [3, 24, 40, 80])
def test_small_derivatives_are_not_taken_for_none_where_there_are_many(small: int) -> None:
    """Of so many, a block that holds what is none holds no large one: the gap above it is not the one above zero."""
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(300, 300, generator=rng, dtype=torch.float64))[0].T
    sizes = torch.cat([torch.ones(286 - small), torch.logspace(-5, -9, small), torch.zeros(14)]).double()
    jacobian = torch.linalg.qr(torch.randn(320, 300, generator=rng, dtype=torch.float64))[0] @ (sizes[:, None] * basis)
    found = missing_directions(jacobian, basis[300:])
    assert len(found) == 14 and float((found @ basis[286:].T).norm()) == pytest.approx(14**0.5)


@pytest.mark.parametrize("known", [0, 3, 5, 60])
@pytest.mark.parametrize("rows", [30, 200])
def test_missing_directions_are_the_rest_of_the_null_space(known: int, rows: int) -> None:
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(100, 100, generator=rng, dtype=torch.float64))[0].T
    null = basis[: max(60, 100 - rows)]
    jacobian = torch.randn(rows, 100 - len(null), generator=rng, dtype=torch.float64) @ basis[len(null) :]
    found = missing_directions(jacobian, null[:known])
    assert len(found) == len(null) - known
    assert torch.allclose(found @ found.T, torch.eye(len(found)).double())
    assert float((found @ null[:known].T).norm()) < 1e-9 and float((jacobian @ found.T).norm()) < 1e-9


class DetachedEmbedding(nn.Embedding):
    """A table that is not trained through."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).detach()


class DetachedConfig(transformers.LlamaConfig):
    model_type = "detached_llama"


class DetachedLlama(transformers.LlamaForCausalLM):
    config_class = DetachedConfig

    def __init__(self, config: DetachedConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens = DetachedEmbedding(config.vocab_size, config.hidden_size)


transformers.AutoModelForCausalLM.register(DetachedConfig, DetachedLlama)


def test_weights_whose_gradient_is_stopped_are_counted() -> None:
    config = DetachedConfig(**{**tiny_llama().to_dict(), "architectures": ["DetachedLlama"]})
    certificate = certify(config)
    assert holds(certificate)
    assert certificate.nullity == CASES["llama, one layer"][1]
