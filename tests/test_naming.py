"""Names and layouts: what is read is what transformers loads, and what is written is what the file held."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import run, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.conversion import Conversion
from hf_align.checkpoints.naming import DiskWeights, NamedWeights, Names, match_names
from hf_align.errors import CheckpointError
from hf_align.tracing.build import build_without_weights

transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = dict(
    vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, max_position_embeddings=16, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=6, shared_expert_intermediate_size=10, num_experts=12, num_experts_per_tok=2
)
LATENT: dict[str, Any] = dict(
    first_k_dense_replace=1, moe_intermediate_size=6, n_routed_experts=12, num_experts_per_tok=2, n_group=1,
    topk_group=1, kv_lora_rank=4, q_lora_rank=4, qk_rope_head_dim=2, qk_nope_head_dim=4, v_head_dim=4, head_dim=2,
    num_key_value_heads=2,
)  # fmt: skip


def tiny_mixtral(**changes: object) -> PretrainedConfig:
    # More than ten experts: their order on disk is by number, not by letters.
    # grouped_mm wants rows of 16 bytes.
    sizes = dict(num_local_experts=12, intermediate_size=8, num_experts_per_tok=2, architectures=["MixtralForCausalLM"])
    return transformers.MixtralConfig(**{**SIZES, **sizes, **changes})


CONFIGS = {
    "mixtral": tiny_mixtral(),
    "qwen2_moe": transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, architectures=["Qwen2MoeForCausalLM"]),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, architectures=["Qwen3MoeForCausalLM"]),
    "deepseek_v3": transformers.DeepseekV3Config(**{**SIZES, **LATENT}, architectures=["DeepseekV3ForCausalLM"]),
    "llama": tiny_llama(),
    "tied llama": tiny_llama(tie_word_embeddings=True),
    "gpt2": tiny_gpt2(tie_word_embeddings=True),
    "bert": tiny_bert(),
    "vit": tiny_vit(),
    "t5": transformers.T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=6, num_layers=2, num_heads=2,
                                architectures=["T5ForConditionalGeneration"]),
    "dinov2": transformers.Dinov2Config(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2,
                                        use_swiglu_ffn=True, image_size=4, patch_size=2, architectures=["Dinov2Model"]),
    "dinov3": transformers.DINOv3ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=4,
                                           intermediate_size=6, patch_size=2, architectures=["DINOv3ViTModel"]),
    "nomic_bert": transformers.NomicBertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                                               intermediate_size=6, architectures=["NomicBertModel"]),
}  # fmt: skip
FUSED = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
CONVERTED = (*FUSED, "nomic_bert", "dinov2", "dinov3")


def saved(config: PretrainedConfig, folder: Path, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model with random weights and buffers, in a folder."""
    torch.manual_seed(seed)
    model = getattr(transformers, config.architectures[0])(config)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor)
    model.save_pretrained(folder, **options)
    return model


def opened(folder: Path, config: PretrainedConfig) -> tuple[Checkpoint, Names, dict[str, str]]:
    built = build_without_weights(config)
    kept = {id(p): name for name, p in reversed(list(built.named_parameters()))}
    ties = {n: kept[id(p)] for n, p in built.named_parameters(remove_duplicate=False) if kept[id(p)] != n}
    checkpoint = Checkpoint.open(folder)
    return checkpoint, match_names(built, checkpoint, ties, {}), ties


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_round_trip(model: PreTrainedModel, folder: Path) -> None:
    checkpoint, names, ties = opened(folder, model.config)
    assert not names.missing and not names.unused
    weights = NamedWeights(checkpoint, names)
    expected = {n: t for n, t in model.state_dict().items() if n not in ties}
    assert {n: weights.stored(n).shape for n in weights} == {n: t.shape for n, t in expected.items()}
    assert_equal(dict(weights), expected)
    parameters = [n for n, _ in model.named_parameters()]
    disk = DiskWeights(checkpoint, names, weights.__getitem__, parameters)
    assert_equal(dict(disk), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("family", CONFIGS)
def test_round_trip(family: str, tmp_path: Path) -> None:
    assert_round_trip(saved(CONFIGS[family], tmp_path), tmp_path)


@pytest.mark.parametrize("family", CONVERTED)
def test_round_trip_of_what_is_stored_as_in_memory(family: str, tmp_path: Path) -> None:
    model = saved(CONFIGS[family], tmp_path, save_original_format=False)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    assert_round_trip(model, tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "bert"])
def test_round_trip_of_a_base_model_saved_alone(family: str, tmp_path: Path) -> None:
    model = saved(copy.deepcopy(CONFIGS[family]), tmp_path / "whole")
    base = getattr(model, model.base_model_prefix)
    base.save_pretrained(tmp_path)  # which notes in the config that it is a base model
    checkpoint, names, _ = opened(tmp_path, CONFIGS[family])
    assert all(not n.startswith(model.base_model_prefix) for n in names.missing)
    weights = NamedWeights(checkpoint, names)
    expected = {f"{model.base_model_prefix}.{n}": t for n, t in base.state_dict().items()}
    assert_equal({n: weights[n] for n in expected}, expected)
    disk = DiskWeights(checkpoint, names, weights.__getitem__, [n for n, _ in model.named_parameters()])
    assert_equal(dict(disk), load_file(tmp_path / "model.safetensors"))


def test_half_precision_stays_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIGS["mixtral"]
    model = transformers.MixtralForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path)
    checkpoint, names, _ = opened(tmp_path, config)
    weights = NamedWeights(checkpoint, names)
    assert_equal(dict(weights), {n: t.float() for n, t in model.state_dict().items()})
    fused = weights.stored("model.layers.0.mlp.experts.gate_up_proj")
    assert (fused.dtype, fused.shape, fused.nbytes) == (torch.bfloat16, (12, 16, 8), 2 * 12 * 16 * 8)
    file = load_file(tmp_path / "model.safetensors")
    assert_equal(dict(DiskWeights(checkpoint, names, weights.__getitem__, list(weights))), file)
    doubled = DiskWeights(checkpoint, names, weights.__getitem__, list(weights), torch.float64)
    assert_equal(dict(doubled), {n: t.double() for n, t in file.items()})


def test_only_what_is_needed_is_read_and_each_tensor_is_made_once(tmp_path: Path) -> None:
    model = saved(CONFIGS["qwen3_moe"], tmp_path)
    checkpoint, names, _ = opened(tmp_path, model.config)
    read: list[str] = []

    class Watched(Checkpoint):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    watched = Watched(tmp_path, {n: checkpoint.info(n) for n in checkpoint})
    weights = NamedWeights(watched, names)
    for name in weights:
        weights.stored(name)
    assert not read
    _ = weights["model.layers.1.mlp.experts.down_proj"]
    assert sorted(read) == sorted(f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in range(12))
    made: Counter[str] = Counter()
    held = 0

    def produce(name: str) -> Tensor:
        made[name] += 1
        return weights[name]

    disk = DiskWeights(checkpoint, names, produce, list(weights))
    for name in sorted(disk):
        _ = disk[name]
        held = max(held, len(disk._waiting))
    assert set(made.values()) == {1} and made.keys() == weights.keys()
    assert 0 < held < 3 * 12 and not disk._waiting


# Ties --------------------------------------------------------------------------------------------------------------


def store_twice(folder: Path, name: str, other: str, offset: float = 0.0) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[other] = tensors[name] + offset
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_tied_weight_that_is_stored_twice(tmp_path: Path) -> None:
    for seed in (0, 1):
        saved(CONFIGS["tied llama"], tmp_path / str(seed), seed)
        store_twice(tmp_path / str(seed), "model.embed_tokens.weight", "lm_head.weight")
    merge(tmp_path, "--tie-word-embeddings")
    file = load_file(tmp_path / "out" / "model.safetensors")
    assert file.keys() == load_file(tmp_path / "0" / "model.safetensors").keys()
    assert torch.equal(file["lm_head.weight"], file["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_whichever_of_tied_weights_is_stored_stands_in_for_both(name: str, tmp_path: Path) -> None:
    """Where they are aligned apart; classes name either as the one that is kept (`DabDetrForObjectDetection`)."""
    saved(CONFIGS["tied llama"], tmp_path / "0", 0)
    tensors = load_file(tmp_path / "0" / "model.safetensors")
    tensors[name] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "0" / "model.safetensors")
    checkpoint = Checkpoint.of_file(tmp_path / "0", "model.safetensors")
    apart = build_without_weights(tiny_llama(tie_word_embeddings=False))
    found = match_names(apart, checkpoint, {}, {"lm_head.weight": "model.embed_tokens.weight"})
    links = found.by_memory()
    assert not found.missing
    assert {links[each].sources for each in ("model.embed_tokens.weight", "lm_head.weight")} == {(name,)}


@pytest.mark.parametrize("options", [["--tie-word-embeddings"], [], ["--match", "none", "--method", "circuits"]])
def test_a_tied_weight_stored_twice_with_two_values_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the models are aligned with heads apart, which the witness refused without saying why."""
    for seed in (0, 1):
        saved(CONFIGS["tied llama"], tmp_path / str(seed), seed)
    store_twice(tmp_path / "1", "model.embed_tokens.weight", "lm_head.weight", 1.0)
    assert run("merge", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "out", *options) == 2
    assert "and they differ" in capsys.readouterr().err


def test_an_untied_head_is_written_beside_the_layout_of_the_checkpoint(tmp_path: Path) -> None:
    for seed in (0, 1):
        saved(tiny_mixtral(tie_word_embeddings=True), tmp_path / str(seed), seed)
    merge(tmp_path, "--untie-word-embeddings")
    before = load_file(tmp_path / "0" / "model.safetensors").keys()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {*before, "lm_head.weight"}


# Merges ------------------------------------------------------------------------------------------------------------


def merge(folder: Path, *options: object) -> PreTrainedModel:
    """The merge of the models in "0" and "1", written to "out"; it loads whole."""
    assert run("merge", folder / "0", folder / "1", "-o", folder / "out", "--quiet", *options) == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


def test_mixtrals_merge_into_the_layout_of_the_first(tmp_path: Path) -> None:
    models = [saved(tiny_mixtral(), tmp_path / str(seed), seed) for seed in (0, 1)]
    merged = merge(tmp_path, "--match", "none", "--max-shard-size", "5KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    headers = [Checkpoint.open(tmp_path / name) for name in ("0", "out")]
    assert len(set(index["weight_map"].values())) > 2
    assert headers[0].keys() == headers[1].keys()
    assert any(".experts.11.w3." in name for name in headers[1])
    for name in headers[0]:
        infos = [header.info(name) for header in headers]
        assert (infos[0].shape, infos[0].dtype) == (infos[1].shape, infos[1].dtype)
    first, second = (model.state_dict() for model in models)
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)


def test_a_mixtral_merged_with_itself(tmp_path: Path) -> None:
    model = saved(tiny_mixtral(), tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    ids = torch.randint(11, (3, 10), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(merge(tmp_path)(ids).logits, model.eval()(ids).logits, atol=1e-4, rtol=1e-4)
    shutil.rmtree(tmp_path / "out")
    merge(tmp_path, "--match", "none", "--weight", 0.3)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("0", "out")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor)


def test_a_mixtral_stored_as_in_memory_merges_with_one_that_is_not(tmp_path: Path) -> None:
    saved(tiny_mixtral(), tmp_path / "0", 0)
    saved(tiny_mixtral(), tmp_path / "1", 1, save_original_format=False)
    merge(tmp_path)
    assert Checkpoint.open(tmp_path / "out").keys() == Checkpoint.open(tmp_path / "0").keys()


# What does not convert ---------------------------------------------------------------------------------------------


def test_a_lost_expert_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        saved(tiny_mixtral(), tmp_path / str(seed), seed)
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, tmp_path / "1" / "model.safetensors", {"format": "pt"})
    assert run("merge", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "out", "--quiet") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "model.layers.1.mlp.experts.gate_up_proj cannot be made from" in error[0]
    assert not (tmp_path / "out").exists()


def test_experts_stored_fused_and_one_by_one_at_once_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["mixtral"]
    saved(config, tmp_path)
    saved(config, tmp_path / "fused", save_original_format=False)
    both = load_file(tmp_path / "model.safetensors") | load_file(tmp_path / "fused" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({**both, name: both[name] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    assert name in {n for n, _, _ in opened(tmp_path, config)[1].twice()}
    assert run("merge", tmp_path, tmp_path, "-o", tmp_path / "out") == 2


def test_what_the_architecture_does_not_load_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        saved(tiny_llama(), tmp_path / str(seed), seed)
    store_twice(tmp_path / "0", "model.norm.weight", "model.layers.7.extra")
    assert run("merge", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "out") == 0
    assert "model.layers.7.extra" in capsys.readouterr().err
    files = [load_file(tmp_path / n / "model.safetensors").keys() for n in ("out", "1")]
    assert files[0] == files[1]


class OneWay(Transpose):
    @property
    def reverse_op(self) -> Transpose:
        raise NotImplementedError("one way")


@pytest.mark.parametrize(
    ("operation", "sources", "shapes", "message"),
    [
        (OneWay(0, 1), ["a"], [(2, 3)], "no reverse of OneWay"),
        (Concatenate(0), ["a", "b"], [(2, 3), (4, 3)], "a would be"),
        (Concatenate(0), ["a", "b"], [(2, 3), (2, 4)], "cannot be made from"),
    ],
)
def test_a_conversion_without_inverse_is_refused(
    operation: Any, sources: list[str], shapes: list[tuple[int, ...]], message: str
) -> None:
    converter = WeightConverter(list(sources), "c", [operation])
    tensors = {n: torch.empty(s, device="meta") for n, s in zip(sources, shapes, strict=True)}
    with pytest.raises(CheckpointError, match=message):
        Conversion.build(
            converter, "c", {n: [n] for n in sources}, build_without_weights(tiny_llama()), tensors.__getitem__, {}
        )
