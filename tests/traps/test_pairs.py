"""Two configs with all shapes equal that are two functions; and pairs that differ in nothing that counts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers as t
from conftest import run

from traps.trap import Trap, cases, check, lengths, native, text

_LLAMA = dict(vocab_size=17, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
              pad_token_id=0, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
              hidden_act="silu", rms_norm_eps=1e-6)  # fmt: skip
_BERT = dict(vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=10,
             max_position_embeddings=48, pad_token_id=1)  # fmt: skip
_GPT2 = dict(vocab_size=17, n_embd=16, n_layer=2, n_head=4, n_inner=10, n_positions=48, bos_token_id=0, eos_token_id=0,
             tie_word_embeddings=False)  # fmt: skip


def pair(family: str, sizes: dict[str, Any], name: str, may_refuse: bool = True,
         kind: str = "ForCausalLM", config: str = "Config", first: dict[str, Any] | None = None,
         **changes: Any) -> Trap:  # fmt: skip
    """A of one config, B of the same but for some fields."""
    of = getattr(t, f"{family}{config}")
    build = native(f"{family}{kind}", of(**{**sizes, **(first or {})}), of(**{**sizes, **(first or {}), **changes}))
    calls = text if kind in ("ForCausalLM", "LMHeadModel") else lengths()
    return Trap(name, build, calls, may_refuse)


llama = partial(pair, "Llama", _LLAMA)
bert = partial(pair, "Bert", _BERT, kind="ForMaskedLM")
gpt2 = partial(pair, "GPT2", _GPT2, kind="LMHeadModel")

TRAPS = [
    llama("activation", hidden_act="gelu"),
    llama("activation relu", hidden_act="relu"),
    llama("heads", num_attention_heads=2, num_key_value_heads=1, head_dim=8),
    llama("theta", rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    llama("rotary scaling", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    llama("epsilon", rms_norm_eps=0.3),
    llama("heads of queries", num_attention_heads=8, num_key_value_heads=4, head_dim=2),
    bert("bert heads", num_attention_heads=2),
    bert("bert activation", hidden_act="relu"),
    bert("bert epsilon", layer_norm_eps=0.5),
    gpt2("gpt2 scale", scale_attn_weights=False),
    gpt2("gpt2 scale by layer", scale_attn_by_inverse_layer_idx=True),
    gpt2("gpt2 activation", activation_function="relu"),
    gpt2("gpt2 heads", n_head=2),
    pair("GPTNeoX", dict(vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                         intermediate_size=10, max_position_embeddings=64, bos_token_id=0, eos_token_id=0),
         "parallel", use_parallel_residual=False),
    pair("GPTNeoX", dict(vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                         intermediate_size=10, max_position_embeddings=64, bos_token_id=0, eos_token_id=0),
         "part that is rotated",
         first={"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}},
         rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}),
    pair("SmolLM3", {**_LLAMA, "num_hidden_layers": 3}, "layers without rotary",
         first={"no_rope_layers": [1, 1, 1]}, no_rope_layers=[1, 0, 1]),
    pair("Gemma2", {**_LLAMA, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"}, "softcap",
         first={"attn_logit_softcapping": 50.0}, attn_logit_softcapping=1.0),
    pair("Gemma2", {**_LLAMA, "sliding_window": 32}, "window", sliding_window=4),
    pair("Mistral", _LLAMA, "windowed", first={"sliding_window": None}, sliding_window=4),
    pair("Granite", _LLAMA, "multiplier", first={"residual_multiplier": 1.0}, residual_multiplier=0.3),
    pair("Mixtral", {**_LLAMA, "num_local_experts": 3}, "experts for a token", first={"num_experts_per_tok": 2},
         num_experts_per_tok=1),
    pair("Mixtral", {**_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}, "results that only A has",
         may_refuse=False, first={"output_router_logits": True}, output_router_logits=False),
    pair("Qwen3Moe", {**_LLAMA, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6},
         "shares of experts", first={"norm_topk_prob": False}, norm_topk_prob=True),
    pair("OPT", dict(vocab_size=17, hidden_size=8, ffn_dim=10, num_hidden_layers=2, num_attention_heads=2,
                     max_position_embeddings=64, word_embed_proj_dim=8), "norm before", do_layer_norm_before=False),
    pair("Roberta", {**_BERT, "pad_token_id": 1}, "padding", kind="ForMaskedLM", pad_token_id=3),
    pair("Llama", _LLAMA, "tied", first={"tie_word_embeddings": True}, tie_word_embeddings=False),
    pair("Llama", _LLAMA, "untied", tie_word_embeddings=True),
    llama("names", may_refuse=False, use_cache=False, id2label={0: "no", 1: "yes"},
          attention_dropout=0.3, initializer_range=0.5, dtype="bfloat16"),
    llama("longer", may_refuse=False, max_position_embeddings=128),
    llama("tokens", may_refuse=False, bos_token_id=1, eos_token_id=2, pad_token_id=None),
    bert("bert dropout", may_refuse=False, hidden_dropout_prob=0.5, use_cache=False),
    gpt2("gpt2 dropout", may_refuse=False, attn_pdrop=0.4, summary_type="mean"),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("pairs", TRAPS))
def test_pairs(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)


def refused(a: t.PreTrainedModel, b: t.PreTrainedModel, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of a merge of two models that it refuses."""
    a.save_pretrained(folder / "a")
    b.save_pretrained(folder / "b")
    capsys.readouterr()
    assert run("merge", folder / "a", folder / "b", "-o", folder / "out", "--match", "none", "--quiet") == 2
    assert not (folder / "out").exists()
    return capsys.readouterr().err


def test_labels_in_another_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No code reads their names; rows of the classifier are merged by their numbers."""
    names = ["bad", "fair", "good"]
    models = [t.BertForSequenceClassification(t.BertConfig(**_BERT, id2label=dict(enumerate(order))))
              for order in (names, [*reversed(names)])]  # fmt: skip
    assert "id2label gives bad the number 0 in" in refused(*models, tmp_path, capsys)


def test_another_token_that_a_decoder_begins_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a call with labels has the model begin by itself."""
    sizes = dict(vocab_size=17, d_model=16, d_ff=10, d_kv=4, num_layers=2, num_heads=2)
    models = [t.T5ForConditionalGeneration(t.T5Config(**sizes, decoder_start_token_id=n)) for n in (0, 5)]
    assert "decoder_start_token_id is 0 in" in refused(*models, tmp_path, capsys)


@pytest.mark.parametrize("order", [1, -1])
def test_layers_of_another_kind(order: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list of numbers says which layers have experts, in models of one depth."""
    sizes = {**_LLAMA, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    models = [t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**sizes, mlp_only_layers=layers)) for layers in ([], [0])]
    assert "compute differently: mlp_only_layers is [" in refused(*models[::order], tmp_path, capsys)
