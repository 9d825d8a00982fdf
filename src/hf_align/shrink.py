"""A small copy of an architecture: the same config class with tiny sizes, for the certificate.

Configs name their sizes in a few dozen ways. What a field means is read off its name and its kind of value here, and
nowhere else: nothing that is derived depends on it, a field that is not known just keeps its size.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

_WIDTH, _HEADS, _HEAD_DIM, _FFN, _POSITIONS = 8, 2, 4, 6, 10


def _all(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


_SIZES: dict[str, int] = {
    **_all(_WIDTH, "hidden_size n_embd d_model dim embed_dim emb_dim hidden_dim text_hidden_size out_hidden_size "
                   "embedding_size encoder_hidden_size decoder_hidden_size word_embed_proj_dim projection_dim "
                   "cross_attention_hidden_size attention_hidden_size conv_dim_first stem_hidden_channels"),
    **_all(_HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
                   "decoder_num_attention_heads encoder_num_attention_heads"),
    **_all(_HEAD_DIM, "head_dim d_kv attention_head_dim swa_head_dim global_head_dim linear_key_head_dim "
                      "linear_value_head_dim qk_rope_head_dim"),
    **_all(_FFN, "intermediate_size n_inner ffn_dim d_ff mlp_dim ffn_hidden_size dim_feedforward encoder_ffn_dim "
                 "decoder_ffn_dim decoder_intermediate_size encoder_intermediate_size ff_dim hidden_dim_ffn "
                 "encoder_ffn_size expert_ffn_size dense_intermediate_size"),
    **_all(4, "moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size moe_ffn_hidden_size "
              "moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    **_all(_POSITIONS, "max_position_embeddings n_positions max_target_positions max_source_positions n_ctx"),
    **_all(11, "vocab_size text_vocab_size decoder_vocab_size"),
    **_all(4, "num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts n_local_experts"),
    **_all(2, "num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token moe_top_k"),
    **_all(2, "n_group num_expert_group linear_num_key_heads mamba_n_heads mamba_num_heads"),
    **_all(2, "linear_num_value_heads patch_size patch_stride type_vocab_size conv_kernel time_step_rank "
              "linear_conv_kernel_dim mamba_d_conv sliding_window_pattern"),
    **_all(1, "topk_group first_k_dense_replace decoder_sparse_step encoder_sparse_step"),
    **_all(3, "qk_nope_head_dim v_head_dim num_channels in_channels num_input_channels"),
    **_all(5, "q_lora_rank kv_lora_rank"),
    **_all(3, "state_size mamba_d_state"),
    **_all(4, "image_size img_size input_image_size relative_attention_max_distance"),
    **_all(8, "relative_attention_num_buckets"),
    "num_labels": 9,
}  # fmt: skip
_LAYERS = frozenset(
    [
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_encoder_layers",
        "num_decoder_layers",
        "depth",
        "num_blocks",
        "decoder_num_layers",
        "encoder_num_layers",
    ]
)
_KV_HEADS = frozenset(["num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_kv_heads"])
_FROM_NONE = frozenset(("n_inner", "head_dim"))
_PER_LAYER = frozenset(["layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attention_types"])


def shrink(config: PretrainedConfig, layers: int = 2) -> PretrainedConfig:
    """The config with tiny sizes; two layers suffice, for layers repeat.

    Ratios that matter are kept: grouped queries stay grouped, partial rotary stays partial, one layer of each kind
    stays.
    """
    fields = _small(config.to_dict(), config, layers)
    small = type(config).from_dict(fields)
    small.architectures = config.architectures
    return small


def _small(fields: dict[str, Any], config: PretrainedConfig, layers: int) -> dict[str, Any]:
    fields = copy.deepcopy(fields)
    names = getattr(config, "attribute_map", {}) or {}
    canonical = {v: k for k, v in names.items()}
    heads = fields.get("num_attention_heads")
    depth = next((v for k, v in fields.items() if k in _LAYERS and isinstance(v, int)), None)
    for key, value in list(fields.items()):
        name = key if key in _SIZES or key in _LAYERS else canonical.get(key, key)
        if isinstance(value, bool):
            continue
        if isinstance(value, dict):
            sub = getattr(config, key, None)
            if isinstance(sub, PretrainedConfig):
                fields[key] = _small(value, sub, layers)
        elif name in _LAYERS and isinstance(value, int):
            fields[key] = min(value, layers)
        elif name in _KV_HEADS and isinstance(value, int):
            fields[key] = _HEADS if value == heads else 1
        elif name in _SIZES and (isinstance(value, int) or (value is None and name in _FROM_NONE and key == "n_inner")):
            fields[key] = _SIZES[name]
        elif name in _SIZES and isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            fields[key] = [_SIZES[name]] * len(value)
        elif name in ("hidden_sizes", "embed_dims", "dims", "encoder_hidden_sizes", "neck_hidden_sizes", "depths"):
            if isinstance(value, (list, tuple)):
                fields[key] = [1 if name == "depths" else _WIDTH * (i + 1) for i in range(len(value))]
        elif name in _PER_LAYER and isinstance(value, (list, tuple)) and depth == len(value):
            fields[key] = _one_of_each(list(value), layers)
        elif name.endswith("token_id") and isinstance(value, int):
            fields[key] = 0 if value >= 11 else value
        elif name == "eos_token_id" and isinstance(value, list):
            fields[key] = 0
        elif name in ("partial_rotary_factor", "rotary_pct") and isinstance(value, float):
            fields[key] = 1.0 if value == 1.0 else 0.5
        elif name == "rotary_dim" and isinstance(value, int):
            fields[key] = 2
    _small_rope(fields)
    if "id2label" in fields and fields["id2label"] is not None:
        fields.pop("id2label")
        fields.pop("label2id", None)
        fields["num_labels"] = _SIZES["num_labels"]
    return fields


def _small_rope(fields: dict[str, Any]) -> None:
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("partial_rotary_factor"), float):
        rope["partial_rotary_factor"] = 1.0 if rope["partial_rotary_factor"] == 1.0 else 0.5


def _one_of_each(kinds: list[Any], layers: int) -> list[Any]:
    """The first layer of each kind, in order, filled up from the front."""
    chosen: list[int] = []
    for i, kind in enumerate(kinds):
        if len(chosen) < layers and kind not in [kinds[j] for j in chosen]:
            chosen.append(i)
    chosen += [i for i in range(len(kinds)) if i not in chosen][: max(0, layers - len(chosen))]
    return [kinds[i] for i in sorted(chosen)]


def default_config(model_type: str) -> PretrainedConfig:
    """The default config of a registered model type."""
    return CONFIG_MAPPING[model_type]()
