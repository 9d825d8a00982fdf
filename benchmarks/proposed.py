"""What configs are given where the defaults of their class are nothing that a model can be built from.

Some defaults leave out a part of the model, or are widths that do not go together, since every checkpoint says
something else. The values are of the kind that checkpoints have, and not those of a certain one.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

_BLOCKS = [(128, 128, 2), (128, 256, 3), (256, 512, 5), (512, 896, 3)]
"""Of a detector's backbone: what each stage reads, how wide it is, and how many blocks it has."""
_LINES = ("vertical_long_to_small_conv", "horizontal_small_to_long_conv", "symmetric_conv_long")
_REACHES = {"longratio": 7, "midratio": 5, "shortratio": 3}


def _stages(scale: float) -> list[list[list[Any]]]:
    """Blocks of a backbone for detection, which halves a picture at the start of each stage but the first."""
    stages = []
    for number, (read, width, count) in enumerate(_BLOCKS):
        widths = [int(read * scale), *[int(width * scale)] * count]
        strides = [2 if number else 1, *[1] * (count - 1)]
        stages.append([[3, widths[i], widths[i + 1], strides[i], i % 2 == (number > 0)] for i in range(count)])
    return stages


def _detector(scale: float) -> dict[str, Any]:
    return {"model_type": "pp_lcnet_v4", "stem_channels": [3, int(64 * scale), int(128 * scale)],
            "block_configs": _stages(scale), "out_features": [f"stage{i}" for i in (1, 2, 3, 4)]}  # fmt: skip


def _convolutions() -> dict[str, Any]:
    """Kernel, stride and padding of convolutions along a line of text, across it, and over both."""
    made: dict[str, Any] = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
    for line in _LINES:
        for reach, size in _REACHES.items():
            kernel = [1 if "horizontal" in line else size, 1 if "vertical" in line else size]
            made[f"{line}_{reach}"] = [kernel, [1, 1], [side // 2 for side in kernel]]
    return made


GIVEN: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "florence2": {"text_config": {"model_type": "bart", "vocab_size": 51290}},
    "perception_lm": {"vision_config": {
        "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336",
        "model_args": {"embed_dim": 1024, "img_size": [448, 448], "depth": 23, "global_pool": "",
                       "use_post_transformer_norm": False, "init_values": 0.1, "ref_feat_shape": [32, 32]},
    }},
    "pp_ocrv6_medium_det": {"backbone_config": _detector(1.0), "intraclass_block_config": _convolutions(),
                            "scale_factor_list": [1, 2, 4, 8], "kernel_list": [3, 2, 2]},
    "pp_ocrv6_small_det": {"backbone_config": _detector(0.375), "layer_list_out_channels": [48, 96, 192, 336]},
    "step3p7": {"text_config": {
        "sliding_window": 512,
        "layer_types": ["sliding_attention" if number % 4 else "full_attention" for number in range(45)],
    }},
    "t5gemma2_encoder": {"text_config": {"model_type": "t5gemma2_text", "dropout_rate": 0.0}},
    "timm_backbone": {"backbone": "resnet18.a1_in1k"},
}  # fmt: skip


def proposed(model_type: str) -> PretrainedConfig:
    """The config of a model type as its class proposes it, or as it is given here."""
    return CONFIG_MAPPING[model_type](**GIVEN.get(model_type, {}))
