"""A small copy of an architecture: the same config class with tiny sizes, for the certificate."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim"), 8),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"), 6),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 10),
    **dict.fromkeys(("head_dim", "d_kv"), 4),
    "vocab_size": 11,
    "patch_size": 2,
    "image_size": 4,
    "num_labels": 9,
}
_DERIVED = ("n_inner",)  # None means a multiple of the width, which is far from tiny
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")


def shrink(config: PretrainedConfig, layers: int = 2) -> PretrainedConfig:
    """The config with every size of one architecture family's usual fields made tiny.

    Two layers suffice: layers repeat. Ratios that matter are kept (grouped queries stay grouped).
    """
    fields: dict[str, Any] = config.to_dict()
    grouped = fields.get("num_key_value_heads") not in (None, fields.get("num_attention_heads"))
    for key in list(fields):
        name = getattr(config, "attribute_map", {}).get(key, key)
        if name in _SIZES and (fields[key] is not None or name in _DERIVED):
            fields[key] = _SIZES[name]
        elif name in _LAYERS and isinstance(fields[key], int):
            fields[key] = min(fields[key], layers)
        elif name.endswith("_token_id") and isinstance(fields[key], int):
            fields[key] = 0
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] is not None:
        fields["num_key_value_heads"] = 1 if grouped else 2
    if "image_size" in fields:
        fields.pop("id2label", None)
        fields.pop("label2id", None)
        fields["num_labels"] = _SIZES["num_labels"]
    fields.pop("layer_types", None)
    return type(config).from_dict(fields)
