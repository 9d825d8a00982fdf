"""What is derived of an architecture holds in all the ways in which it is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf
from conftest import small, tiny_bert, tiny_gpt2, tiny_llama, tiny_t5, tiny_vit
from torch import Generator, Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from traps import test_modes as families

from hf_align.errors import IncompatibleModels
from hf_align.symmetry.certificate.certify import certify
from hf_align.symmetry.certificate.random_copy import random_elements, random_inputs, random_weights, transform
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.derivation.unseen import without_unseen
from hf_align.symmetry.explain import explain
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.groups import OrthogonalFixingOnes, Permutation
from hf_align.symmetry.groups.dense import Orthogonal
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing import modes
from hf_align.tracing.alike import _equal_columns, _is_block
from hf_align.tracing.branches.explore import Conditions
from hf_align.tracing.branches.rewritten import Place
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.mode import Mode, at_length
from hf_align.tracing.modes import trace_modes
from hf_align.tracing.small.shrink import shrink
from hf_align.tracing.thresholds import _affordable, _by_memory
from hf_align.tracing.trace import trace


class Config(PretrainedConfig):
    model_type = "moody"

    def __init__(self, layers: int = 6, kind: str = "length", **rest: object) -> None:
        super().__init__(**rest)
        self.layers, self.kind = layers, kind


class Layer(nn.Module):
    def __init__(self, number: int, kind: str) -> None:
        super().__init__()
        self.number, self.kind = number, kind
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        if self.kind == "layer" and self.number in (2, 3):
            hidden = hidden + torch.arange(6.0)
        return x + self.down(hidden)


TOGETHER = ("two arguments", "an argument and an odd length", "an argument and few", "an argument and many",
            "odd and many")  # fmt: skip
"""What does nothing apart."""


class Note:
    """What nobody can guess."""

    def mixed(self, x: Tensor, side: nn.Module) -> Tensor:
        mixed: Tensor = side(x.flip(-1))
        return mixed


class Moody(PreTrainedModel):
    """Looks at the order of its hidden units only now and then."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.side = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(i, config.kind) for i in range(config.layers))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        hint: Tensor | None = None,
        loud: bool = False,
        past_key_values: list[Tensor] | None = None,
        use_cache: bool = False,
        note: Note | None = None,
    ) -> dict[str, object]:
        x, kind = self.embed(input_ids), self.config.kind
        if past_key_values is not None and kind == "cache":
            x = x + past_key_values[0][:, -1:].flip(-1)
        for layer in self.layers:
            if kind == "loop" and layer.number == 4:
                x = x * torch.arange(8.0)
            x = layer(x)
        if (kind == "length" and x.shape[1] > 16) or (kind == "parity" and x.shape[1] % 2 == 0):
            x = x.flip(-1)
        length, odd, given = x.shape[1], x.shape[1] % 2 == 1, hint is not None
        if kind in TOGETHER:
            flips = given and loud, given and odd, given and length < 5, given and length > 16, odd and length > 16
            x = self.side(x).flip(-1) if flips[TOGETHER.index(kind)] else self.side(x)
        if kind in ("late", "late in a third text"):
            x = self.side(x * (1 + torch.arange(length))[:, None])
        if kind == "late in a third text":
            x = x + (torch.arange(len(x)) > 1)[:, None, None] * torch.arange(8.0)
        if kind == "place":
            x = x.flip(2 if loud else 1)
        if (kind == "argument" and hint is not None) or (kind == "flag" and loud):
            x = self.side(x.flip(-1))
        if note is not None:
            x = note.mixed(x, self.side)
        if kind == "exporting" and not torch.compiler.is_exporting():
            x = x.flip(-1)
        if kind == "question":
            try:
                x = x.flip(-1) * float(x.sum() < 1e9)
            except Exception:
                x = x * 1.0
        kept = {"past_key_values": [x]} if use_cache else {}
        return {"logits": self.head(x), **kept}


hf.AutoConfig.register("moody", Config)
hf.AutoModel.register(Config, Moody)


class CutConfig(PretrainedConfig):
    model_type = "cut"


class Cut(PreTrainedModel):
    """Its tables have sixteen places, and are cut to the length of the text."""

    config_class = CutConfig

    def __init__(self, config: CutConfig) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.places, self.mix = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16, 16))
        self.post_init()

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        x = self.embed(input_ids) + self.places[:length]
        return {"logits": self.head(x + self.mix[:length, :length] @ x)}


hf.AutoConfig.register("cut", CutConfig)
hf.AutoModel.register(CutConfig, Cut)


class HearingConfig(PretrainedConfig):
    model_type = "hearing"

    def __init__(self, audio_token_id: int = 10, num_mel_bins: int = 6, **rest: object) -> None:
        super().__init__(**rest)
        self.audio_token_id, self.num_mel_bins = audio_token_id, num_mel_bins


class Hearing(PreTrainedModel):
    """What it hears stands in a text, where a mask of truth values does not hide it."""

    config_class = HearingConfig

    def __init__(self, config: HearingConfig) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.tower = nn.Linear(config.num_mel_bins, 8)
        self.post_init()

    def get_audio_features(self, input_features: Tensor, input_features_mask: Tensor | None) -> Tensor:
        assert input_features_mask is not None
        return torch.where(input_features_mask[..., None], self.tower(input_features), 0)

    def forward(
        self, input_ids: Tensor, input_features: Tensor | None = None, input_features_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        if input_features is not None:
            heard = self.get_audio_features(input_features, input_features_mask)
            x = x.masked_scatter((input_ids == self.config.audio_token_id)[..., None], heard)
        return {"logits": self.head(x)}


hf.AutoConfig.register("hearing", HearingConfig)
hf.AutoModel.register(HearingConfig, Hearing)


def in_all_modes(config: PretrainedConfig) -> SymmetrySpec:
    model = build_without_weights(config)
    return without_unseen(derive(trace_modes(model)), model=model)


def group(spec: SymmetrySpec, parameter: str, axis: int) -> object:
    (factor,) = spec.parameters[parameter][axis][0]
    return None if factor.space is None else spec.spaces[factor.space].group


def moved(config: Config, spec: SymmetrySpec) -> tuple[Moody, Moody]:
    """A model, and the same moved by a random element of every group, in float64."""
    rng = Generator().manual_seed(0)
    weights = random_weights(spec, rng)
    canonical = CanonicalWeights(weights, spec.gauges)
    models = Moody(config).double().eval(), Moody(config).double().eval()
    models[0].load_state_dict(weights)
    models[1].load_state_dict(transform(spec, canonical, random_elements(spec, rng)))
    return models


def test_gauges_that_count_on_one_that_is_left_out_are_left_out_too() -> None:
    """The readers of a norm lose what they never see of it; where its bias stays, what they lose is a constant."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 6}
    config = hf.VisualBertConfig(**sizes, vocab_size=23, visual_embedding_dim=8, architectures=["VisualBertModel"])
    program = trace(config)
    spec = derive(program)
    left = without_unseen(spec)
    assert left.unread and len(left.gauges) < len(spec.gauges)
    rng = Generator().manual_seed(0)
    assert soundness(program, left, random_weights(left, rng), random_inputs(program, rng), rng) < 1e-9


@pytest.mark.parametrize(
    "kind",
    ["length", "parity", "cache", "flag", "layer", "loop", "exporting", "argument", "place", *TOGETHER],
)
def test_a_model_that_is_moved_answers_as_before_however_it_is_called(kind: str) -> None:
    config = Config(kind=kind, architectures=["Moody"])
    before, after = moved(config, derive_by_depth(config))
    ids = torch.arange(24)[None] % 11
    with torch.no_grad():
        for length in (1, 4, 7, 17, 24):
            hint = {"hint": torch.ones(1, length, dtype=torch.long)}
            for more in ({}, {"loud": True}, hint, {"loud": True, **hint}):
                answers = [m(ids[:, :length], **more)["logits"] for m in (before, after)]
                torch.testing.assert_close(*answers, rtol=1e-9, atol=1e-9)
        caches = [m(ids[:, :5], use_cache=True)["past_key_values"] for m in (before, after)]
        answers = [m(ids[:, 5:6], past_key_values=c)["logits"] for m, c in zip((before, after), caches, strict=True)]
        torch.testing.assert_close(*answers, rtol=1e-9, atol=1e-9)


def test_a_question_that_is_swallowed_is_no_answer() -> None:
    """Without values the model would go another way than it goes when it runs."""
    with pytest.raises(IncompatibleModels, match="cannot be traced"):
        derive_by_depth(Config(kind="question", architectures=["Moody"]))


def test_what_no_call_reads_stands_still_and_so_does_what_it_may_meet() -> None:
    """`side` is read only where an object is given that nobody can guess."""
    config = Config(kind="nothing", architectures=["Moody"])
    spec = derive_by_depth(config)
    assert set(spec.unread) == {"side.weight", "side.bias"}
    assert group(spec, "side.weight", 0) is None
    assert group(spec, "layers.0.up.weight", 1) is None
    assert group(spec, "layers.0.up.weight", 0) is not None
    (why,) = explain(spec, "side.weight")["pinned"]["axis 0"]
    assert why == "unread: no traced call reads it"
    before, after = moved(config, spec)
    ids = torch.arange(7)[None]
    answers = [m(ids, note=Note())["logits"] for m in (before, after)]
    torch.testing.assert_close(*answers, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [10, 11, 16])
def test_places_that_no_traced_call_reaches_stand_still(length: int) -> None:
    config = CutConfig(architectures=["Cut"])
    spec = derive(trace(config, length=10))
    assert group(spec, "places", 1) is not None
    longer, rng = trace(config, length=length), Generator().manual_seed(0)
    assert soundness(longer, spec, random_weights(spec, rng), random_inputs(longer, rng), rng) < 1e-9


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (lambda: tiny_llama(), "a step with a cache"),
        (lambda: tiny_llama(), "input_ids with attention_mask"),
        (lambda: tiny_llama(), "input_ids with position_ids"),
        (lambda: tiny_bert(), "input_ids with token_type_ids"),
        (lambda: tiny_gpt2(add_cross_attention=True), "input_ids with encoder_hidden_states"),
        (lambda: small("llava", "LlavaForConditionalGeneration"), "input_ids with image"),
        pytest.param(lambda: small("minimax", "MiniMaxForCausalLM"), "a step with a cache", marks=pytest.mark.slow),
        pytest.param(lambda: small("t5", "T5ForConditionalGeneration"), "a step with a cache", marks=pytest.mark.slow),
        pytest.param(
            lambda: small("t5gemma2", "T5Gemma2ForConditionalGeneration"),
            "input_ids with image",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: small("xlnet", "XLNetLMHeadModel"), "input_ids with perm_mask", marks=pytest.mark.slow),
    ],
)
def test_modes_are_found_and_the_spec_is_sound_in_all_of_them(config: object, mode: str) -> None:
    assert callable(config)
    program = trace_modes(build_without_weights(config()))
    assert mode in program.modes
    spec, rng = derive(program), Generator().manual_seed(0)
    assert not spec.unread
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-9


@pytest.mark.parametrize(
    ("config", "architecture", "mode"),
    [
        (families.idefics3(), "Idefics3ForConditionalGeneration", "input_ids with image"),
        (families.qwen2_vl(), "Qwen2VLForConditionalGeneration", "input_ids with video"),
        (families.mllama(), "MllamaForConditionalGeneration", "input_ids with image"),
        (families.qwen2_audio(), "Qwen2AudioForConditionalGeneration", "input_ids with audio"),
        pytest.param(
            families.longformer(),
            "LongformerForMaskedLM",
            "input_ids with global_attention_mask",
            marks=pytest.mark.slow,
        ),
        pytest.param(families.molmo2(), "Molmo2Model", "input_ids with video", marks=pytest.mark.slow),
        (families.fun_asr(), "FunAsrNanoForConditionalGeneration", "input_ids with audio"),
        (families.trocr(), "TrOCRForCausalLM", "input_ids with encoder_hidden_states"),
        (families.wav2vec2(), "Wav2Vec2ForCTC", "input_values with mask_time_indices of wav2vec2"),
        (families.xlm(), "XLMWithLMHeadModel", "input_ids with langs"),
        (families.visual_bert(), "VisualBertModel", "input_ids with visual_embeds"),
        (families.fuyu(), "FuyuForCausalLM", "input_ids with image"),
        (families.pocket_tts(), "PocketTTSModel", "input_ids with audio_prompt"),
        (HearingConfig(), "Hearing", "input_ids with audio"),
        pytest.param(
            families.higgs_audio(),
            "HiggsAudioV2ForConditionalGeneration",
            "input_ids with audio",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_call_lacks_is_read_off_its_error_and_the_documentation(
    config: PretrainedConfig, architecture: str, mode: str
) -> None:
    """No weight is left that no call reads, so that all of them move."""
    config.architectures = [architecture]
    program = trace_modes(build_without_weights(config))
    assert mode in program.modes
    spec, rng = derive(program), Generator().manual_seed(0)
    assert not spec.unread and not spec.unknown_ops
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-9


@pytest.mark.slow
def test_heads_move_where_some_words_are_put_among_others_by_number() -> None:
    """Keys and values of words that attend to all are put into tables of their own."""
    config = families.longformer()
    config.architectures = ["LongformerForMaskedLM"]
    spec = in_all_modes(config)
    (heads, values) = spec.parameters["longformer.encoder.layer.0.attention.self.value_global.weight"][0][0]
    assert heads.space is not None and isinstance(spec.spaces[heads.space].group, Permutation)
    assert values.space is not None and isinstance(spec.spaces[values.space].group, OrthogonalFixingOnes)


def test_a_tower_moves_where_images_are_a_mode() -> None:
    spec = in_all_modes(small("llava", "LlavaForConditionalGeneration"))
    assert group(spec, "model.vision_tower.encoder.layers.0.mlp.fc1.weight", 0) is not None
    assert group(spec, "model.vision_tower.encoder.layers.0.mlp.fc1.weight", 1) is not None


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llava", "LlavaForConditionalGeneration"), ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
     ("voxtral", "VoxtralForConditionalGeneration")],
)  # fmt: skip
def test_a_text_that_holds_images_or_sounds_keeps_the_rotations_of_its_stream(
    model_type: str, architecture: str
) -> None:
    """What a tower makes is put into the text by whole vectors, which turn together."""
    spec = in_all_modes(small(model_type, architecture))
    stream = group(spec, "model.language_model.layers.0.mlp.down_proj.weight", 0)
    assert isinstance(stream, Orthogonal)


@pytest.mark.parametrize("config", [tiny_llama(), tiny_gpt2(), tiny_vit()], ids=["llama", "gpt2", "vit"])
def test_more_ways_to_call_a_plain_model_take_nothing_from_its_symmetries(config: PretrainedConfig) -> None:
    one, all_ = derive(trace(config)), in_all_modes(config)
    assert dict(one.parameters) == dict(all_.parameters)
    assert one.gauges == all_.gauges


def test_a_call_that_does_at_another_length_what_it_does_at_its_own_is_not_interpreted_again() -> None:
    assert trace_modes(build_without_weights(tiny_llama())).modes == (
        "input_ids, 2 × 12", "a step with a cache", "input_ids with attention_mask", "input_ids with position_ids",
        "input_ids with attention_mask and position_ids",
    )  # fmt: skip


def test_a_constant_that_stands_anywhere_in_a_longer_one_tells_nothing_new() -> None:
    table = torch.tensor([[0, 0, 1, 0, 0, 1, 1], [2, 2, 2, 2, 2, 2, 3]])
    assert all(_is_block(table[:, at : at + n], table) for n in range(7) for at in range(7 - n + 1))
    assert not _is_block(torch.tensor([[0, 1, 1], [2, 2, 2]]), table) and not _is_block(table[:1, :2], table)
    assert not _is_block(table, table[:, :3]) and _is_block(table[0, 3:6], table[0])


def test_the_equal_columns_of_a_table_are_those_of_equal_angles() -> None:
    table = torch.tensor([[0.5, 2.0, 0.5, 1.0], [1.0, 3.0, 1.0, 1.0]])
    assert _equal_columns(table) == [0, 1, 0, 3]
    assert _equal_columns(torch.ones(2, 3)) == [0, 0, 0]
    assert _equal_columns(torch.tensor([[0.0, -1e9]])) == _equal_columns(torch.ones(0, 4)) == []


def late(kind: str) -> Config:
    """Of a model that is called with 18, 22, 42 and 62 tokens: one text, three, two, and one."""
    return Config(kind=kind, limits=[20, 40, 60], architectures=["Moody"])


def test_of_calls_that_differ_in_length_the_longest_is_interpreted_beside_the_first() -> None:
    program = trace_modes(build_without_weights(late("late")))
    texts = [value.shape for name, value in program.example.arguments.items() if name.endswith("input_ids")]
    assert {(2, 12), (1, 62)} <= {*texts} and not {(1, 18), (3, 22), (2, 42)} & {*texts}
    assert {"input_ids, 1 × 18", "input_ids, 3 × 22", "input_ids, 2 × 42"} <= {*program.modes}


def test_a_text_that_only_a_shorter_call_has_counts() -> None:
    config = late("late in a third text")
    before, after = moved(config, derive_by_depth(config))
    ids = torch.arange(3 * 22).reshape(3, 22) % 11
    with torch.no_grad():
        torch.testing.assert_close(*(m(ids)["logits"] for m in (before, after)), rtol=1e-9, atol=1e-9)


def test_the_certificate_says_for_which_calls_it_holds() -> None:
    found = certify(tiny_llama())
    assert found.sound and found.complete
    assert "a step with a cache" in found.modes and found.as_json()["modes"] == list(found.modes)


def test_no_mode_is_longer_than_a_table_of_positions_that_the_config_calls_otherwise() -> None:
    """Without values a table has any row: what would fail when it runs is no call of the model."""
    config = hf.WhisperConfig(
        vocab_size=23, d_model=8, decoder_layers=1, encoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=6,
        encoder_attention_heads=2, encoder_ffn_dim=6, max_target_positions=16, max_source_positions=8, num_mel_bins=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, architectures=["WhisperForCausalLM"],
    )  # fmt: skip
    program = trace_modes(build_without_weights(config))
    spec, rng = derive(program), Generator().manual_seed(0)
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-9


def test_parts_that_a_call_does_not_reach_are_given_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head for contacts is called on demand alone; each trial of an argument of it would be a trace."""
    paths: list[str] = []
    monkeypatch.setattr(modes, "try_parts", lambda *arguments: paths.extend(arguments[3]))
    config = shrink(hf.EsmConfig(vocab_size=12, architectures=["EsmForMaskedLM"], pad_token_id=1))
    spare = trace_modes(build_without_weights(config)).unread
    assert any("contact_head" in name for name in spare)
    assert paths and not any("contact_head" in path for path in paths)


def test_experts_of_their_own_sizes_are_called_in_several_ways() -> None:
    """What is written down of experts may be far larger than what any machine holds."""
    config = hf.MixtralConfig(num_hidden_layers=1, vocab_size=23, architectures=["MixtralForCausalLM"])
    ways = {mode.name for mode, _ in modes.find_modes(build_without_weights(config))}
    assert {"a step with a cache", "input_ids with attention_mask", "input_ids with position_ids"} <= ways


def test_embeddings_that_are_compared_are_an_answer() -> None:
    """Those of a speaker stand between two linear maps: without that, any map would do."""
    config = hf.Wav2Vec2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6, conv_dim=(4,), conv_kernel=(4,),
        conv_stride=(4,), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=3, tdnn_dim=(4, 6),
        tdnn_kernel=(1, 1), tdnn_dilation=(1, 1), xvector_output_dim=5,
        architectures=["Wav2Vec2ForXVector"])  # fmt: skip
    spec = derive(trace(config, length=16))
    (factor,) = spec.parameters["classifier.weight"][1][0]
    assert factor.space is None or spec.spaces[factor.space].group is None


def test_the_longest_text_is_as_long_as_what_it_computes_of_pairs_allows() -> None:
    """The buckets of T5 are computed of all pairs of positions, in a dozen tables that are held till it is recorded."""
    assert _by_memory(trace(tiny_llama())) == 4098
    assert 600 < _by_memory(trace(tiny_t5())) < 2000


def test_the_longest_text_of_what_goes_through_it_token_by_token_is_as_long_as_its_ops_allow() -> None:
    looped = hf.RwkvConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, attention_hidden_size=8,
                                     intermediate_size=6, architectures=["RwkvForCausalLM"])  # fmt: skip
    for config, least, most in ((tiny_llama(), 4098, 4098), (looped, 40, 1000)):
        model = build_without_weights(config)
        assert least <= _affordable(model, trace(config)) <= most


def test_a_condition_is_turned_in_the_longest_texts_only_if_no_others_met_it() -> None:
    conditions, place = Conditions(), Place("code.py", 1, 0, "test", False)
    program = trace(tiny_llama())
    for length in (700, 12, 24):
        example = at_length(program.example, length, 1)
        assert example is not None
        conditions.note(Mode(str(length), example), replace(program, taken={(place, ""): frozenset([True])}))
        assert max(mode.extent[1] for mode in conditions.calls(place)) == {700: 700, 12: 12, 24: 24}[length]
