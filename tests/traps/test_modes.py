"""Models of transformers in all the ways in which they are called: with images, encoder states, masks, token types."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Generator, Tensor
from transformers import PreTrainedModel

from traps.trap import Call, Calls, Trap, both, cached, cases, check, forward, ids_of, lengths, native, text


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=Generator().manual_seed(sum(shape)), dtype=torch.float64)


def given(label: str, **arguments: Any) -> Calls:
    """One call, whatever the model; functions get the model."""

    def calls(model: PreTrainedModel) -> Mapping[str, Call]:
        return {label: partial(forward, **{k: v(model) if callable(v) else v for k, v in arguments.items()})}

    return calls


def words(length: int, *special: int) -> Any:
    """Two rows of text, with some words put behind the first."""

    def ids(model: PreTrainedModel) -> Tensor:
        row = ids_of(model, length, start=8)
        row[:, 1 : 1 + len(special)] = torch.tensor(special, dtype=torch.long)
        return row

    return ids


def decoder(kind: str, size: str, length: str, **sizes: Any) -> Any:
    """The config of a decoder with attention to what an encoder gives."""
    return getattr(t, kind)(**{"vocab_size": 23, size: 8, length: 48, "is_decoder": True, "add_cross_attention": True,
                               "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **sizes})  # fmt: skip


def encoded(width: int = 8) -> Calls:
    states = {"encoder_hidden_states": noise(2, 5, width)}
    mask = {"encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])}
    return both(*(given(f"encoder, {n}", input_ids=words(n), **states, **mask) for n in (2, 7, 12, 33)))


def padded(ids: Tensor) -> Tensor:
    return (torch.arange(ids.shape[1]) < ids.shape[1] - torch.arange(len(ids))[:, None]).long()


def first(ids: Tensor) -> Tensor:
    return (torch.arange(ids.shape[1]) < 2).long().expand_as(ids).contiguous()


def halves(ids: Tensor) -> Tensor:
    return (torch.arange(ids.shape[1]) * 2 // ids.shape[1]).expand_as(ids).contiguous()


def choices(model: PreTrainedModel) -> Mapping[str, Call]:
    """Two questions with some answers each, which are as many texts."""
    found = dict[str, Call]()
    for count, length in ((1, 7), (2, 3), (3, 12), (4, 33)):
        ids = torch.stack([ids_of(model, length + i)[:, :length] for i in range(count)], 1)
        types = (torch.arange(length) * 2 // length).expand_as(ids).contiguous()
        hidden = (torch.arange(length) < length - torch.arange(count)[:, None]).long().expand_as(ids).contiguous()
        for label, more in {
            "": {},
            ", types": {"token_type_ids": types},
            ", masks": {"attention_mask": hidden},
        }.items():
            found[f"{count} of {length}{label}"] = partial(forward, input_ids=ids, **more)
    return found


def masked(model: PreTrainedModel) -> Tensor:
    patches = (model.config.image_size // model.config.patch_size) ** 2
    return (torch.arange(patches) % 3 == 0).expand(2, patches)


_LLAMA = dict(vocab_size=40, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1, head_dim=8, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
              pad_token_id=0, tie_word_embeddings=False)  # fmt: skip
_TOWER = dict(hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2, image_size=8,
              patch_size=4, num_channels=3)  # fmt: skip
_BERT = dict(num_hidden_layers=2, num_attention_heads=2, intermediate_size=10)
_ENCODER = dict(vocab_size=23, hidden_size=8, max_position_embeddings=48, pad_token_id=0, **_BERT)


def llava() -> Any:
    vision = dict(model_type="clip_vision_model", **_TOWER, projection_dim=8)
    return t.LlavaConfig(vision_config=vision, text_config=dict(model_type="llama", **_LLAMA), image_token_index=3,
                         vision_feature_layer=-2, image_seq_length=4)  # fmt: skip


def gemma3() -> Any:
    vision = dict(model_type="siglip_vision_model", **_TOWER, vision_use_head=False)
    words = dict(model_type="gemma3_text", **{**_LLAMA, "tie_word_embeddings": True}, sliding_window=8,
                 layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8)  # fmt: skip
    return t.Gemma3Config(vision_config=vision, text_config=words, mm_tokens_per_image=4, image_token_index=3,
                          boi_token_index=4, eoi_token_index=5)  # fmt: skip


def idefics3() -> Any:
    vision = dict(model_type="idefics3_vision", **_TOWER)
    return t.Idefics3Config(vision_config=vision, text_config=dict(model_type="llama", **_LLAMA), scale_factor=2,
                            image_token_id=3)  # fmt: skip


def qwen2_vl() -> Any:
    vision = dict(depth=2, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=1, patch_size=4, in_channels=3,
                  spatial_merge_size=2, temporal_patch_size=2)  # fmt: skip
    words = {**_LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}}
    words.pop("head_dim")
    return t.Qwen2VLConfig(vision_config=vision, text_config=words, image_token_id=3, video_token_id=4,
                           vision_start_token_id=5, vision_end_token_id=6)  # fmt: skip


def mllama() -> Any:
    """Layers of its own attend to what is made of an image; the text holds nothing in its place."""
    words = {k: v for k, v in _LLAMA.items() if k != "head_dim"}
    vision = dict(hidden_size=12, intermediate_size=10, num_hidden_layers=1, num_global_layers=1, attention_heads=2,
                  image_size=8, patch_size=4, max_num_tiles=2, intermediate_layers_indices=[0], vision_output_dim=24,
                  supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]])  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 100.0}
    text = dict(**words, cross_attention_layers=[1], rope_parameters=rope)
    return t.MllamaConfig(vision_config=vision, text_config=text, image_token_index=3)


def qwen2_audio() -> Any:
    words = {k: v for k, v in _LLAMA.items() if k != "head_dim"}
    sound = dict(num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=10, d_model=12,
                 max_source_positions=8)  # fmt: skip
    return t.Qwen2AudioConfig(audio_config=sound, text_config=dict(model_type="qwen2", **words), audio_token_index=3)


def molmo2() -> Any:
    sizes = dict(hidden_size=8, intermediate_size=6, num_attention_heads=2, head_dim=4)
    seen = dict(num_hidden_layers=2, num_key_value_heads=2, image_size=[8, 8], patch_size=2, num_position_embeddings=16)
    rope = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [1, 1, 0]}
    words = dict(
        vocab_size=23,
        additional_vocab_size=16,
        num_hidden_layers=2,
        num_key_value_heads=1,
        max_position_embeddings=48,
        qk_norm_type="qwen3",
        rope_parameters=rope,
        rope_scaling_layers=[0, 1],
    )
    return t.Molmo2Config(
        vision_config={**sizes, **seen}, text_config={**sizes, **words},
        adapter_config=dict(vision_feature_layer=[1, 0], num_key_value_heads=2, text_hidden_size=8, **sizes),
        image_start_token_id=15, low_res_image_start_token_id=14, image_end_token_id=13, image_patch_id=12,
        frame_start_token_id=11, frame_end_token_id=10)  # fmt: skip


def fun_asr() -> Any:
    sound = dict(num_mel_bins=8, hidden_size=6, intermediate_size=4, num_attention_heads=2, num_hidden_layers=2,
                 max_position_embeddings=16, num_stacked_frames=6, num_timestamp_prediction_layers=2,
                 fsmn_kernel_size=2)  # fmt: skip
    adaptor = dict(hidden_size=16, intermediate_size=4, num_attention_heads=2, num_hidden_layers=2,
                   projector_hidden_size=6)  # fmt: skip
    return t.FunAsrNanoConfig(audio_config=sound, adaptor_config=adaptor, text_config={**_LLAMA, "model_type": "qwen3"},
                              audio_token_id=22)  # fmt: skip


def wav2vec2() -> Any:
    return t.Wav2Vec2Config(
        hidden_size=8, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2, vocab_size=11,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(6, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, num_feat_extract_layers=2)  # fmt: skip


def xlm() -> Any:
    return t.XLMConfig(vocab_size=23, emb_dim=8, n_layers=2, n_heads=2, max_position_embeddings=48, n_langs=3,
                       use_lang_emb=True, mask_index=1)  # fmt: skip


def trocr() -> Any:
    return t.TrOCRConfig(vocab_size=23, d_model=8, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=10,
                         max_position_embeddings=48, cross_attention_hidden_size=6)  # fmt: skip


def fuyu() -> Any:
    words = dict(vocab_size=23, hidden_size=8, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2,
                 max_position_embeddings=48)  # fmt: skip
    return t.FuyuConfig(text_config=words, image_size=8, patch_size=4, image_token_id=3)


def pocket_tts() -> Any:
    return t.PocketTTSConfig(
        vocab_size=23, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
        intermediate_size=10, max_position_embeddings=48, latent_dim=6, audio_prompt_token_id=3,
        audio_latent_token_id=4, audio_prompt_bos_token_id=5, audio_bos_token_id=6,
        flow_head_config=dict(condition_dim=8, latent_dim=6, hidden_size=8, num_hidden_layers=2))  # fmt: skip


def higgs_audio() -> Any:
    return t.HiggsAudioV2Config(
        vocab_size=23, hidden_size=8, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=48, num_codebooks=2, codebook_size=16,
        pad_token_id=22, eos_token_id=21, audio_token_id=3, audio_bos_token_id=19, audio_delay_token_id=18)  # fmt: skip


def visual_bert() -> Any:
    return t.VisualBertConfig(**_ENCODER, visual_embedding_dim=6)


def longformer() -> Any:
    return t.LongformerConfig(**_ENCODER, attention_window=4)


IMAGE = noise(2, 3, 8, 8)
GRID = torch.tensor([[1, 4, 4], [1, 4, 4]])

TRAPS = [
    Trap("higgs_audio", native("HiggsAudioV2ForConditionalGeneration", higgs_audio()),
         both(lengths(7, 12), given("codes", input_ids=words(12, 3, 3, 3, 3),
                                    audio_input_ids=torch.arange(16).reshape(2, 4, 2)))),
    Trap("llava", native("LlavaForConditionalGeneration", llava()),
         both(lengths(7, 12), given("image", input_ids=words(12, 3, 3, 3, 3), pixel_values=IMAGE))),
    Trap("gemma3", native("Gemma3ForConditionalGeneration", gemma3()),
         both(lengths(7, 12), given("image", input_ids=words(12, 4, 3, 3, 3, 3, 5), pixel_values=IMAGE,
                                    token_type_ids=torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]] * 2)))),
    Trap("idefics3", native("Idefics3ForConditionalGeneration", idefics3()),
         both(lengths(7, 12), given("image", input_ids=words(12, 3), pixel_values=IMAGE[:, None],
                                    pixel_attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool)))),
    Trap("qwen2_vl", native("Qwen2VLForConditionalGeneration", qwen2_vl()),
         both(lengths(7, 12), given("image", input_ids=words(12, 5, 3, 3, 3, 3, 6), image_grid_thw=GRID,
                                    pixel_values=noise(32, 96), mm_token_type_ids=lambda model: (
                                        words(12, 5, 3, 3, 3, 3, 6)(model) == 3).int()))),
    Trap("mllama", native("MllamaForConditionalGeneration", mllama()),
         both(lengths(7, 12), given("image", input_ids=words(12, 3), pixel_values=noise(2, 1, 2, 3, 8, 8),
                                    aspect_ratio_ids=torch.tensor([[1], [2]]),
                                    aspect_ratio_mask=torch.tensor([[[1, 0]], [[1, 1]]])))),
    Trap("qwen2_audio", native("Qwen2AudioForConditionalGeneration", qwen2_audio()),
         both(lengths(7, 12), given("sound", input_ids=words(12, 3, 3, 3, 3), input_features=noise(2, 8, 16),
                                    attention_mask=torch.ones(2, 12, dtype=torch.long),
                                    feature_attention_mask=torch.ones(2, 16, dtype=torch.long)))),
    Trap("fuyu", native("FuyuForCausalLM", fuyu()),
         both(lengths(7, 12), given("image", input_ids=words(12, 3, 3, 3, 3), pixel_values=noise(2, 4, 48)))),
    Trap("pocket_tts", native("PocketTTSModel", pocket_tts()),
         both(lengths(7, 12), given("voice", input_ids=words(12, 3, 3, 6), audio_prompt_latents=noise(2, 2, 6)),
              given("both", input_ids=words(12, 3, 3, 6, 4, 4), audio_prompt_latents=noise(2, 2, 6),
                    audio_latents=noise(2, 2, 6)))),
    Trap("visual_bert", native("VisualBertModel", visual_bert()),
         both(lengths(7, 12), *(given(f"{n} regions", input_ids=words(7), visual_embeds=noise(2, n, 6),
                                      visual_token_type_ids=torch.ones(2, n, dtype=torch.long),
                                      visual_attention_mask=torch.ones(2, n, dtype=torch.long)) for n in (2, 7)),
              given("regions and types", input_ids=words(7), visual_embeds=noise(2, 5, 6),
                    token_type_ids=lambda model: halves(words(7)(model))))),
    Trap("bert decoder", native("BertLMHeadModel", decoder("BertConfig", "hidden_size", "max_position_embeddings",
                                                           **_BERT)), both(lengths(), encoded())),
    Trap("gpt2 decoder", native("GPT2LMHeadModel", decoder("GPT2Config", "n_embd", "n_positions", n_layer=2, n_head=2,
                                                           n_inner=10)), both(lengths(), encoded())),
    Trap("roberta decoder", native("RobertaForCausalLM", decoder("RobertaConfig", "hidden_size",
                                   "max_position_embeddings", **_BERT)), both(lengths(), encoded())),
    Trap("longformer", native("LongformerForMaskedLM", longformer()),
         both(lengths(2, 7, 12), lengths(7, 12, 33, global_attention_mask=first))),
    Trap("xlnet", native("XLNetLMHeadModel", t.XLNetConfig(vocab_size=23, d_model=8, n_layer=2, n_head=2, d_inner=10)),
         both(lengths(), lengths(7, 12, token_type_ids=halves),
              lengths(7, 12, perm_mask=lambda ids: torch.eye(ids.shape[1]).expand(2, -1, -1),
                      target_mapping=lambda ids: torch.eye(ids.shape[1])[:2].expand(2, -1, -1))),
         dtype=torch.float32),
    Trap("dinov2", native("Dinov2Model", t.Dinov2Config(hidden_size=8, mlp_ratio=1, num_hidden_layers=2,
                                                        num_attention_heads=2, image_size=16, patch_size=4)),
         both(given("image", pixel_values=noise(2, 3, 16, 16)), given("larger", pixel_values=noise(2, 3, 24, 16)),
              given("masked", pixel_values=noise(2, 3, 16, 16), bool_masked_pos=masked))),
    Trap("vit mim", native("ViTForMaskedImageModeling", t.ViTConfig(
         hidden_size=8, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4,
         encoder_stride=4)),
         both(given("image", pixel_values=noise(2, 3, 16, 16)),
              given("masked", pixel_values=noise(2, 3, 16, 16), bool_masked_pos=masked))),
    Trap("speech_to_text", native("Speech2TextForConditionalGeneration", t.Speech2TextConfig(
        vocab_size=23, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, conv_channels=8,
        decoder_attention_heads=2, encoder_ffn_dim=10, decoder_ffn_dim=10, input_feat_per_channel=8)),
        given("sound", input_features=noise(2, 32, 8), decoder_input_ids=words(5))),
    Trap("wav2vec2", native("Wav2Vec2Model", wav2vec2()),
         both(given("sound", input_values=noise(2, 330)),
              given("masked", input_values=noise(2, 330),
                    mask_time_indices=(torch.arange(16) % 3 == 0).expand(2, 16)))),
    Trap("bert choice", native("BertForMultipleChoice", t.BertConfig(**_ENCODER)), choices),
    Trap("xlm choice", native("XLMForMultipleChoice", t.XLMConfig(
        vocab_size=23, emb_dim=8, n_layers=2, n_heads=2, max_position_embeddings=40)), choices),
    Trap("bert types", native("BertForMaskedLM", t.BertConfig(**_ENCODER)),
         both(lengths(), lengths(token_type_ids=halves), lengths(attention_mask=padded))),
    Trap("bert classifier", native("BertForSequenceClassification", t.BertConfig(**_ENCODER, num_labels=3)), lengths()),
    Trap("gpt2 types", native("GPT2LMHeadModel", t.GPT2Config(vocab_size=23, n_embd=8, n_positions=48, n_layer=2,
                                                              n_head=2, bos_token_id=0, eos_token_id=0)),
         both(text, lengths(7, token_type_ids=halves))),
    Trap("distilbert", native("DistilBertForMaskedLM", t.DistilBertConfig(
         vocab_size=23, dim=8, n_layers=2, n_heads=2, hidden_dim=10, max_position_embeddings=48)),
         both(lengths(), lengths(attention_mask=padded))),
    Trap("t5", native("T5ForConditionalGeneration", t.T5Config(
         vocab_size=23, d_model=8, d_kv=4, d_ff=10, num_layers=2, num_heads=2, decoder_start_token_id=0)),
         both(*(given(f"{n} and {m}", input_ids=words(n), decoder_input_ids=words(m),
                      attention_mask=lambda model, n=n: padded(words(n)(model)))
                for n, m in ((2, 7), (7, 2), (12, 12), (33, 5))))),
    Trap("bart", native("BartForConditionalGeneration", t.BartConfig(
         vocab_size=23, d_model=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
         decoder_attention_heads=2, encoder_ffn_dim=10, decoder_ffn_dim=10, max_position_embeddings=48,
         pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)),
         both(lengths(), *(given(f"{n} and {m}", input_ids=words(n), decoder_input_ids=words(m))
                           for n, m in ((2, 7), (7, 2), (12, 12), (33, 5))))),
    Trap("clip", native("CLIPModel", t.CLIPConfig(
         text_config=dict(vocab_size=23, hidden_size=8, intermediate_size=10, num_hidden_layers=2,
                          num_attention_heads=2, max_position_embeddings=48, eos_token_id=22),
         vision_config=_TOWER, projection_dim=6)),
         given("both", input_ids=words(7), pixel_values=IMAGE,
               attention_mask=lambda model: padded(words(7)(model)))),
    Trap("vilt", native("ViltForQuestionAnswering", t.ViltConfig(
         **_ENCODER, image_size=8, patch_size=4, num_labels=5)),
         both(*(given(f"text {n}", input_ids=words(n), pixel_values=IMAGE, token_type_ids=lambda model, n=n: halves(
              words(n)(model))) for n in (2, 7)))),
    Trap("xlm", native("XLMWithLMHeadModel", xlm()),
         both(lengths(), lengths(7, langs=halves))),
    Trap("mamba", native("MambaForCausalLM", t.MambaConfig(
         vocab_size=23, hidden_size=8, num_hidden_layers=2, state_size=3, intermediate_size=16, time_step_rank=2)),
         both(lengths(), cached(name="cache_params"))),
    Trap("blenderbot", native("BlenderbotForCausalLM", t.BlenderbotConfig(
         vocab_size=23, d_model=8, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=10,
         max_position_embeddings=48, is_decoder=True, is_encoder_decoder=False)),
         both(lengths(), encoded())),
    Trap("trocr", native("TrOCRForCausalLM", trocr()),
         both(lengths(), encoded(6))),
    Trap("deberta", native("DebertaV2ForMaskedLM", t.DebertaV2Config(
         **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=2, position_buckets=8,
         max_relative_positions=16, share_att_key=True, norm_rel_ebd="layer_norm")),
         both(lengths(), lengths(7, token_type_ids=halves))),
    Trap("tapas", native("TapasModel", t.TapasConfig(**_ENCODER, type_vocab_sizes=[3, 4, 4, 2, 4, 4, 2])),
         both(lengths(7), lengths(7, token_type_ids=lambda ids: (ids[..., None] % 2).expand(-1, -1, 7).contiguous()))),
    Trap("layoutlm", native("LayoutLMForMaskedLM", t.LayoutLMConfig(**_ENCODER, max_2d_position_embeddings=32)),
         both(lengths(), lengths(7, bbox=lambda ids: (torch.arange(4) * 7 % 29 + ids[..., :1, None] * 0).expand(
             *ids.shape, 4).sort(-1).values))),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("modes", TRAPS))
def test_modes(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
