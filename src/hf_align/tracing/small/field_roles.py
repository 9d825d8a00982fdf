"""What fields of configs are for, by the names that modelling code gives them, and their sizes in a small copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of a small copy, by what a field is for.

    Attributes:
        blocks: in each stage.
        kinds_come_soon: a layer of another kind comes as soon as it can; else where it comes in the model.
    """

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
    blocks: int = 1
    kinds_come_soon: bool = True


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
             "d_latents audio_hidden_size output_hidden_size encoder_width decoder_width projector_input_dim "
             "vision_output_dim feature_size aggregation_hidden_size vision_embed_dim input_hidden_size conv_dim_first "
             "stem_hidden_channels codebook_dim depth_hidden_size global_hidden_size output_dim upsample_groups "
             "condition_dim projector_output_dim",
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
    "image": "image_size img_size input_image_size max_img_size pretrain_image_size",
    "patch": "patch_size patch_stride spatial_patch_size visual_prompt_size",
    "latent": "q_lora_rank kv_lora_rank time_step_rank mamba_dt_rank num_latents",
    "plain_head_dim": "qk_nope_head_dim",
    "value_head_dim": "v_head_dim o_lora_rank",
    "state": "state_size mamba_d_state ssm_state_size d_state",
    "labels": "num_labels",
}  # fmt: skip
ROLE = {name: role for role, names in _FIELDS.items() for name in names.split()}
_LIMITS: dict[int, str] = {
    2: "n_group num_expert_group linear_num_key_heads n_groups mamba_n_groups n_groups_moe type_vocab_size "
       "conv_kernel mamba_d_conv linear_conv_kernel_dim query_length num_query_tokens num_queries num_frames "
       "temporal_patch_size tubelet_size index_kpool zero_expert_num",
    1: "topk_group",
    0: "num_nextn_predict_layers num_mtp_layers",
}  # fmt: skip
_LIMITS_OF_KINDS: dict[int, str] = {
    2: "sliding_window_pattern full_attention_interval attn_layer_period expert_layer_period layer_group_size "
       "cross_attention_interval global_attn_every_n_layers no_rope_layer_interval",
    1: "first_k_dense_replace decoder_sparse_step encoder_sparse_step max_window_layers attn_layer_offset "
       "expert_layer_offset interleave_moe_layer_step moe_layer_frequency moe_layer_freq num_sparse_encoder_layers "
       "num_sparse_decoder_layers aligner_num_add_layers",
    0: "num_kv_shared_layers num_hash_layers",
}  # fmt: skip


def _by_name(limits: Mapping[int, str]) -> dict[str, int]:
    return {name: limit for limit, names in limits.items() for name in names.split()}


KINDS_OF_LAYERS = frozenset(_by_name(_LIMITS_OF_KINDS))
"""Fields that say which layers are of another kind."""
AT_MOST: dict[str, int] = {
    **_by_name(_LIMITS),
    **_by_name(_LIMITS_OF_KINDS),
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
_LAYER_NAMES = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth "
    "num_blocks num_decoder_layers decoder_num_layers encoder_num_layers num_block text_encoder_layers "
    "num_hidden_blocks decoder_num_hidden_layers encoder_num_hidden_layers temporal_layers perceiver_layers "
    "l_layers x_layers r_layers decoder_depth encoder_depth conformer_num_layers speech_encoder_layers "
    "t2u_encoder_layers t2u_decoder_layers vision_layers text_layers num_trunk_layers "
    "num_self_attends_per_block entity_layers decoder_num_block prenet_num_layers"
)
LAYERS = frozenset(_LAYER_NAMES.split())
KV_HEADS = frozenset(("num_key_value_heads", "n_kv_heads", "kv_n_heads", "num_kv_heads", "multi_query_kv_heads",
                       "decoder_num_key_value_heads", "encoder_num_key_value_heads",
                       "swa_num_key_value_heads", "num_key_value_attention_heads",
                       "num_key_value_heads_per_layer"))  # fmt: skip
PER_STAGE = ("hidden_sizes", "embed_dims", "dims", "encoder_hidden_sizes", "neck_hidden_sizes", "depths", "layer_dims")
NEEDED_BY: dict[str, dict[str, Any]] = {
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
    "downsample_rate": {"downsample_rate": "1/2"},
}  # fmt: skip
"""What a model needs although its config leaves it open, by a field that such models have."""
DERIVED = frozenset(("out_features", "out_indices", "_out_features", "_out_indices", "stage_names", "qk_head_dim",
                      "hybrid_layer_ids"))  # fmt: skip
"""What a config computes from its other fields."""
