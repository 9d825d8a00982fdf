"""From a config to a graph, without weights; and what the graph shows."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_bert, tiny_gpt2, tiny_llama, tiny_vit

from hf_align.errors import IncompatibleModels
from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.groups import (
    GeneralLinear,
    Orthogonal,
    OrthogonalFixingOnesUpToSign,
    Permutation,
    PermutationUpToSign,
    RotaryCommutant,
    ScaledPermutation,
    SignedPermutation,
)
from hf_align.symmetry.rules.composites import attention
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.execute import execute
from hf_align.tracing.ops import op_name
from hf_align.tracing.small.shrink import shrink
from hf_align.tracing.trace import trace


def groups(spec: SymmetrySpec) -> dict[str, str]:
    return {name: s.group.name if s.group else "Identity" for name, s in spec.spaces.items()}


def test_a_large_architecture_takes_no_memory() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    program = trace(config)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(torch.Size(s).numel() for s in program.shapes.values()) > 6e8
    assert after - before < 500_000  # KiB; the weights would be 2.6 GB


def test_norms_and_softmax_stay_whole() -> None:
    ops = [op_name(n) for n in trace(tiny_gpt2()).graph.nodes if n.op == "call_function"]
    assert ops.count("layer_norm") == 3
    assert ops.count("softmax") == 1
    assert "scaled_dot_product_attention" not in ops


def test_the_graph_computes_what_the_model_does() -> None:
    torch.manual_seed(0)
    config = tiny_llama(num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    program = trace(config)
    ids = torch.randint(11, (2, 7))
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(execute(program, dict(model.named_parameters()), {"input_ids": ids}), expected)


def test_tied_weights_appear_once() -> None:
    program = trace(tiny_gpt2(tie_word_embeddings=True))
    assert program.ties == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in program.shapes


def test_llama() -> None:
    spec = derive(trace(tiny_llama(num_attention_heads=4, num_key_value_heads=2)))
    attention = "model.layers.0.self_attn"
    assert {n: type(s.group) for n, s in spec.spaces.items()} == {
        "residual": Orthogonal,
        f"{attention}.heads": Permutation,
        f"{attention}.subheads": Permutation,
        f"{attention}.qk": RotaryCommutant,
        f"{attention}.value": GeneralLinear,
        "model.layers.0.mlp.hidden": ScaledPermutation,
    }
    assert all(spec.spaces[f"{attention}.{s}"].index == (f"{attention}.heads",) for s in ("subheads", "qk", "value"))


def test_layer_norm_models_keep_rotations_that_fix_the_mean() -> None:
    for config in (tiny_gpt2(), tiny_vit()):
        assert OrthogonalFixingOnesUpToSign in {type(s.group) for s in derive(trace(config)).spaces.values()}


def test_a_tied_head_and_a_post_norm_leave_discrete_residuals() -> None:
    tied = derive(trace(tiny_llama(tie_word_embeddings=True)))
    assert SignedPermutation in {type(s.group) for s in tied.spaces.values()}
    for config in (tiny_gpt2(tie_word_embeddings=True), tiny_bert()):
        residual = {type(s.group) for n, s in derive(trace(config)).spaces.items() if n.endswith("residual")}
        assert residual == {PermutationUpToSign}


@pytest.mark.parametrize("model_type", ["llama", "gptj", "phi"])
def test_rotary_embedding_is_recognised_however_it_is_written(model_type: str) -> None:
    """Half-split (llama), interleaved and partial (gptj), half-split and partial (phi)."""
    sizes = {
        "llama": dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1,
                      intermediate_size=6, vocab_size=11),
        "gptj": dict(n_embd=16, n_head=2, n_layer=1, rotary_dim=4, vocab_size=11, n_inner=6, n_positions=16),
        "phi": dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1,
                    intermediate_size=6, vocab_size=11),
    }  # fmt: skip
    expected = {"llama": (4, 0), "gptj": (2, 0), "phi": (2, 0)}
    config = transformers.AutoConfig.for_model(model_type, **sizes[model_type])
    rotary = [s.group for s in derive(trace(config)).spaces.values() if isinstance(s.group, RotaryCommutant)]
    assert [(len(g.rotations.planes), len(g.rotations.still)) for g in rotary] == [expected[model_type]]


def test_every_bound_says_why() -> None:
    spec = derive(trace(tiny_llama()))
    reasons = spec.spaces["residual"].reasons
    assert any(r.role == "norm" and r.line.startswith("modeling_llama.py:") for r in reasons)
    assert any(r.module == "model.layers.0.input_layernorm" for r in reasons)


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(IncompatibleModels, match="NoSuchModel"):
        build_without_weights(tiny_llama(architectures=["NoSuchModel"]))


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped", "masked", "biased", "scaled"])
def test_attention_written_out_is_what_torch_computes(kind: str) -> None:
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, t, 4, generator=rng) for n, t in ((4, 3), (4, 5), (4, 5)))
    changes: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "grouped": {"enable_gqa": True},
        "masked": {"attn_mask": torch.arange(5) < torch.tensor([[2], [5], [1]])},
        "biased": {"attn_mask": torch.randn(2, 1, 3, 5, generator=rng)},
        "scaled": {"scale": 0.3},
    }
    if kind == "grouped":
        key, value = key[:, :2], value[:, :2]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, **changes[kind])
    torch.testing.assert_close(attention(query, key, value, **changes[kind]), expected)


@pytest.mark.slow
def test_a_mask_that_hides_everything_is_not_taken_for_one() -> None:
    """Where `eager` attention gets zeros and infinities, this model reads them as ones and zeros."""
    config = transformers.AutoConfig.for_model("nemotron_asr_streaming_encoder")
    config.architectures = ["NemotronAsrStreamingEncoder"]
    program = trace(shrink(config))
    assert "_safe_softmax" in {op_name(n) for n in program.graph.nodes}
    assert "scaled_dot_product_attention" not in {op_name(n) for n in program.graph.nodes}
    rng = torch.Generator().manual_seed(0)
    weights, inputs = random_weights(derive(program), rng), random_inputs(program, rng)
    assert execute(program, weights, inputs).isfinite().all()


class Filled(transformers.PreTrainedModel):
    """Makes its table empty and fills it afterwards; `how` says with what."""

    config_class = transformers.BertConfig

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(11, 4)
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.table.copy_(torch.arange(4.0) if config.how != "weight" else self.embed.weight[0])
        if config.how == "twice":
            self.table.mul_(2)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids) * self.table


def filled(how: str) -> transformers.PretrainedConfig:
    return transformers.BertConfig(how=how, architectures=["Filled"])


def test_a_table_that_is_made_empty_and_then_filled_has_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_align.tracing.build.transformers.Filled", Filled, raising=False)
    torch.testing.assert_close(build_without_weights(filled("once")).table, torch.arange(4.0))


@pytest.mark.parametrize("how", ["weight", "twice"])
def test_a_table_is_not_taken_for_what_it_was_once_filled_with(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_align.tracing.build.transformers.Filled", Filled, raising=False)
    with pytest.raises(IncompatibleModels, match="the buffer table"):
        build_without_weights(filled(how))


class Transposed(transformers.PreTrainedModel):
    """Adds a constant that lies in memory another way than as it is read."""

    config_class = transformers.BertConfig

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(11, 6)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        table = torch.arange(6.0).view(2, 3).t()
        table = table.contiguous().view(6) if self.config.how == "contiguous" else table.clone().t().reshape(6)
        values = torch.zeros(2, 3).t().contiguous()
        values[0] = self.embed(input_ids)[0, 0, :2]
        return self.embed(input_ids) * table + values.view(6)


@pytest.mark.parametrize("how", ["contiguous", "copied"])
def test_constants_lie_in_memory_as_in_a_run(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_align.tracing.build.transformers.Transposed", Transposed, raising=False)
    program = trace(transformers.BertConfig(how=how, vocab_size=11, architectures=["Transposed"]))
    rng = torch.Generator().manual_seed(0)
    weights, inputs = random_weights(derive(program), rng), random_inputs(program, rng)
    assert execute(program, weights, inputs).isfinite().all()


class Noisy(transformers.PreTrainedModel):
    """Draws twice with the same odds, and scales by the same table twice."""

    config_class = transformers.BertConfig

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(11, 64)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        odds, values = torch.full((64,), 0.5), self.embed(input_ids)
        values.new_empty(64).copy_(values[0, 0])  # so that tables are computed anew of what they were made of
        return values * odds.cos() * odds.cos() * torch.bernoulli(odds) * torch.bernoulli(odds)


def test_what_is_made_alike_of_constants_is_computed_once_but_noise_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_align.tracing.build.transformers.Noisy", Noisy, raising=False)
    program = trace(transformers.BertConfig(vocab_size=11, architectures=["Noisy"]))
    cosines, noise = ([v for n, v in program.constants.items() if op_name(n) == op] for op in ("cos", "bernoulli"))
    assert len(cosines) == len(noise) == 2
    assert cosines[0] is cosines[1]
    assert not noise[0].equal(noise[1])


def test_memory_that_every_layer_makes_is_one_constant() -> None:
    config = transformers.AutoConfig.for_model(
        "deepseek_v3", vocab_size=11, hidden_size=8, intermediate_size=6, num_attention_heads=2, num_key_value_heads=2,
        moe_intermediate_size=4, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, kv_lora_rank=5,
        q_lora_rank=5, qk_rope_head_dim=4, v_head_dim=3, qk_nope_head_dim=3, first_k_dense_replace=1, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, num_hidden_layers=3,
    )  # fmt: skip
    cloned = [value for node, value in trace(config).constants.items() if op_name(node) == "clone"]
    keys = [value for value in cloned if value.shape[-1] == 7]
    assert len(keys) == 3 and len(set(map(id, keys))) == 1


class Late(transformers.PreTrainedModel):
    """Makes its table empty, and fills it where a model is initialised; `how` says with what."""

    config_class = transformers.BertConfig

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(11, 4)
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if module is self and self.config.how != "never":
            self.table.copy_(self.embed.weight[0] if self.config.how == "weight" else torch.arange(4.0))
        if module is self and self.config.how == "scaled":
            self.table.mul_(self.embed.weight[0])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids) * self.table


def late(how: str) -> transformers.PretrainedConfig:
    return transformers.BertConfig(how=how, architectures=["Late"])


def test_a_table_that_is_filled_when_a_model_is_loaded_has_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_align.tracing.build.transformers.Late", Late, raising=False)
    torch.testing.assert_close(build_without_weights(late("once")).table, torch.arange(4.0))


@pytest.mark.parametrize("how", ["never", "weight", "scaled"])
def test_a_table_that_nothing_known_fills_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_align.tracing.build.transformers.Late", Late, raising=False)
    with pytest.raises(IncompatibleModels, match="the buffer table"):
        build_without_weights(late(how))
