"""Decoders of transformers with options that few use: rotary scalings, windows, kinds of layers, multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor
from transformers import PreTrainedModel

from traps.test_modes import noise
from traps.trap import Call, Calls, Trap, both, cached, cases, check, forward, ids_of, lengths, native, text

_SIZES = dict(vocab_size=17, hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1, head_dim=8, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
              pad_token_id=0, tie_word_embeddings=False)  # fmt: skip


def decoder(family: str, calls: Calls = text, *, kind: str = "ForCausalLM", label: str = "",
            **changes: Any) -> Trap:  # fmt: skip
    config = getattr(t, f"{family}Config")(**{**_SIZES, **changes})
    return Trap(label or family.lower(), native(f"{family}{kind}", config), calls)


def strides(*chosen: int, length: int = 24) -> Calls:
    """Text whose words are far apart."""

    def calls(model: PreTrainedModel) -> Mapping[str, Call]:
        ids = ids_of(model, length)
        positions = torch.arange(length).expand_as(ids)
        return {f"stride {n}": partial(forward, input_ids=ids, position_ids=n * positions) for n in chosen}

    return calls


def rope(kind: str = "default", theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


_LONG = dict(max_position_embeddings=131072, head_dim=128, num_hidden_layers=1)
_LLAMA3 = rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=8192)  # fmt: skip
_FAR = both(lengths(2, 7, 12), strides(1, 100, 1000, 2000))


def begins_late(ids: Tensor) -> Tensor:
    """Of tokens in front that are hidden answers are no answers."""
    return (torch.arange(ids.shape[1]) >= 4).long().expand_as(ids).contiguous()


def series(model: PreTrainedModel) -> Mapping[str, Call]:
    """The loss on series of each kind that a model knows of."""

    def given(kind: int) -> Call:
        rng, times = torch.Generator().manual_seed(kind), model.config.num_time_features
        past = model.config.context_length + max(model.config.lags_sequence)

        def values(count: int) -> Tensor:
            return 3 * torch.rand(2, count, generator=rng, dtype=torch.float64)

        arguments = {
            "past_values": values(past), "past_time_features": values(past * times).view(2, past, times),
            "past_observed_mask": torch.ones(2, past, dtype=torch.float64), "future_values": values(6),
            "future_time_features": values(6 * times).view(2, 6, times),
            "static_categorical_features": torch.tensor([[kind], [0]]), "static_real_features": values(2),
        }  # fmt: skip
        return lambda model: model(**arguments).loss[None]

    return {f"kind {kind}": given(kind) for kind in range(model.config.cardinality[0])}


def of_any_length(model: PreTrainedModel) -> Mapping[str, Call]:
    """What follows series that are no whole number of patches, each padded in front."""
    past = {n: noise(2, n) for n in (32, 17, 18, 23, 7)}
    return {f"{n} values": partial(forecast, past_values=values) for n, values in past.items()}


def forecast(model: PreTrainedModel, past_values: Tensor) -> Tensor:
    return model(past_values=[*past_values]).full_predictions


def spoken(model: PreTrainedModel) -> Mapping[str, Call]:
    """Frames of a sound for a text, with a voice and without."""
    width, voice = model.config.num_mel_bins, {"speaker_embeddings": noise(2, model.config.speaker_embedding_dim)}
    return {f"{length} frames, {', '.join(more)}": partial(spectrum, input_ids=ids_of(model, 9), **more,
                                                           decoder_input_values=noise(2, length, width))
            for length in (6, 11) for more in ({}, voice)}  # fmt: skip


def spectrum(model: PreTrainedModel, **arguments: Tensor) -> Tensor:
    return model(**arguments).spectrogram


TRAPS = [
    decoder("Llama", _FAR, label="theta 5e5", **_LONG, rope_parameters=rope(theta=5e5)),
    decoder("Llama", _FAR, label="theta 1e6", **_LONG, rope_parameters=rope(theta=1e6)),
    decoder("Llama", _FAR, label="theta 1e7", **_LONG, rope_parameters=rope(theta=1e7)),
    decoder("Llama", _FAR, label="llama3 scaling", **_LONG, rope_parameters=_LLAMA3),
    decoder("Llama", both(text, strides(1, 40)), label="yarn", max_position_embeddings=2048,
            rope_parameters=rope("yarn", factor=8.0, original_max_position_embeddings=16)),
    decoder("Llama", both(text, strides(1, 10)), label="dynamic", max_position_embeddings=16,
            rope_parameters=rope("dynamic", factor=4.0)),
    decoder("Llama", both(text, strides(1, 100)), label="linear", rope_parameters=rope("linear", factor=8.0)),
    decoder("Phi3", both(text, strides(1, 3)), label="longrope", hidden_size=16, max_position_embeddings=64,
            original_max_position_embeddings=16,
            rope_parameters=rope("longrope", original_max_position_embeddings=16, partial_rotary_factor=1.0,
                                 short_factor=[1.0, 1.0, 2.0, 2.0], long_factor=[1.0, 5.0, 9.0, 30.0])),
    decoder("Phi3", label="longrope equal at short", hidden_size=16, max_position_embeddings=64,
            original_max_position_embeddings=16,
            rope_parameters=rope("longrope", 1.0, original_max_position_embeddings=16, partial_rotary_factor=1.0,
                                 short_factor=[1.0] * 4, long_factor=[1.0, 5.0, 9.0, 30.0])),
    decoder("Mistral", label="window of four", sliding_window=4),
    decoder("Qwen2", label="window deep down", use_sliding_window=True, sliding_window=4, max_window_layers=2,
            num_hidden_layers=5),
    decoder("Gemma2", label="gemma2", sliding_window=8, num_hidden_layers=3, query_pre_attn_scalar=4,
            attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    Trap("gemma3 text", native("Gemma3ForCausalLM", t.Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 7}, sliding_window=8,
        rope_parameters={"sliding_attention": rope(theta=100.0), "full_attention": rope(theta=1e6)}))),
    decoder("Qwen3", label="qwen3"),
    decoder("Qwen3Moe", label="qwen3 experts", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
            mlp_only_layers=[1], num_hidden_layers=4),
    decoder("Mixtral", label="experts", num_local_experts=3, num_experts_per_tok=2),
    Trap("llama4 text", native("Llama4ForCausalLM", t.Llama4TextConfig(
        **{**_SIZES, "num_hidden_layers": 5}, intermediate_size_mlp=8, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=8, no_rope_layers=[1, 1, 1, 0, 1], floor_scale=4, attn_scale=0.5,
        moe_layers=[1, 3]))),
    decoder("SmolLM3", label="layers without rotary", num_hidden_layers=5, no_rope_layers=[1, 1, 1, 0, 1]),
    decoder("Cohere2", label="cohere2", num_hidden_layers=5, sliding_window=8, sliding_window_pattern=4,
            logit_scale=2.0),
    decoder("Exaone4", label="exaone4", num_hidden_layers=5, sliding_window=8, sliding_window_pattern=4),
    decoder("GptOss", label="sinks", num_local_experts=2, num_experts_per_tok=1, sliding_window=8),
    decoder("Granite", label="granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5,
            attention_multiplier=0.3),
    decoder("StableLm", label="stablelm", hidden_size=16, partial_rotary_factor=0.5, use_qkv_bias=True,
            qk_layernorm=True, use_parallel_residual=True),
    decoder("Olmo2", label="norms afterwards"),
    decoder("Olmo", label="clipped", clip_qkv=0.5),
    decoder("Phi", label="phi", hidden_size=16, partial_rotary_factor=0.5, qk_layernorm=True),
    decoder("Nemotron", label="nemotron", partial_rotary_factor=0.5),
    decoder("Glm4", label="glm4", partial_rotary_factor=0.5),
    decoder("Helium", label="helium", hidden_size=16),
    Trap("gpt-j", native("GPTJForCausalLM", t.GPTJConfig(
        vocab_size=17, n_positions=64, n_embd=8, n_layer=2, n_head=2, rotary_dim=2, n_inner=10, bos_token_id=0,
        eos_token_id=0, tie_word_embeddings=False))),
    Trap("gpt-neo", native("GPTNeoForCausalLM", t.GPTNeoConfig(
        vocab_size=17, hidden_size=8, num_layers=4, attention_types=[[["global", "local"], 2]], num_heads=2,
        window_size=4, intermediate_size=10, max_position_embeddings=64, bos_token_id=0, eos_token_id=0))),
    Trap("bloom", native("BloomForCausalLM", t.BloomConfig(
        vocab_size=17, hidden_size=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0))),
    Trap("mpt", native("MptForCausalLM", t.MptConfig(
        vocab_size=17, d_model=8, n_layers=2, n_heads=2, expansion_ratio=1, max_seq_len=64))),
    Trap("opt of two widths", native("OPTForCausalLM", t.OPTConfig(
        vocab_size=17, hidden_size=8, ffn_dim=10, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=6,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0, do_layer_norm_before=False))),
    Trap("deepseek", native("DeepseekV3ForCausalLM", t.DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 4}, moe_intermediate_size=6,
        n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, kv_lora_rank=4, q_lora_rank=6, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6))),
    Trap("recurrent gemma", native("RecurrentGemmaForCausalLM", t.RecurrentGemmaConfig(
        **{**_SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True}, lru_width=12, attention_window_size=8,
        conv1d_width=3)), lengths()),
    Trap("recurrent gemma with biases", native("RecurrentGemmaForCausalLM", t.RecurrentGemmaConfig(
        **{**_SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True}, lru_width=12, attention_window_size=8,
        conv1d_width=3, block_types=["recurrent", "attention"], attention_bias=True)),
        both(lengths(), lengths(12, attention_mask=begins_late)), may_refuse=True),
    Trap("xmod of three languages", native("XmodForMaskedLM", t.XmodConfig(
        **{**_SIZES, "pad_token_id": 1, "tie_word_embeddings": True}, languages=["a", "b", "c"], default_language="a",
        adapter_reduction_factor=2)),
        both(lengths(), lengths(7, lang_ids=torch.tensor([2, 0])), lengths(7, lang_ids=torch.tensor([1, 2])))),
    Trap("deepseek v4 beyond its rate", native("DeepseekV4ForCausalLM", t.DeepseekV4Config(
        **{**_SIZES, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 512},
        moe_intermediate_size=6, q_lora_rank=8, num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1,
        layer_types=["heavily_compressed_attention", "sliding_attention"], sliding_window=5, partial_rotary_factor=0.5,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}, hc_mult=2,
        hc_sinkhorn_iters=3, o_groups=2, o_lora_rank=8, index_n_heads=2, index_head_dim=8, index_topk=3,
        mlp_layer_types=["hash_moe", "moe"])), lengths(7, 130, 301)),
    Trap("speech", native("SpeechT5ForTextToSpeech", t.SpeechT5Config(
        vocab_size=23, hidden_size=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=10, decoder_ffn_dim=12, encoder_max_relative_position=6,
        num_mel_bins=8, speech_decoder_prenet_units=12, speech_decoder_prenet_dropout=0.0, speaker_embedding_dim=5,
        speech_decoder_postnet_units=10, speech_decoder_postnet_kernel=3, speech_decoder_postnet_layers=2,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 5), num_feat_extract_layers=2, max_text_positions=60,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2)), spoken),
    Trap("time series of several kinds", native("TimeSeriesTransformerForPrediction", t.TimeSeriesTransformerConfig(
        prediction_length=6, context_length=12, lags_sequence=[1, 2, 5], num_time_features=2, d_model=16,
        num_static_categorical_features=1, cardinality=[4], embedding_dimension=[3], num_static_real_features=2,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=10,
        decoder_ffn_dim=10)), series),
    Trap("series in patches", native("TimesFm2_5ModelForPrediction", t.TimesFm2_5Config(
        patch_length=4, context_length=32, horizon_length=8, num_hidden_layers=1, hidden_size=16, intermediate_size=10,
        head_dim=8, num_attention_heads=2, num_key_value_heads=2, quantiles=[0.1, 0.9], output_quantile_len=16,
        decode_index=1)), of_any_length),
    Trap("rwkv", native("RwkvForCausalLM", t.RwkvConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=2, attention_hidden_size=8, intermediate_size=10,
        context_length=64, bos_token_id=0, eos_token_id=0)), both(lengths(), cached(name="state"))),
    Trap("reformer", native("ReformerModelWithLMHead", t.ReformerConfig(
        vocab_size=23, hidden_size=8, num_attention_heads=2, attention_head_size=4, feed_forward_size=10,
        attn_layers=["local", "local"], local_attn_chunk_length=8, axial_pos_embds=False, is_decoder=True,
        max_position_embeddings=64)), lengths()),
    Trap("big bird", native("BigBirdForMaskedLM", t.BigBirdConfig(
        vocab_size=23, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=10,
        max_position_embeddings=128, block_size=4, num_random_blocks=1)), lengths(2, 7, 12, 100)),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("families", TRAPS))
def test_families(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
