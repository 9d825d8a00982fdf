"""Small copies for the certificate: small, of the same kind, and they run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_align.errors import HfAlignError
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.small.answers import media_answered, run_on_zeros
from hf_align.tracing.small.config_sizes import is_same_kind, with_the_width_given
from hf_align.tracing.small.field_roles import TINY
from hf_align.tracing.small.kinds import layers_of
from hf_align.tracing.small.reduce import WANTED, reduced
from hf_align.tracing.small.search import Search
from hf_align.tracing.small.shrink import (
    shallow,
    shrink,
    small_fields,
    with_all_stages,
    with_arguments_of_parts,
)
from hf_align.tracing.tokens import announcing_tokens


def parameters(config: PretrainedConfig) -> int:
    shapes = inventory(build_without_weights(config)).shapes.values()
    return sum(math.prod(shape) for shape in shapes)


def default(model_type: str, architecture: str) -> PretrainedConfig:
    return transformers.AutoConfig.for_model(model_type, architectures=[architecture])


def copy_of(model_type: str, architecture: str) -> PretrainedConfig:
    small = reduced(default(model_type, architecture))
    assert small is not None
    return small


def test_a_tiny_copy_that_runs_is_kept_as_it_is() -> None:
    config = default("llama", "LlamaForCausalLM")
    small = reduced(config)
    assert small is not None and small.to_dict() == shrink(config).to_dict()


def test_sizes_that_have_no_known_name_are_lowered() -> None:
    config = default("roc_bert", "RoCBertForCausalLM")
    assert parameters(shrink(config)) > 1_000_000
    small = reduced(config)
    assert small is not None and parameters(small) <= WANTED
    assert small.shape_vocab_size == small.pronunciation_vocab_size == 16


def test_sizes_that_do_not_go_together_are_left_out() -> None:
    """A latent of 5 beside a rotary part of 4 is odd, which this attention's view as complex numbers refuses."""
    config = default("deepseek_v2", "DeepseekV2ForCausalLM")
    with pytest.raises(Exception, match="divisible by 2"):
        run_on_zeros(build_without_weights(shrink(config)))
    small = reduced(config)
    assert small is not None and parameters(small) <= WANTED
    assert small.num_experts_per_tok < small.n_routed_experts


@pytest.mark.parametrize(
    ("model_type", "architecture", "kinds"),
    [
        ("llava_next", "LlavaNextForConditionalGeneration", "image"),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", "image video"),
        ("gemma3", "Gemma3ForConditionalGeneration", "image"),
        ("video_llama_3", "VideoLlama3ForConditionalGeneration", "image video"),
        ("voxtral", "VoxtralForConditionalGeneration", "audio"),
        ("aria", "AriaForConditionalGeneration", "image"),
        ("granite_speech", "GraniteSpeechForConditionalGeneration", "audio"),
        ("glm_image", "GlmImageModel", "image"),
        pytest.param("deepseek_ocr2", "DeepseekOcr2Model", "image", marks=pytest.mark.slow),
        pytest.param("kimi_k25", "Kimi_K25Model", "image video", marks=pytest.mark.slow),
        pytest.param("deepseek_vl_hybrid", "DeepseekVLHybridModel", "image", marks=pytest.mark.slow),
        pytest.param("muse_spark", "MuseSparkModel", "image video audio", marks=pytest.mark.slow),
    ],
)
def test_copies_see_and_hear_as_their_models_do(model_type: str, architecture: str, kinds: str) -> None:
    answered = media_answered(build_without_weights(copy_of(model_type, architecture))).answered
    assert answered == {f"input_ids with {kind}" for kind in kinds.split()}


def test_a_copy_of_llama_4_sees() -> None:
    """Its class fills the weights of its experts at once, and pictures pass a projector with two widths of its own."""
    config = default("llama4", "Llama4ForConditionalGeneration")
    config.pad_token_id = 0
    small = reduced(config)
    assert small is not None
    assert media_answered(build_without_weights(small)).answered == {"input_ids with image"}


@pytest.mark.parametrize(
    ("model_type", "field"), [("sam_vision_model", "global_attn_indexes"), ("qwen2_5_vl", "fullatt_block_indexes")]
)
def test_one_layer_of_each_kind_stays_where_a_config_numbers_those_that_see_all(model_type: str, field: str) -> None:
    small = shrink(transformers.AutoConfig.for_model(model_type))
    part = getattr(small, "vision_config", small)
    assert getattr(part, field) == [1]


@pytest.mark.parametrize(
    ("said", "read", "given"),
    [
        ("Given groups=1, expected input[2, 24, 8, 8] to have 6 channels, but got 24 channels instead", 6, 24),
        ("mat1 and mat2 shapes cannot be multiplied (4x24 and 6x8)", 6, 24),
        ("Given normalized_shape=[6], expected input with shape [*, 6], but got input of size[4, 4, 24]", 6, 24),
    ],
)
def test_a_width_is_mended_as_an_error_says(said: str, read: int, given: int) -> None:
    fields = {"other": 8, "inner": {"width": read}}
    assert list(with_the_width_given(fields, said)) == [{"other": 8, "inner": {"width": given}}]


def test_what_a_config_computes_from_other_fields_is_computed_again() -> None:
    config = default("time_series_transformer", "TimeSeriesTransformerModel")
    with pytest.raises(HfAlignError):
        run_on_zeros(build_without_weights(shrink(config)))
    small = copy_of("time_series_transformer", "TimeSeriesTransformerModel")
    assert parameters(small) <= WANTED
    assert small.feature_size == small.input_size * (len(small.lags_sequence) + 2)


def test_the_same_copy_every_time() -> None:
    assert copy_of("swin", "SwinForImageClassification").to_dict() == (
        copy_of("swin", "SwinForImageClassification").to_dict()
    )


def test_layers_of_each_kind_and_grouped_queries_stay() -> None:
    small = copy_of("gemma4_text", "Gemma4ForCausalLM")
    assert parameters(small) <= WANTED
    assert small.num_hidden_layers == 2 and len(set(small.layer_types)) == 2
    assert 1 <= small.num_key_value_heads < small.num_attention_heads


class TwiceNamed(PretrainedConfig):
    """Its key heads go by another name, too."""

    attribute_map: ClassVar[dict[str, str]] = {"num_attention_groups": "num_key_value_heads"}


def test_heads_with_two_names_are_as_few_as_others() -> None:
    small = shrink(TwiceNamed(num_attention_heads=64, num_key_value_heads=8, head_dim=128))
    assert (small.num_attention_heads, small.num_key_value_heads) == (TINY.heads, 1)


def test_stages_are_fewer_but_more_than_one() -> None:
    """Four stages double the width three times."""
    small = copy_of("poolformer", "PoolFormerForImageClassification")
    assert parameters(small) <= WANTED
    assert len(small.hidden_sizes) == len(small.depths) == small.num_encoder_blocks >= 2
    assert len(copy_of("swinv2", "Swinv2ForImageClassification").depths) == 2


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("cohere_compass_text", "CohereCompassForCausalLM"),
        ("dbrx", "DbrxForCausalLM"),
        ("dots3_note_text", "Dots3NoteForCausalLM"),
        ("lfm2_moe", "Lfm2MoeForCausalLM"),
        ("qwen4_exp_text", "Qwen4ExpForCausalLM"),
        ("reformer", "ReformerModelWithLMHead"),
        ("zamba", "ZambaForCausalLM"),
        ("zamba2", "Zamba2ForCausalLM"),
    ],
)
def test_what_configs_leave_open_is_filled_in(model_type: str, architecture: str) -> None:
    assert run_on_zeros(build_without_weights(shrink(default(model_type, architecture)))) == 0


def test_a_place_for_images_is_a_token() -> None:
    """The model compares every token with the one that images take the place of."""
    config = shrink(default("blip-2", "Blip2Model"))
    assert config.image_token_index is not None
    run_on_zeros(build_without_weights(config))


class OfPatches(PretrainedConfig):
    """Calls the token of an image otherwise, and has something in between after a layer."""

    model_type = "of-patches"
    attribute_map: ClassVar[dict[str, str]] = {"image_token_id": "image_patch_id"}

    def __init__(self, **rest: Any) -> None:
        plain = {"vocab_size": 1000, "image_patch_id": 900, "num_hidden_layers": 12, "insert_layer_id": 6}
        super().__init__(**plain | rest)


def test_a_place_for_images_that_has_another_name_is_a_token_too() -> None:
    config = shrink(OfPatches())
    assert config.image_patch_id < config.vocab_size
    assert announcing_tokens(config).tolist() == [config.image_patch_id]


@pytest.mark.parametrize("make", [shrink, shallow])
def test_what_comes_after_a_layer_still_comes_between_two(make: Callable[[PretrainedConfig], PretrainedConfig]) -> None:
    assert make(OfPatches()).insert_layer_id == 0
    assert make(OfPatches(insert_layer_id=1)).insert_layer_id == 1


def test_a_backbone_keeps_the_stages_that_are_read() -> None:
    """What reads them counts on that many: a tiny copy with fewer does not run."""
    config = transformers.OneFormerConfig()
    fields = with_all_stages(config, small_fields(config, 2, TINY))["backbone_config"]
    assert fields["out_features"] == ["stage1", "stage2", "stage3", "stage4"]
    assert fields["depths"] == [1, 1, 1, 1] and fields["num_heads"] == [2, 2, 2, 2]
    assert fields["embed_dim"] == TINY.width


def test_larger_copies_that_a_config_refuses_are_left_out() -> None:
    """They are looked at where a text may have a picture in it."""
    config = default("neomme", "NeoMMEForMaskedLM")
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        shrink(config)
    assert reduced(config) is not None


def test_positions_suffice_for_a_text_without_padding() -> None:
    """They are counted from behind the number of the padding on, and not where there is padding."""
    config = transformers.RobertaConfig(num_hidden_layers=1, architectures=["RobertaForMaskedLM"])
    for positions, fits in ((14, True), (13, False)):
        config.max_position_embeddings = positions
        if fits:
            assert run_on_zeros(build_without_weights(config)) == 0
        else:
            with pytest.raises(HfAlignError):
                run_on_zeros(build_without_weights(config))


def test_a_width_that_a_config_gives_twice_differently_becomes_the_one_that_is_there() -> None:
    """What a neck reads stands in the config beside the backbone that gives it."""

    class OfTwoWidths(Search):
        def _run(self, fields: dict[str, Any], limit: int | None) -> int:
            for read, given in zip(fields["reads"], fields["gives"], strict=True):
                if read != given:
                    raise HfAlignError(f"expected input to have {read} channels, but got {given} channels instead")
            return 1

    config = default("llama", "LlamaForCausalLM")
    search = OfTwoWidths(config, layers_of(config), WANTED)
    start: dict[str, Any] = {"reads": (5, 3, 4), "gives": [7, 3, 6]}
    assert not search.attempt(start) and search.attempt_mended(start)
    assert search.fields["reads"] == [7, 3, 6] and search.fields["gives"] == [7, 3, 6]


def test_stages_that_a_default_config_forgets_are_handed_on() -> None:
    with pytest.raises(HfAlignError, match="to have 768 channels, but got 128"):
        run_on_zeros(build_without_weights(default("uvdoc", "UVDocModel")))
    small = copy_of("uvdoc", "UVDocModel")
    assert len(small.backbone_config.out_features) == len(small.backbone_config.depths) > 1
    run_on_zeros(build_without_weights(small))


def test_only_the_widths_that_an_error_tells_are_changed() -> None:
    said = (
        "Given groups=1, weight of size [8, 5, 1, 1], expected input[2, 7, 4, 4] to have 5 channels, but got 7 channels"
    )
    fields = {"read": [5, 3], "layers": 5, "given": 7}
    changed = [*with_the_width_given(fields, said)]
    assert changed == [{**fields, "read": [7, 3]}, {**fields, "layers": 7}]
    assert not [*with_the_width_given(fields, "expected 5, got 7")]


def test_a_model_that_takes_one_row_at_a_time_has_a_small_copy() -> None:
    small = reduced(default("tvp", "TvpModel"), wanted=200_000)
    assert small is not None and parameters(small) <= 200_000
    with pytest.raises(HfAlignError, match="shape"):
        run_on_zeros(build_without_weights(small))
    run_on_zeros(build_without_weights(small), rows=1)


def test_where_tiny_sizes_do_not_go_together_and_full_ones_are_too_large_to_run_full_ones_are_divided() -> None:
    """Ernie's rotary sections are counted off the head's width, which no tiny copy leaves room for."""
    assert parameters(copy_of("ernie4_5_vl_moe", "Ernie4_5_VLMoeModel")) < 5_000_000


def test_a_copy_keeps_no_weights_in_a_plain_list() -> None:
    """Where two widths differ, which are one by default, this model projects with what it neither saves nor loads."""
    config = default("oneformer", "OneFormerModel")
    kept = Search(config, layers_of(config), WANTED)
    assert not kept.attempt(small_fields(config, 2, TINY)) and "plain list" in str(kept.failures)
    small = reduced(config, wanted=500_000)
    assert small is not None and small.conv_dim == small.hidden_dim < config.hidden_dim


def test_parts_of_another_library_are_small_where_they_take_arguments() -> None:
    fields = {"hidden_size": 8, "tower": {"model_args": None}, "other": {"model_args": {"depth": 1, "drop": 0.1}}}
    plain, *staged, convolved = with_arguments_of_parts(fields, TINY)
    assert plain["tower"]["model_args"]["embed_dim"] == TINY.width
    assert plain["other"]["model_args"]["depth"] == 2 and fields["tower"] == {"model_args": None}
    assert [s["tower"]["model_args"]["embed_dims"] for s in staged] == [[8, 16, 32, 64], [8, 16, 32, 64, 128]]
    assert convolved["other"]["model_args"] == {"depth": 1, "drop": 0.1, "channel_multiplier": 0.05}
    assert not [*with_arguments_of_parts({"hidden_size": 8}, TINY)]


class Outer(nn.Module):
    """As constructors of other libraries are written: what they do not take ends in a TypeError."""

    def __init__(self, channel_multiplier: float = 1.0) -> None:
        super().__init__()
        width = int(1600 * channel_multiplier)
        self.embed, self.head = nn.Embedding(16, width), nn.Linear(width, width)


class HandingConfig(transformers.PretrainedConfig):
    model_type = "handing"

    def __init__(self, model_args: dict[str, object] | None = None, **rest: object) -> None:
        super().__init__(**rest)
        self.model_args, self.vocab_size = model_args, 16


class Handing(transformers.PreTrainedModel):
    config_class = HandingConfig

    def __init__(self, config: HandingConfig) -> None:
        super().__init__(config)
        self.outer = Outer(**(config.model_args or {}))
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.outer.head(self.outer.embed(input_ids))
        return logits


transformers.AutoConfig.register("handing", HandingConfig)
transformers.AutoModel.register(HandingConfig, Handing)


def test_what_another_library_builds_is_lowered_by_the_names_that_it_takes() -> None:
    small = reduced(HandingConfig(architectures=["Handing"]))
    assert small is not None and small.model_args["channel_multiplier"] <= 0.05


def test_copies_of_full_size_are_filled_in_too() -> None:
    """A width that other sizes are computed from may not become small."""
    config = default("granite4_vision", "Granite4VisionModel")
    assert config.deepstack_layer_map is None and config.downsample_rate is None
    build_without_weights(shallow(config))


def test_groups_stay_one_for_each_channel_where_they_are_so_in_the_model() -> None:
    """Not where a copy alone has as many channels as groups."""
    copy, fewer = {"hidden_size": 8, "o_groups": 8}, {"hidden_size": 8, "o_groups": 2}
    assert is_same_kind(copy, fewer, {"hidden_size": 64, "o_groups": 8})
    assert not is_same_kind(copy, fewer, {"hidden_size": 64, "o_groups": 64})
    narrower = {"hidden_size": 4, "o_groups": 4}
    assert is_same_kind(copy, narrower, {"hidden_size": 64, "o_groups": 64})
