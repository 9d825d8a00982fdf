"""A small copy of an architecture: the same config class with tiny sizes, for the certificate.

Configs name their sizes in a few dozen ways. What a field means is read off its name and its kind of value here, and
nowhere else: nothing that is derived depends on it, a field that is not known just keeps its size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from transformers import PretrainedConfig

from hf_align.tracing.build import quiet


@dataclass(frozen=True)
class Sizes:
    """The sizes of a small copy, by what a field is for."""

    width: int = 8
    heads: int = 2
    head_dim: int = 4
    hidden: int = 6
    expert_hidden: int = 4
    vocabulary: int = 23
    positions: int = 16
    experts: int = 4
    chosen: int = 2
    image: int = 8
    patch: int = 2
    latent: int = 5
    plain_head_dim: int = 5
    value_head_dim: int = 3
    state: int = 3
    labels: int = 9


TINY = Sizes()
ROOMY = Sizes(width=32, heads=4, head_dim=8, hidden=48, expert_hidden=24, vocabulary=128, positions=64, experts=8,
              image=64, patch=8, latent=16, plain_head_dim=8, value_head_dim=8, state=8)  # fmt: skip
"""For architectures whose parts have least sizes: even, powers of two, several strides of an image."""

_FIELDS: dict[str, str] = {
    "width": "hidden_size n_embd d_model dim embed_dim emb_dim hidden_dim text_hidden_size out_hidden_size d_embed "
             "embedding_size encoder_hidden_size decoder_hidden_size word_embed_proj_dim projection_dim text_embed_dim "
             "cross_attention_hidden_size attention_hidden_size llm_hidden_size lm_hidden_size vision_hidden_size "
             "bottleneck_size fusion_hidden_size proj_size shared_embed_dim language_hidden_size decoder_embed_dim "
             "encoder_embed_dim projector_hidden_size text_width vision_width hidden_dims lru_width linear_width "
             "d_latents audio_hidden_size output_hidden_size encoder_width decoder_width "
             "vision_output_dim feature_size aggregation_hidden_size vision_embed_dim input_hidden_size conv_dim_first "
             "stem_hidden_channels codebook_dim depth_hidden_size global_hidden_size output_dim upsample_groups "
             "condition_dim",
    "heads": "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
             "decoder_num_attention_heads encoder_num_attention_heads attention_heads vision_heads text_heads "
             "num_self_attention_heads num_cross_attention_heads num_query_heads index_n_heads "
             "mamba_n_heads mamba_num_heads linear_num_value_heads num_self_attends_heads",
    "head_dim": "head_dim d_kv attention_head_dim swa_head_dim global_head_dim linear_key_head_dim "
                "linear_value_head_dim qk_rope_head_dim attention_head_size d_head index_head_dim "
                "query_pre_attn_scalar",
    "hidden": "intermediate_size n_inner ffn_dim d_ff mlp_dim ffn_hidden_size dim_feedforward encoder_ffn_dim ffn_size "
              "decoder_ffn_dim decoder_intermediate_size encoder_intermediate_size ff_dim hidden_dim_ffn d_inner "
              "encoder_ffn_size dense_intermediate_size intermediate_size_mlp block_ff_dim text_intermediate_size "
              "shared_intermediate_size mlp_hidden_size block_ffn_dim",
    "expert_hidden": "moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size "
                     "moe_ffn_hidden_size moe_shared_expert_intermediate_size expert_ffn_hidden_size expert_ffn_size "
                     "moe_latent_size",
    "vocabulary": "vocab_size text_vocab_size decoder_vocab_size vocab_size_per_layer_input",
    "positions": "max_position_embeddings n_positions max_target_positions max_source_positions n_ctx max_seq_len "
                 "block_size max_seq_length max_sequence_length",
    "chosen": "num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token moe_top_k",
    "experts": "num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts n_local_experts "
               "num_virtual_experts",
    "image": "image_size img_size input_image_size",
    "patch": "patch_size patch_stride spatial_patch_size",
    "latent": "q_lora_rank kv_lora_rank o_lora_rank time_step_rank mamba_dt_rank num_latents",
    "plain_head_dim": "qk_nope_head_dim",
    "value_head_dim": "v_head_dim",
    "state": "state_size mamba_d_state ssm_state_size d_state",
    "labels": "num_labels",
}  # fmt: skip
_ROLE = {name: role for role, names in _FIELDS.items() for name in names.split()}
_LIMITS: dict[int, str] = {
    2: "n_group num_expert_group linear_num_key_heads n_groups mamba_n_groups n_groups_moe type_vocab_size "
       "conv_kernel mamba_d_conv linear_conv_kernel_dim sliding_window_pattern full_attention_interval "
       "attn_layer_period expert_layer_period layer_group_size cross_attention_interval "
       "global_attn_every_n_layers no_rope_layer_interval query_length num_query_tokens num_queries "
       "num_frames temporal_patch_size tubelet_size index_kpool",
    1: "topk_group first_k_dense_replace decoder_sparse_step encoder_sparse_step max_window_layers "
       "attn_layer_offset expert_layer_offset interleave_moe_layer_step moe_layer_frequency moe_layer_freq "
       "num_sparse_encoder_layers num_sparse_decoder_layers",
    0: "num_kv_shared_layers num_hash_layers num_nextn_predict_layers num_mtp_layers",
}  # fmt: skip
_AT_MOST: dict[str, int] = {
    **{name: limit for limit, names in _LIMITS.items() for name in names.split()},
    "mm_tokens_per_image": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "window_size": 2,
    "num_channels": 3,
    "in_channels": 3,
    "num_mel_bins": 8,
    "codebook_size": 16,
    "entity_vocab_size": 12,
    "index_topk": 4,
    "chunk_size": 4,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "context_size": 8,
    "context_length": 64,
    "label_length": 4,
    "feature_projection_input_dim": 8,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "spectrogram_length": 4,
}  # fmt: skip
_CLAMPS = frozenset(("swiglu_limit",))
"""Bounds that small weights would never reach: without them units may be scaled."""
_LAYER_NAMES = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth "
    "num_blocks num_decoder_layers decoder_num_layers encoder_num_layers num_block text_encoder_layers "
    "num_hidden_blocks decoder_num_hidden_layers encoder_num_hidden_layers temporal_layers perceiver_layers "
    "l_layers x_layers r_layers decoder_depth encoder_depth conformer_num_layers speech_encoder_layers "
    "t2u_encoder_layers t2u_decoder_layers vision_layers text_layers num_trunk_layers "
    "num_self_attends_per_block entity_layers decoder_num_block prenet_num_layers"
)
_LAYERS = frozenset(_LAYER_NAMES.split())
_KV_HEADS = frozenset(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_kv_heads",
                       "decoder_num_key_value_heads", "encoder_num_key_value_heads",
                       "swa_num_key_value_heads", "num_key_value_attention_heads",
                       "num_key_value_heads_per_layer"))  # fmt: skip
_PER_STAGE = ("hidden_sizes", "embed_dims", "dims", "encoder_hidden_sizes", "neck_hidden_sizes", "depths", "layer_dims")


_NEEDED_BY: dict[str, dict[str, Any]] = {
    "conv_L_cache": {"layer_types": ["conv", "full_attention"]},
    "mlp_layer_types": {"mlp_layer_types": ["dense", "sparse"]},
    "indexer_n_heads": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 4, "indexer_budget": 4,
                        "indexer_compress_ratio": 2},
    "axial_pos_shape": {"is_decoder": True, "num_buckets": 4},
    "vocabulary_map": {"vocabulary_map": {"<image>": 4}},
    "kv_n_heads": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "pad_head_dim_to_multiple_of": {"num_key_value_heads": 2},
    "projector_scale_factors": {"projector_scale_factors": [1.0]},
    "deepstack_layer_map": {"deepstack_layer_map": [[1, 0]]},
}  # fmt: skip
"""What a model needs although its config leaves it open, by a field that such models have."""

_DERIVED = frozenset(("out_features", "out_indices", "_out_features", "_out_indices", "stage_names", "qk_head_dim",
                      "hybrid_layer_ids"))  # fmt: skip
"""What a config computes from its other fields."""


def shrink(config: PretrainedConfig, layers: int = 2, sizes: Sizes = TINY) -> PretrainedConfig:
    """The config with tiny sizes; two layers suffice, for layers repeat.

    Ratios that matter are kept: grouped queries stay grouped, partial rotary stays partial, one layer of each kind
    stays.
    """
    return with_fields(config, small_fields(config, layers, sizes))


def shallow(config: PretrainedConfig, layers: int = 2) -> PretrainedConfig:
    """The config with its own sizes and few layers."""
    return with_fields(config, shallow_fields(config, layers))


def small_fields(config: PretrainedConfig, layers: int, sizes: Sizes) -> dict[str, Any]:
    """What `shrink` sets, whether or not the config class accepts it."""
    before = config.to_dict()
    fields = _small(before, config, layers, sizes)
    _fit_grids(fields, before)
    keep_tokens_inside(fields, sizes.vocabulary)
    return fields


def with_all_stages(config: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """With as many stages of a backbone as the config has, and all that it hands on: what reads them may count on it.

    They are made of one block and two heads each.
    """
    kept = dict(fields)
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig) and isinstance(fields.get(key), dict):
            kept[key] = with_all_stages(value, fields[key])
    handed_on, depths = getattr(config, "out_features", None), vars(config).get("depths")
    if handed_on and isinstance(depths, (list, tuple)):
        lists = {k: v for k, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == len(depths)}
        short = {k: list(v) for k, v in lists.items() if k in kept and len(_listed(kept[k])) != len(depths)}
        kept |= short | {k: [2] * len(depths) for k in lists if "heads" in k}
        kept |= {"depths": [1] * len(depths), "out_features": list(handed_on)}
    return kept


def declared_fields(config: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Without what a config class computes from its other fields: what it does not declare."""
    if not is_dataclass(config):
        return fields
    names = {f.name for f in dataclass_fields(config)} | {*(config.attribute_map or ()), "architectures", "model_type"}
    kept = {key: value for key, value in fields.items() if key in names}
    for key, value in kept.items():
        part = vars(config).get(key)
        if isinstance(value, dict) and isinstance(part, PretrainedConfig):
            kept[key] = declared_fields(part, value)
    return kept


def shallow_fields(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """What `shallow` sets."""
    fields = copy.deepcopy(config.to_dict())
    _few_layers(fields, layers)
    return fields


def shallow_parts_fields(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """As `shallow_fields`, in every part of the config too."""
    fields = copy.deepcopy(config.to_dict())
    for group in _nested(fields):
        _few_layers(group, layers)
    return fields


def with_fields(config: PretrainedConfig, fields: dict[str, Any]) -> PretrainedConfig:
    """A config of the same class and architecture."""
    with quiet():
        made = type(config).from_dict(copy.deepcopy(fields))
    made.architectures = config.architectures
    return made


def _small(fields: dict[str, Any], config: PretrainedConfig, layers: int, sizes: Sizes) -> dict[str, Any]:
    fields = copy.deepcopy(fields)
    aliases = {v: k for k, v in (getattr(config, "attribute_map", None) or {}).items()}
    heads = fields.get("num_attention_heads")
    latent_attention = isinstance(fields.get("kv_lora_rank"), int)
    before = dict(fields)
    for key, value in before.items():
        if key in _DERIVED:
            if value and isinstance(value, list) and isinstance(value[0], int) and key == "out_features":
                fields[key] = [sizes.width] * len(value)
            else:
                del fields[key]
            continue
        name = key if key in _ROLE or key in _LAYERS or key in _AT_MOST else aliases.get(key, key)
        sub = vars(config).get(key)
        if isinstance(value, dict) and isinstance(sub, PretrainedConfig):
            fields[key] = _small(value, sub, layers, sizes)
        elif isinstance(value, bool):
            continue
        elif name in _KV_HEADS and isinstance(value, (int, list)):
            fewer = max(1, sizes.heads // 2)
            few = [sizes.heads if v == heads or latent_attention else fewer for v in _listed(value)]
            fields[key] = few if isinstance(value, list) else few[0]
        elif name in _ROLE:
            fields[key] = _sized(value, getattr(sizes, _ROLE[name]), name)
        elif name == "relative_attention_num_buckets" and "relative_attention_max_distance" not in before:
            continue
        elif name in _AT_MOST and isinstance(value, int):
            fields[key] = min(value, _AT_MOST[name])
        elif name in _PER_STAGE and isinstance(value, (list, tuple)):
            fields[key] = [1 if name == "depths" else sizes.width * (i + 1) for i in range(len(value))]
        elif name in ("partial_rotary_factor", "rotary_pct") and isinstance(value, float):
            fields[key] = 1.0 if value == 1.0 else 0.5
        elif name in _CLAMPS and isinstance(value, float):
            fields[key] = min(value, 0.2)
        elif name == "rotary_dim" and isinstance(value, int):
            fields[key] = sizes.head_dim // 2
    if before.get("attention_hidden_size") and before["attention_hidden_size"] == 2 * before.get("hidden_size", 0):
        fields["attention_hidden_size"] = 2 * sizes.width
    _few_layers(fields, layers, before)
    _fit_rope(fields, sizes)
    _fit_layers(fields, layers, sizes)
    _fit_states(fields, sizes)
    _fill(fields, sizes)
    if fields.get("id2label") is not None:
        fields.pop("id2label")
        fields.pop("label2id", None)
        fields["num_labels"] = sizes.labels
    return fields


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _sized(value: Any, size: int, name: str) -> Any:
    if value == 0 and name == "qk_rope_head_dim":
        return 0
    if isinstance(value, int) or (value is None and name == "n_inner"):
        return size
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return [size] * len(value)
    return value


def _few_layers(fields: dict[str, Any], layers: int, before: Mapping[str, Any] | None = None) -> None:
    """Cut the depths, and with them every list that has an entry for each layer."""
    before = before or dict(fields)
    depths = {v for k, v in before.items() if k in _LAYERS and isinstance(v, int) and not isinstance(v, bool)}
    for key, value in before.items():
        if key in _LAYERS and isinstance(value, int) and not isinstance(value, bool):
            fields[key] = min(value, layers)
        elif isinstance(value, (list, tuple)) and key in fields and len(value) in depths and len(value) > layers:
            fields[key] = _one_of_each(list(fields[key]), layers)


def _fit_rope(fields: dict[str, Any], sizes: Sizes) -> None:
    """Rotary parameters may be nested by layer type; the sections of a head must add up to it."""
    rope = fields.get("rope_parameters", fields.get("rope_scaling"))
    if "rope_parameters" in fields and rope is None:
        fields["rope_parameters"] = rope = {"rope_type": "default", "rope_theta": 10000.0}
    if rope == {} and fields.get("layer_types"):
        rope.update({kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in fields["layer_types"]})
    for part in [rope, *rope.values()] if isinstance(rope, dict) else []:
        if isinstance(part, dict):
            if isinstance(part.get("partial_rotary_factor"), float):
                part["partial_rotary_factor"] = 1.0 if part["partial_rotary_factor"] == 1.0 else 0.5
            half = int(sizes.head_dim * part.get("partial_rotary_factor", 1.0)) // 2
            if "rope_theta" in part:  # sections have defaults of the full size in some models' code
                count = len(part.get("mrope_section", (0, 0, 0)))
                part["mrope_section"] = [half - half // 2, half // 2, *[0] * (count - 2)]
            for key in ("long_factor", "short_factor"):
                if isinstance(part.get(key), list):
                    part[key] = part[key][:half]


def _fit_layers(fields: dict[str, Any], layers: int, sizes: Sizes) -> None:
    """Layers with settings of their own: the first of them becomes the last layer."""
    for key in ("vision_feature_layer", "vision_feature_layers"):
        if isinstance(fields.get(key), list):
            fields[key] = [1, 0]
    if isinstance(read_at := fields.get("deepstack_visual_indexes"), list):
        fields["deepstack_visual_indexes"] = list(range(layers))[-len(read_at) :]
    for key in ("intermediate_hook_ids", "spatial_target_layers"):
        if isinstance(fields.get(key), list):
            fields[key] = [min(number, layers - 1) for number in fields[key]]
    if isinstance(merged := fields.get("spatial_merge_size"), int) and isinstance(fields.get("window_size"), int):
        fields["window_size"] = 2 * merged * fields.get("patch_size", 1)
    if "delay_pattern" in fields:
        fields["delay_pattern"] = fields["delay_pattern"][: _AT_MOST["num_channels"]]
    if "axial_pos_embds_dim" in fields:
        fields |= {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [3, sizes.width - 3]}
    if "hybrid" in (kinds := fields.get("layers_block_type") or ()):  # its attention is shared: one is none
        fields["layers_block_type"] = [*(k for k in kinds if k != "hybrid"), "hybrid", "hybrid"]
        fields["num_hidden_layers"] = len(fields["layers_block_type"])
    special = fields.get("per_layer_config")
    if isinstance(special, dict) and special:
        first = special[min(special, key=int)]
        sized = {k: _sized(v, getattr(sizes, _ROLE[k]), k) if k in _ROLE else v for k, v in first.items()}
        for key in _KV_HEADS & sized.keys():
            equal = first[key] == first.get("num_attention_heads")
            sized[key] = sizes.heads if equal else max(1, sizes.heads // 2)
        if "qk_nope_head_dim" in sized:
            fields["head_dim"] = sizes.plain_head_dim + sizes.head_dim
        fields["per_layer_config"] = {type(min(special, key=int))(layers - 1): sized}


def _fit_states(fields: dict[str, Any], sizes: Sizes) -> None:
    """State-space blocks: heads times their size is the expanded width."""
    expand = next((fields[k] for k in ("mamba_expand", "expand") if isinstance(fields.get(k), (int, float))), None)
    inner = fields.get("mamba_d_ssm") or (None if expand is None else int(expand * sizes.width))
    if inner is None:
        return
    if isinstance(fields.get("mamba_d_ssm"), int):
        inner = fields["mamba_d_ssm"] = 2 * sizes.width
    heads = next((k for k in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads") if k in fields), None)
    if heads is not None and isinstance(fields[heads], int):
        for key in ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"):
            if isinstance(fields.get(key), int) and (key != "head_dim" or heads == "num_heads"):
                fields[key] = inner // fields[heads]


def _fill(fields: dict[str, Any], sizes: Sizes) -> None:
    """Fields that have no default although the model needs them."""
    needed = {"vocab_size": sizes.vocabulary, "num_key_value_heads": max(1, sizes.heads // 2), "prediction_length": 4,
              "default_language": "en_XX", "head_dim": sizes.head_dim, "moe_intermediate_size": sizes.expert_hidden,
              "num_attention_heads": sizes.heads, "n_routed_experts": sizes.experts, "num_experts_per_tok": 2,
              "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "context_length": 8, "image_token_index": 4,
              "video_token_index": 4, "audio_token_id": 4}  # fmt: skip
    for key, value in needed.items():
        if key in fields and fields[key] is None and not (key == "head_dim" and "kv_lora_rank" in fields):
            fields[key] = value
    if "top_k_experts" in fields and "enable_moe_block" not in fields and fields.get("num_experts") is None:
        fields |= {"num_experts": sizes.experts, "top_k_experts": 2}
    for mark, more in _NEEDED_BY.items():
        if mark in fields:
            fields.update({k: v for k, v in more.items() if not fields.get(k)})


def _fit_grids(fields: dict[str, Any], before: Mapping[str, Any]) -> None:
    """The sizes that a picture may be cut from are multiples of the tower's, and stay so."""
    side, small = (next((g["image_size"] for g in _nested(f) if isinstance(g.get("image_size"), int)), None)
                   for f in (before, fields))  # fmt: skip
    for key, grid in before.items() if side and small else ():
        if key.endswith("pinpoints") and isinstance(grid, list):
            fields[key] = [[n * small // side for n in size] for size in grid]


def keep_tokens_inside(fields: dict[str, Any], vocabulary: int) -> None:
    """Special tokens that the vocabulary no longer has become its last ones."""
    last = vocabulary - 1
    for group in _nested(fields):
        for key, value in group.items():
            if not str(key).endswith(("token_id", "token_index", "token_idx")):
                continue
            if isinstance(value, int) and value >= vocabulary:
                group[key] = last
                last = max(3, last - 1)
            elif isinstance(value, list) and any(isinstance(v, int) and v >= vocabulary for v in value):
                group[key] = [1]


def _nested(fields: Mapping[str, Any]) -> Iterator[Any]:
    yield fields
    for value in fields.values():
        if isinstance(value, dict):
            yield from _nested(value)


def _one_of_each(kinds: list[Any], layers: int) -> list[Any]:
    """The first layer of each kind, in order, filled up from the front."""
    chosen: list[int] = []
    for i, kind in enumerate(kinds):
        if len(chosen) < layers and kind not in [kinds[j] for j in chosen]:
            chosen.append(i)
    chosen += [i for i in range(len(kinds)) if i not in chosen][: max(0, layers - len(chosen))]
    return [kinds[i] for i in sorted(chosen)]
