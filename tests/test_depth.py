"""The spec from two layers of each kind is the spec of the full trace."""

from __future__ import annotations

import logging
import resource
from dataclasses import replace

import pytest
import transformers
from conftest import small, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from forks import forked
from transformers import PretrainedConfig

from hf_align.symmetry.derivation import depth
from hf_align.symmetry.derivation.depth import IrregularLayersError, derive_by_depth, extend
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.derivation.unseen import without_unseen
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing import layers
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.layers import Stack, find_stacks, shorten
from hf_align.tracing.modes import trace_modes
from hf_align.tracing.trace import trace_model


def _decoder(model_type: str, **changes: object) -> PretrainedConfig:
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=6, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=4, max_position_embeddings=16, pad_token_id=0, bos_token_id=0,
                 eos_token_id=0)  # fmt: skip
    return transformers.AutoConfig.for_model(model_type, **{**sizes, **changes})


def _encoder_decoder(model_type: str, name: str) -> PretrainedConfig:
    return transformers.AutoConfig.for_model(
        model_type, vocab_size=11, d_model=8, encoder_layers=6, decoder_layers=5, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=6, decoder_ffn_dim=6, max_position_embeddings=16, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, forced_eos_token_id=0, architectures=[name]
    )  # fmt: skip


CASES: dict[str, tuple[PretrainedConfig, list[int]]] = {
    "llama": (tiny_llama(num_hidden_layers=6), [4]),
    "gpt2, tied": (tiny_gpt2(n_layer=6, tie_word_embeddings=True), [4]),
    "bert: the last norm is another norm's": (tiny_bert(num_hidden_layers=6), [4]),
    "vit": (tiny_vit(num_hidden_layers=6), [4]),
    "mixtral": (_decoder("mixtral", num_local_experts=4), [4]),
    "t5: the first layer holds the bias of all": (
        transformers.T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=6, num_layers=6, num_heads=2,
                              architectures=["T5EncoderModel"]), [5]),
    "mbart: every decoder layer reads the encoder's last norm": (
        _encoder_decoder("mbart", "MBartForConditionalGeneration"), [4, 4]),
    "gemma2: kinds alternate": (_decoder("gemma2", num_hidden_layers=9, sliding_window=4), [7]),
    "smollm3: every fourth layer has no positions": (_decoder("smollm3", num_hidden_layers=14), [10]),
    "deepseek: dense layers, then experts": (
        _decoder("deepseek_v3", num_hidden_layers=9, num_key_value_heads=2, moe_intermediate_size=4,
                 n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, kv_lora_rank=5, q_lora_rank=5,
                 qk_rope_head_dim=4, v_head_dim=3, qk_nope_head_dim=3, first_k_dense_replace=3), [7]),
}  # fmt: skip


def in_full(config: PretrainedConfig) -> SymmetrySpec:
    """Of all layers in all modes."""
    model = build_without_weights(config)
    return without_unseen(derive(trace_modes(model)), model=model)


def in_order(spec: SymmetrySpec) -> list[list[object]]:
    return [
        list(spec.spaces.items()),
        list(spec.pinned.items()),
        list(spec.parameters.items()),
        list(spec.ties.items()),
        list(spec.gauges),
    ]


SLOW = ("mixtral", "smollm3: every fourth layer has no positions", "deepseek: dense layers, then experts",
        "mbart: every decoder layer reads the encoder's last norm")  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES])
def test_equals_the_full_trace(case: str, caplog: pytest.LogCaptureFixture) -> None:
    config, traced = CASES[case]
    before = config.to_dict()
    assert [len(s.chosen) for s in find_stacks(build_without_weights(config))] == traced
    spec, whole = derive_by_depth(config), in_full(config)
    assert "in full" not in caplog.text
    assert spec == whole
    assert in_order(spec) == in_order(whole)
    assert config.to_dict() == before


def test_a_place_in_a_list_may_be_empty() -> None:
    """Behind the last layer of Informer's encoder there is no convolution."""
    config = small("informer", "InformerModel")
    assert derive_by_depth(config) == in_full(config)


def test_a_layer_keeps_the_settings_of_its_place() -> None:
    """Shortened, the lists of the config and the numbers of the layers still belong together."""
    config = _decoder("smollm3", num_hidden_layers=14, no_rope_layers=[1, 1, 1, 0] * 3 + [1, 1])
    model = build_without_weights(config)
    stacks = find_stacks(model)
    shorten(model, stacks)
    left = model.get_submodule("model.layers")
    assert [layer.self_attn.layer_idx for layer in left] == list(range(len(stacks[0].chosen)))  # type: ignore[union-attr]
    assert [layer.self_attn.use_rope for layer in left] == model.config.no_rope_layers  # type: ignore[union-attr]


def test_what_stays_keeps_its_neighbourhood() -> None:
    for kinds in ("a" * 40, "aaab" * 10, "ab" * 20, "aaa" + "b" * 58, "aaaaab" * 10 + "aa", "abcdefgh"):
        numbers = tuple(map(ord, kinds))
        stack = layers._stack("layers", numbers)
        around = list(zip([None, *numbers], numbers, [*numbers[1:], None], strict=False))
        left = [numbers[i] for i in stack.chosen]
        assert list(zip([None, *left], left, [*left[1:], None], strict=False)) == [around[i] for i in stack.chosen]
        assert all(around[i] == around[s] and s in stack.chosen for i, s in enumerate(stack.source))
        kept = [around[i] for i in stack.chosen]
        assert all(kept.count(a) >= min(2, around.count(a)) for a in around)
    assert layers._stack("layers", (0,) * 61).chosen == (0, 1, 2, 60)


def test_layers_that_differ_are_traced_in_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Taken for one kind, layers with and without positions do not pass for each other."""
    config = _decoder("smollm3", num_hidden_layers=8, no_rope_layers=[1, 1, 0, 0, 0, 0, 0, 1])
    monkeypatch.setattr(layers, "_kinds", lambda layers, model: (0,) * len(layers))
    with caplog.at_level(logging.WARNING, logger=depth.__name__):
        spec = derive_by_depth(config)
    assert "smollm3 is traced in full: " in caplog.text
    assert spec == in_full(config)


def test_an_extension_that_does_not_fit_the_model_is_refused() -> None:
    model = build_without_weights(tiny_llama(num_hidden_layers=6))
    whole, stacks = inventory(model), find_stacks(model)
    shorten(model, stacks)
    short = derive(trace_model(model))
    name = "model.layers.3.mlp.up_proj.weight"
    with pytest.raises(IrregularLayersError, match=r"up_proj.weight is \[7, 8\] but extends to \[6, 8\]"):
        extend(short, stacks, replace(whole, shapes={**whole.shapes, name: (7, 8)}))
    with pytest.raises(IrregularLayersError, match=r"layers\.3\.new has no counterpart in model\.layers\.1"):
        extend(short, stacks, replace(whole, shapes={**whole.shapes, "model.layers.3.new": (7,)}))


def test_weights_that_layers_share_keep_the_stack_whole() -> None:
    model = build_without_weights(tiny_llama(num_hidden_layers=6))
    assert [s.path for s in find_stacks(model)] == ["model.layers"]
    stack = model.get_submodule("model.layers")
    stack[3].mlp.up_proj.weight = stack[1].mlp.up_proj.weight  # type: ignore[index, union-attr]
    assert find_stacks(model) == ()


def test_names_of_a_stack() -> None:
    stack = Stack("model.layers", (0, 1), (0, 1))
    assert stack.layer("model.layers.10.mlp.weight") == (10, "mlp.weight")
    assert stack.layer("model.layers.3") == (3, "")
    assert stack.layer("model.layers_norm.weight") is None
    assert stack.layer("other.model.layers.3") is None


def derive_llama_7b() -> None:
    spec = derive_by_depth(transformers.LlamaConfig())
    assert len(spec.parameters) == 291 and spec.shape("model.layers.31.mlp.down_proj.weight") == (4096, 11008)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def test_a_true_size_needs_neither_time_nor_memory() -> None:
    """Llama 7B in a process of its own: `benchmarks/size.py` measures more."""
    done = forked(derive_llama_7b)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 2**20  # KiB


def test_a_layer_that_a_call_asks_for_by_its_number_is_there() -> None:
    sizes = dict(hidden_size=8, intermediate_size=6, num_hidden_layers=8, num_attention_heads=2)
    text = dict(model_type="llama", vocab_size=11, max_position_embeddings=48, pad_token_id=0, bos_token_id=0,
                eos_token_id=0, **{**sizes, "num_hidden_layers": 1})  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=dict(model_type="clip_vision_model", image_size=8, patch_size=4, **sizes),
        text_config=text, image_token_index=10, image_token_id=10, vision_feature_layer=7,
        architectures=["LlavaForConditionalGeneration"],
    )  # fmt: skip
    spec = derive_by_depth(config)
    assert "input_ids with image" in spec.modes
    assert not spec.unread
