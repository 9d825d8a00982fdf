"""A picture may stand before the text, or not, and no token says where: both are calls of the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_align
from traps import pictured as code
from traps.test_modes import given, noise, words
from traps.trap import Calls, Trap, both, cases, check, custom, lengths, native, of_code

_SIZES = dict(hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2)
_SWIN = dict(patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=4, num_labels=3)
_PAGE = noise(2, 3, 16, 16)


def of(name: str) -> Trap:
    kind: Any = getattr(code, f"{name}Tower")
    calls = both(lengths(), lengths(7, 12, pixel_values=noise(2, 3, 8, 8)))
    return Trap(name, custom(kind, image_size=8, num_channels=3, patch_size=4), calls, may_refuse=True)


def at_layers(*layers: int, places: int = 17, **more: Tensor) -> Calls:
    """A text with a picture, as some layers of the tower see it."""
    read = {"input_ids": torch.tensor([[1, *places * [21], 5, 6]]), "pixel_values": noise(1, 3, 16, 16), **more}
    return both(*(given(f"layer {n}", **read, vision_feature_layer=n) for n in layers))


def boxes(ids: Tensor) -> Tensor:
    corner = torch.arange(ids.shape[1])[None, :, None] * 7 % 100
    return torch.cat([corner, corner + 1, corner + 20, corner + 9], -1).expand(len(ids), -1, -1)


def sizes(*sides: tuple[int, int], **more: bool) -> Calls:
    pages = {f"{height} × {width}": noise(2, 3, height, width) for height, width in sides}
    return both(*(given(size, pixel_values=page, **more) for size, page in pages.items()))


def loss(**arguments: Tensor) -> Calls:
    """One number, and not what it is computed from."""
    return lambda model: {"loss": lambda model: model(**arguments).loss[None]}


def posed(kind: int) -> Calls:
    """Pictures of two kinds, which the model must be told."""
    pages, kinds = noise(2, 3, 32, 16), torch.tensor([kind, (kind + 1) % 3])
    return lambda model: {f"kind {kind}": lambda model: model(pages, dataset_index=kinds).heatmaps}


def told(*counts: int) -> Calls:
    return both(*(lengths(7, encoder_hidden_states=noise(2, count, 12)) for count in counts))


def placed(side: int, kind: Any = code.PlacedTower, **more: Any) -> Trap:
    calls = both(lengths(), given("placed", input_ids=words(7, 3), pixel_values=noise(2, 3, side, side), **more))
    config = dict(image_size=8, num_channels=3, patch_size=4, image_token_id=3)
    return Trap(f"{kind.__name__} {side}", custom(kind, **config), calls, may_refuse=True)


seeing = partial(of_code, image_size=16, num_channels=3, patch_size=4)


def _half_hidden(rows: int, side: int) -> Tensor:
    mask = torch.ones(rows, side, side, dtype=torch.long)
    mask[:, :, side // 2 :] = 0
    return mask


_OF_PHI = transformers.Phi4MultimodalConfig(
    architectures=["Phi4MultimodalForCausalLM"], vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, num_key_value_heads=2,
    vision_config={**_SIZES, "image_size": 28, "crop_size": 28, "patch_size": 7, "image_token_id": 60},
    audio_config=dict(hidden_size=12, intermediate_size=10, num_blocks=2, num_attention_heads=2, input_size=16,
                      nemo_conv_channels=8, nemo_final_size=2, ext_pw_out_channel=12,
                      depthwise_separable_out_channel=12, audio_token_id=61),
)  # fmt: skip
_CROP = dict(image_pixel_values=noise(1, 2, 3, 28, 28), image_sizes=torch.tensor([[28, 28]]),
             image_attention_mask=torch.ones(1, 2, 4, 4).long())  # fmt: skip
_SOUND = dict(audio_input_features=noise(1, 64, 16), audio_embed_sizes=torch.tensor([3]))


def _with(*places: int) -> Tensor:
    """A text with places for a picture as a whole and in crops, and for a sound."""
    return torch.tensor([[5, 6, 7, *places, 8, 9, 10, 11]])


TRAPS = [
    seeing(code.SeeingTall, sizes((16, 16), (24, 16), (16, 24))),
    seeing(code.SeeingWindows, sizes((16, 16), (12, 12), (24, 12), (24, 24))),
    seeing(code.SeeingUneven, sizes((16, 16), (18, 18), (17, 16))),
    seeing(code.SeeingMasked, both(sizes((16, 16)), given("masked", pixel_values=noise(2, 3, 16, 16),
                                                          pixel_mask=_half_hidden(2, 16)))),
    *map(placed, (8, 16, 40)),
    placed(8, code.PlacedUnmaskedTower),
    placed(8, code.PlacedSharpTower, sharp=True),
    placed(8, code.PlacedSharpWordTower, strategy="sharp"),
    placed(8, code.PlacedLookedUpTower, picture_places=torch.tensor([[0, 1, 2, 3]])),
    *(Trap(f"Told {count}", custom(code.ToldTower), both(lengths(), told(count)), may_refuse=True)
      for count in (5, 20, 60)),
    Trap("Seeing", custom(code.Seeing, image_size=8, num_channels=3, patch_size=4),
         sizes((8, 8), (4, 4), (12, 12), (16, 8), (40, 40)), may_refuse=True),
    *map(of, ("Pictured", "PicturedAlone", "PicturedReader", "PicturedReaderAlone")),
    Trap(
        "layoutlmv3",
        native("LayoutLMv3Model", transformers.LayoutLMv3Config(
            vocab_size=23, coordinate_size=2, shape_size=2, input_size=16, patch_size=8, max_position_embeddings=50,
            pad_token_id=1, bos_token_id=0, eos_token_id=2, **_SIZES)),
        both(lengths(bbox=boxes), lengths(7, 12, bbox=boxes, pixel_values=_PAGE), lengths(7, pixel_values=_PAGE),
             given("page", pixel_values=_PAGE)),
    ),
    Trap("vitpose with experts", native("VitPoseForPoseEstimation", transformers.VitPoseConfig(
        backbone_config=transformers.VitPoseBackboneConfig(
            image_size=[32, 16], patch_size=[8, 8], hidden_size=12, num_hidden_layers=2, num_attention_heads=2,
            mlp_ratio=2, num_experts=3, part_features=4, out_indices=[2]),
        num_labels=5, use_simple_decoder=True)),
        both(*(posed(kind) for kind in range(3)))),
    Trap("vitdet", native("VitDetModel", transformers.VitDetConfig(
        image_size=32, patch_size=4, window_block_indices=[0], window_size=4, use_relative_position_embeddings=True,
        residual_block_indices=[1], mlp_ratio=2, hidden_size=12, num_hidden_layers=2, num_attention_heads=2)),
        sizes((32, 32), (64, 32), (24, 24), (32, 40))),
    Trap("clipseg", native("CLIPSegForImageSegmentation", transformers.CLIPSegConfig(
        text_config=dict(vocab_size=23, max_position_embeddings=40, bos_token_id=0, eos_token_id=2, pad_token_id=1,
                         **_SIZES),
        vision_config=dict(image_size=16, patch_size=4, **_SIZES), projection_dim=6, reduce_dim=8,
        extract_layers=[0, 1], decoder_num_attention_heads=2, decoder_intermediate_size=10)),
        both(lengths(7, pixel_values=_PAGE),
             given("shown", pixel_values=_PAGE, conditional_pixel_values=noise(2, 3, 16, 16) ** 3))),
    Trap("beit with a second head", native("BeitForSemanticSegmentation", transformers.BeitConfig(
        image_size=16, patch_size=4, out_indices=[1, 2, 3, 4], pool_scales=[1, 2], auxiliary_channels=8, num_labels=3,
        use_relative_position_bias=True, vocab_size=20, **{**_SIZES, "num_hidden_layers": 4})),
        both(sizes((16, 16)), loss(pixel_values=_PAGE, labels=torch.arange(512).view(2, 16, 16) % 3))),
    Trap("uper with a second head", native("UperNetForSemanticSegmentation", transformers.UperNetConfig(
        backbone_config=transformers.ConvNextConfig(
            hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]),
        hidden_size=16, pool_scales=[1, 2], auxiliary_channels=8, auxiliary_in_channels=16, num_labels=3)),
        both(sizes((64, 64)), loss(pixel_values=noise(2, 3, 64, 64),
                                   labels=torch.arange(8192).view(2, 64, 64) % 3))),
    Trap("swin with places", native("SwinForImageClassification", transformers.SwinConfig(
        image_size=32, use_absolute_embeddings=True, **_SWIN)),
        both(sizes((32, 32)), sizes((48, 48), (48, 40), (40, 36), interpolate_pos_encoding=True))),
    Trap("swin of tall pictures", native("SwinForImageClassification", transformers.SwinConfig(
        image_size=(32, 48), **_SWIN)), sizes((32, 48), (64, 96), (40, 48), (36, 44), (36, 36))),
    Trap("donut of tall pictures", native("DonutSwinForImageClassification", transformers.DonutSwinConfig(
        image_size=(32, 48), **_SWIN)), sizes((32, 48), (64, 96), (40, 48), (36, 44), (36, 36))),
    Trap("swinv2 of tall pictures", native("Swinv2ForImageClassification", transformers.Swinv2Config(
        image_size=(32, 48), **_SWIN)), sizes((32, 48), (64, 96), (40, 48), (36, 44), (36, 36))),
    Trap("llava of other layers", native("LlavaForConditionalGeneration", transformers.LlavaConfig(
        text_config={"model_type": "llama", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20,
                     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 12, "intermediate_size": 20,
                       "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        image_token_index=21, vision_feature_layer=-2, vision_feature_select_strategy="full", image_seq_length=17)),
        at_layers(-2, -1, 1)),
    Trap("mistral3 of other layers", native("Mistral3ForConditionalGeneration", transformers.Mistral3Config(
        text_config={"model_type": "mistral", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20,
                     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
        vision_config={"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 20, "head_dim": 8,
                       "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 4},
        image_token_index=21, vision_feature_layer=-2)),
        at_layers(-2, -1, places=4, image_sizes=torch.tensor([[16, 16]]))),
    Trap("ovis2 with marks", native("Ovis2ForConditionalGeneration", transformers.Ovis2Config(
        vision_config=dict(image_size=16, patch_size=4, vocab_size=20, hidden_stride=2, num_visual_indicator_tokens=5,
                           qkv_bias=True, mlp_bias=True, **_SIZES),
        text_config=dict(model_type="qwen2", vocab_size=60, num_key_value_heads=2, **_SIZES), image_token_id=50,
        visual_indicator_token_ids=[51, 52, 53, 54, 55], vocab_size=60, hidden_size=_SIZES["hidden_size"])),
        both(lengths(), given("bare", input_ids=_with(50, 50, 50, 50), pixel_values=noise(1, 3, 16, 16)),
             given("marked", input_ids=_with(51, 50, 50, 50, 50, 53), pixel_values=noise(1, 3, 16, 16)))),
    Trap("granite speech", native("GraniteSpeechForConditionalGeneration", transformers.GraniteSpeechConfig(
        text_config=dict(model_type="granite", vocab_size=100, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
                         eos_token_id=2, **_SIZES),
        encoder_config=dict(input_dim=10, num_layers=2, hidden_dim=12, feedforward_mult=2, num_heads=2, dim_head=6,
                            output_dim=8, context_size=6, max_pos_emb=8, conv_kernel_size=3),
        projector_config=dict(model_type="blip_2_qformer", encoder_hidden_size=12, cross_attention_frequency=1,
                              vocab_size=10, max_position_embeddings=10, **{**_SIZES, "num_hidden_layers": 1}),
        audio_token_index=90, has_lora_adapter=False, downsample_rate=2, window_size=4)),
        both(*(given(f"{frames} frames", input_ids=_with(*[90] * ((frames + 3) // 4 * 2)),
                     input_features=noise(1, frames, 10)) for frames in (16, 13, 42)))),
    Trap("phi4_multimodal", native("Phi4MultimodalForCausalLM", _OF_PHI),
         both(lengths(), given("picture", input_ids=_with(*[60] * 13), **_CROP),
              given("sound", input_ids=_with(61, 61, 61), **_SOUND),
              given("both", input_ids=_with(*[60] * 13, 61, 61, 61), **_CROP, **_SOUND))),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("pictured", TRAPS))
def test_aligned_b_is_b_with_a_picture_and_without(
    trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(trap, tmp_path, capsys)


@pytest.mark.slow
def test_arguments_with_the_kind_in_their_name_are_given() -> None:
    """`image_pixel_values`, and a way from sounds that is taken beside a picture alone."""
    spec = hf_align.symmetries(_OF_PHI).spec
    assert not spec.unread and {"input_ids with image", "input_ids with image and audio"} <= {*spec.modes}
