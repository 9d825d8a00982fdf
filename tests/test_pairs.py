"""Two models of one class whose configs differ: refused by the field that makes a difference, or aligned exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import Tiny, run, save, tiny_bert, tiny_gpt2, tiny_llama, tiny_t5, tiny_vit
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import IncompatibleModels
from hf_align.opening import variant
from hf_align.opening.agreement import _is_same_code, require_alike, require_same_function
from hf_align.opening.dropout import differ_in_dropout_alone
from hf_align.tracing.fields import Readers
from hf_align.tracing.mode import Mode
from hf_align.tracing.program import Program

Change = dict[str, object]


def tiny(name: str, head: str = "ForCausalLM", **fixed: object) -> Tiny:
    """Configs of a class, in sizes that most classes share."""
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
                 eos_token_id=2, tie_word_embeddings=False)  # fmt: skip

    def build(**changes: object) -> PretrainedConfig:
        config = getattr(transformers, f"{name}Config")
        values = {**sizes, "architectures": [f"{name}{head}"], **fixed, **changes}
        return config(**{k: v for k, v in values.items() if v is not None or k not in sizes})

    return build


mistral, smollm, gemma, gemma2, granite = (
    tiny("Mistral"),
    tiny("SmolLM3", no_rope_layers=[1, 0]),
    tiny("Gemma"),
    tiny("Gemma2", layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=4),
    tiny("Granite"),
)
mixtral = tiny("Mixtral", num_local_experts=2, num_experts_per_tok=1)
granite_experts = tiny("GraniteMoe", head_dim=None, num_local_experts=2, num_experts_per_tok=1)
crossed = tiny("Bert", "LMHeadModel", head_dim=None, is_decoder=True, add_cross_attention=True)
heard = tiny("Wav2Vec2", "ForCTC", head_dim=None, conv_dim=(4, 4), conv_stride=(5, 4), conv_kernel=(10, 6),
             num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)  # fmt: skip
neox = tiny("GPTNeoX", rotary_pct=0.5)
phi = tiny("Phi", head_dim=None, num_key_value_heads=2)
modernbert = tiny("ModernBert", "ForMaskedLM", head_dim=None, global_attn_every_n_layers=2)

blocks = tiny("BigBird", "ForMaskedLM", head_dim=None, block_size=4, num_random_blocks=1)


def tiny_opt(**changes: object) -> PretrainedConfig:
    sizes = dict(vocab_size=11, hidden_size=8, ffn_dim=6, num_hidden_layers=2, num_attention_heads=2,
                 max_position_embeddings=16, word_embed_proj_dim=8, pad_token_id=1)  # fmt: skip
    return transformers.OPTConfig(**{**sizes, "architectures": ["OPTForCausalLM"], **changes})


def tiny_llava(vision: Change | None = None, **changes: object) -> PretrainedConfig:
    text = tiny_llama(num_hidden_layers=2).to_dict()
    sizes = dict(hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2, image_size=8,
                 patch_size=4, projection_dim=8)  # fmt: skip
    tower = transformers.CLIPVisionConfig(**{**sizes, **(vision or {})})
    return transformers.LlavaConfig(**{"vision_config": tower, "text_config": text, "image_token_index": 10,
                                       "architectures": ["LlavaForConditionalGeneration"], **changes})  # fmt: skip


def rope(kind: str, theta: float = 1e4, **more: object) -> Change:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def long_rope(*factors: float) -> Change:
    return rope("longrope", original_max_position_embeddings=32, short_factor=[1.0, 1.0], long_factor=[*factors])


REFUSED: dict[str, tuple[Tiny, Change, Change, str]] = {
    "activation": (tiny_llama, {}, dict(hidden_act="gelu"), "hidden_act is silu in A, gelu in B"),
    "kind of gelu": (tiny_bert, {}, dict(hidden_act="gelu_new"), "hidden_act is gelu in A, gelu_new in B"),
    "activation, images": (tiny_vit, {}, dict(hidden_act="relu"), "hidden_act"),
    "heads": (tiny_gpt2, {}, dict(n_head=4), "n_head is 2 in A, 4 in B"),
    "heads, encoder": (tiny_bert, {}, dict(num_attention_heads=4), "num_attention_heads"),
    "head size and number": (phi, dict(num_attention_heads=2), dict(num_attention_heads=1, num_key_value_heads=1),
                             "num_attention_heads"),
    "partial rotary": (neox, {}, rope("default", partial_rotary_factor=1.0), "partial_rotary_factor"),
    "theta": (tiny_llama, rope("default"), rope("default", 5e5), "rope_theta is 10000.0 in A, 500000.0 in B"),
    "kind of rotary": (tiny_llama, rope("default"), rope("linear", factor=2.0), "rope_parameters"),
    "dynamic beyond a length": (tiny_llama, dict(max_position_embeddings=4096) | rope("dynamic", factor=2.0),
                                dict(max_position_embeddings=8192) | rope("dynamic", factor=2.0),
                                "max_position_embeddings is 4096 in A, 8192 in B"),
    "dynamic, its factor": (tiny_llama, dict(max_position_embeddings=2**17) | rope("dynamic", factor=2.0),
                            dict(max_position_embeddings=2**17) | rope("dynamic", factor=4.0), "factor is 2.0 in A"),
    "long factors": (tiny_llama, dict(max_position_embeddings=64) | long_rope(1.0, 2.0),
                     dict(max_position_embeddings=64) | long_rope(1.0, 3.0), r"long_factor\[1\] is 2.0 in A, 3.0 in B"),
    "scaling": (tiny_llama, rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=8192),
                rope("llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=8192), "factor is 8.0 in A, 32.0 in B"),
    "layers without rotary": (smollm, {}, dict(no_rope_layers=[0, 1]), r"no_rope_layers\[0\] is 1 in A, 0 in B"),
    "window": (mistral, dict(sliding_window=4), dict(sliding_window=3), "sliding_window is 4 in A, 3 in B"),
    "long window": (mistral, dict(sliding_window=4096), dict(sliding_window=8192), "sliding_window is 4096 in A"),
    "very long window": (mistral, dict(sliding_window=2**17), dict(sliding_window=None), "sliding_window is 131072"),
    "which layers have windows": (gemma2, dict(sliding_window=4096),
                                  dict(sliding_window=4096, layer_types=["full_attention"] * 2), r"layer_types\[0\]"),
    "window of an encoder": (modernbert, dict(local_attention=128), dict(local_attention=64), "local_attention"),
    "blocks of long texts alone": (blocks, {}, dict(attention_type="original_full"), "attention_type is block_sparse"),
    "how many blocks": (blocks, {}, dict(num_random_blocks=2), "num_random_blocks is 1 in A, 2 in B"),
    "eps": (tiny_llama, {}, dict(rms_norm_eps=1e-5), "rms_norm_eps is 1e-06 in A, 1e-05 in B"),
    "eps, LayerNorm": (tiny_vit, {}, dict(layer_norm_eps=1e-5), "layer_norm_eps"),
    "softcap": (gemma2, {}, dict(final_logit_softcapping=20.0), "final_logit_softcapping is 30.0 in A, 20.0 in B"),
    "softcap of attention": (gemma2, {}, dict(attn_logit_softcapping=None), "attn_logit_softcapping is 50.0 in A"),
    "scale of attention": (gemma2, {}, dict(query_pre_attn_scalar=8), "query_pre_attn_scalar is 4 in A, 8 in B"),
    **{name: (granite, {}, {f"{name}_multiplier": 2.0}, f"{name}_multiplier is 1.0 in A, 2.0 in B")
       for name in ("attention", "residual", "embedding")},
    "scale of logits": (granite, {}, dict(logits_scaling=2.0), "logits_scaling"),
    "scale of logits behind other results": (granite_experts, dict(output_router_logits=True, tie_word_embeddings=True),
                                             dict(output_router_logits=True, tie_word_embeddings=True,
                                                  logits_scaling=2.0), "logits_scaling is 1.0 in A, 2.0 in B"),
    "more results, and another activation": (mixtral, dict(output_router_logits=True), dict(hidden_act="gelu"),
                                             "hidden_act is silu in A, gelu in B"),
    "results that only B has": (mixtral, {}, dict(output_router_logits=True), "output_router_logits is False in A"),
    "scale by layer": (tiny_gpt2, dict(n_layer=2), dict(n_layer=2, scale_attn_by_inverse_layer_idx=True),
                       "scale_attn_by_inverse_layer_idx is False in A, True in B"),
    "norm before or after": (tiny_opt, {}, dict(do_layer_norm_before=False), "do_layer_norm_before"),
    "parallel residual": (neox, {}, dict(use_parallel_residual=False), "use_parallel_residual is True in A"),
    "positions by padding": (tiny("Roberta", "ForMaskedLM"), {}, dict(pad_token_id=3), "pad_token_id is 0 in A"),
    "norm that no call runs": (crossed, {}, dict(layer_norm_eps=1e-5), "layer_norm_eps"),
    "mask that no call sets": (heard, {}, dict(apply_spec_augment=False), "apply_spec_augment is True in A"),
    "activation of a tower": (tiny_llava, {}, dict(vision=dict(hidden_act="gelu")), "vision_config.hidden_act"),
    "activation that nothing runs": (tiny_llava, {}, dict(projector_hidden_act="relu"),
                                     "(may )?compute differently: projector_hidden_act"),
    "what is read of a picture": (tiny_llava, {}, dict(vision_feature_select_strategy="full"),
                                  "vision_feature_select_strategy is default in A, full in B"),
    "where a picture stands": (tiny_llava, {}, dict(image_token_index=9), "image_token_(index|id) is 10 in A, 9 in B"),
    "tied, and cannot be otherwise": (tiny_t5, {}, dict(scale_decoder_outputs=False), "scale_decoder_outputs"),
    "classes by other numbers": (tiny_vit, dict(id2label={i: f"x{i}" for i in range(9)}),
                                 dict(id2label={i: f"x{8 - i}" for i in range(9)}),
                                 "id2label gives x0 the number 0 in A, 8 in B"),
    "one class or several": (tiny_vit, dict(problem_type="single_label_classification"),
                             dict(problem_type="multi_label_classification"),
                             "problem_type is single_label_classification in A, multi_label_classification in B"),
    "in other sizes too": (tiny_llama, {}, dict(intermediate_size=9, hidden_act="gelu"), "hidden_act is silu in A"),
    "eps in other sizes": (tiny_llama, {}, dict(intermediate_size=9, rms_norm_eps=1e-5), "rms_norm_eps"),
}  # fmt: skip

ALIKE: dict[str, tuple[Tiny, Change, Change]] = {
    "dropout": (tiny_gpt2, {}, dict(resid_pdrop=0.0, attn_pdrop=0.3, embd_pdrop=0.2)),
    "dropout, encoder": (tiny_bert, {}, dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.3)),
    "tokens": (tiny_llama, {}, dict(bos_token_id=5, eos_token_id=[3, 4], pad_token_id=7)),
    "padding": (tiny_bert, dict(pad_token_id=0), dict(pad_token_id=3)),
    "words for labels": (tiny_vit, {}, dict(id2label={i: f"x{i}" for i in range(9)})),
    "what only one says of its classes": (tiny_vit, {}, dict(problem_type="single_label_classification")),
    "what is returned": (tiny_llama, {}, dict(use_cache=False, output_hidden_states=True)),
    "results that only A has": (mixtral, dict(output_router_logits=True), {}),
    "how it was trained": (tiny_llama, {}, dict(initializer_range=0.5, dtype="float16", anything="else")),
    "length": (tiny_llama, dict(max_position_embeddings=4096), dict(max_position_embeddings=2**17)),
    "length beside a whole number": (tiny_llama, dict(max_position_embeddings=4096) | rope("default", 10_000),
                                     dict(max_position_embeddings=2**17) | rope("default", 10_000.0)),
    "length beside a window": (mistral, dict(sliding_window=4096, max_position_embeddings=2**15),
                               dict(sliding_window=4096, max_position_embeddings=2**17)),
    "windows of no layer": (gemma2, dict(sliding_window=4096, layer_types=["full_attention"] * 2),
                            dict(sliding_window=64, layer_types=["full_attention"] * 2)),
    "scaling that is none": (tiny_llama, rope("default"), rope("default", factor=2.0)),
    "size": (tiny_llama, {}, dict(hidden_size=14, intermediate_size=9)),
    "heads along with size": (tiny_gpt2, {}, dict(n_embd=12, n_head=3)),
    "dropout that no call runs": (crossed, {}, dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.3)),
    "masks of training": (heard, {}, dict(mask_time_prob=0.3, mask_feature_prob=0.1)),
    "dropout beside what no call reads": (heard, {}, dict(final_dropout=0.5)),
    "dropout of a tower": (tiny_llava, {}, dict(vision=dict(attention_dropout=0.3))),
}  # fmt: skip


class Clamped(nn.Module):
    """Hands on most of what it is given."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given.clamp(max=self.most)


class Unwatched(nn.Module):
    """Drops what it is given out by itself, or something like it, with its number in `held`."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.held = share


def model_with(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *parts)


@pytest.mark.parametrize(
    ("kind", "alone"),
    [(nn.Dropout, True), (nn.Dropout1d, True), (nn.AlphaDropout, True), (nn.Threshold, False), (Clamped, False),
     (Unwatched, False), (nn.LeakyReLU, False), (nn.ZeroPad1d, False)],
)  # fmt: skip
def test_what_is_built_otherwise_is_dropout_alone(kind: type[nn.Module], alone: bool) -> None:
    first, second = (kind(*((100 * n, 1) if kind is nn.Threshold else (n,))) for n in (0, 1))
    assert differ_in_dropout_alone(model_with(first).eval(), model_with(second).eval()) == alone
    assert not differ_in_dropout_alone(model_with(first), model_with(first))  # then the field went elsewhere
    assert not differ_in_dropout_alone(model_with(nn.Dropout(0.1), first), model_with(nn.Dropout(0.2))), "one more"
    if kind is not nn.Dropout1d:
        assert differ_in_dropout_alone(model_with(nn.Dropout(0.1), first).eval(),
                                       model_with(nn.Identity(), first).eval())  # fmt: skip


class Asking(nn.Module):
    """Asks for one number while it is built, and for another one later, too."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.dropouts = nn.Dropout(config.once), nn.Dropout(config.again)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * self.config.again


def test_what_is_asked_for_while_a_model_runs_does_not_only_build_it() -> None:
    config, readers = PretrainedConfig(once=0.1, again=0.2), Readers()
    with readers.listening():
        model = Asking(config)
        assert all(readers.builds_alone(config, (name,)) for name in ("once", "again"))
        model(torch.ones(1))
    assert readers.builds_alone(config, ("once",))
    assert not readers.builds_alone(config, ("again",))


DEAR = ("dropout of a tower", "windows of no layer", "length beside a window")
"""Seconds each: many calls are compared, to the end."""


@pytest.mark.parametrize("kind", REFUSED)
def test_the_field_that_makes_a_difference_is_named(kind: str) -> None:
    build, a, b, message = REFUSED[kind]
    with pytest.raises(IncompatibleModels, match=message) as refused:
        require_same_function(("A", "B"), build(**a), build(**b))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in DEAR)) for k in ALIKE])
def test_what_changes_nothing_is_no_reason_to_refuse(kind: str) -> None:
    build, a, b = ALIKE[kind]
    require_same_function(("A", "B"), build(**a), build(**b))


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits


def require_same_logits(folder: Path, other: Path) -> None:
    before, after = logits(folder), logits(other)
    assert float((after - before).abs().max()) < 1e-4 * float(before.abs().max())


@pytest.mark.parametrize("command", ["align", "merge", "merge --match none"])
def test_nothing_is_written_of_two_that_compute_differently(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = save(tmp_path / "a", tiny_llama()), save(tmp_path / "b", tiny_llama(hidden_act="gelu"), 1)
    assert run(*command.split()[:1], a, b, "-o", tmp_path / "out", *command.split()[1:]) == 2
    assert f"compute differently: hidden_act is silu in {a}, gelu in {b}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_classes_that_compute_alike_are_one_architecture(tmp_path: Path) -> None:
    a = save(tmp_path / "a", tiny_llama(num_hidden_layers=2))
    b = save(tmp_path / "b", mistral(sliding_window=None, max_position_embeddings=16), 1)
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    require_same_logits(b, tmp_path / "out")
    assert run("merge", a, b, "-o", tmp_path / "end", "--weight", 1, "--quiet") == 0
    assert json.loads((tmp_path / "end" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    require_same_logits(b, tmp_path / "end")


@pytest.mark.parametrize("window", [4, 4096])
@pytest.mark.parametrize("width", [8, 12])
def test_two_classes_that_compute_differently_do_not_merge(window: int, width: int) -> None:
    configs = tiny_llama(num_hidden_layers=2), mistral(sliding_window=window, hidden_size=width)
    with pytest.raises(IncompatibleModels, match=r"a Llama.* but b is a Mistral.*; they do not merge"):
        require_alike(("a", "b"), *configs, None)


def test_aligned_b_has_its_own_config_and_tokenizer(tmp_path: Path) -> None:
    a = save(tmp_path / "a", tiny_llama(eos_token_id=2))
    b = save(tmp_path / "b", tiny_llama(eos_token_id=5, max_position_embeddings=99, attention_dropout=0.5), 1)
    for folder in (a, b):
        (folder / "chat_template.jinja").write_text(folder.name)
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
    read = [json.loads((folder / "config.json").read_text()) for folder in (b, tmp_path / "out")]
    assert read[0] == read[1]
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "b"
    require_same_logits(b, tmp_path / "out")


@pytest.mark.parametrize("tied", [0, 1])
def test_a_tied_head_beside_one_that_is_not(tied: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save(tmp_path / name, tiny_llama(tie_word_embeddings=i == tied), i) for i, name in enumerate("ab"))
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    require_same_logits(b, tmp_path / "out")
    for weight, end in enumerate((a, b)):
        assert run("merge", a, b, "-o", tmp_path / f"{weight}", "--weight", weight, "--quiet") == 0
        require_same_logits(end, tmp_path / f"{weight}")
    capsys.readouterr()
    assert run("align", a, b, "-o", tmp_path / "no", "--tie-word-embeddings") == 2
    assert f"tie_word_embeddings is true in {(a, b)[tied]} alone" in capsys.readouterr().err


def test_what_reads_itself_tied_again_is_not_untied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T5 ties its head whatever its config says, and takes the field for the scale of the head's input."""
    a, b = (save(tmp_path / name, tiny_t5(), i) for i, name in enumerate("ab"))
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
    ids = torch.arange(5)[None]
    models = [
        transformers.T5ForConditionalGeneration.from_pretrained(f, dtype=torch.float64) for f in (b, tmp_path / "out")
    ]
    with torch.no_grad():
        before, after = (m.eval()(input_ids=ids, decoder_input_ids=ids).logits for m in models)
    assert float((after - before).abs().max()) < 1e-4 * float(before.abs().max())
    assert run("align", a, b, "-o", tmp_path / "no", "--untie-word-embeddings") == 2
    assert "a head that is not tied" in capsys.readouterr().err


@pytest.mark.parametrize("double", [0, 1])
@pytest.mark.parametrize("method", ["linear", "circuits", "regmean"])
def test_double_precision_merges_with_single(double: int, method: str, tmp_path: Path) -> None:
    """In double precision, and written as A is."""
    refs = [save(tmp_path / name, tiny_llama(), seed) for seed, name in enumerate("ab")]
    file = refs[double] / "model.safetensors"
    common = ("merge", *refs, "--method", method, "--match", "none", "--quiet")
    assert run(*common, "-o", tmp_path / "single") == 0
    save_file({n: t.double() for n, t in load_file(file).items()}, file, {"format": "pt"})
    assert run(*common, "-o", tmp_path / "double") == 0
    single, found = (load_file(tmp_path / name / "model.safetensors") for name in ("single", "double"))
    for name, tensor in found.items():
        assert tensor.dtype == (torch.float32, torch.float64)[double == 0]
        assert torch.allclose(tensor.double(), single[name].double(), rtol=1e-3, atol=1e-4), name


def test_modes_are_found_in_few_layers_and_called_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []
    find = variant.find_modes

    def noted(model: PreTrainedModel, config: PretrainedConfig) -> list[tuple[Mode, Program]]:
        depths.append(len(model.get_submodule("model.layers")))
        assert config.num_hidden_layers == 9
        return find(model, config=config)

    monkeypatch.setattr(variant, "find_modes", noted)
    deep = variant.Variant(tiny_llama(num_hidden_layers=9))
    fingerprints = [deep.fingerprint(call) for call in deep.calls_in_all_modes()]
    assert depths[0] < 5
    assert all(f is not None and any("layers.8" in name for name in f.weights) for f in fingerprints)


def test_code_is_parsed_only_where_it_differs_and_need_not_be_of_this_python() -> None:
    remarked, old = b"x = 1  # one\n", b"print 1\n"
    assert _is_same_code({"model.py": remarked, "tool.py": old}, {"model.py": b"x = 1\n", "tool.py": old})
    assert not _is_same_code({"tool.py": old}, {"tool.py": b"print 2\n"})
    assert not _is_same_code({"model.py": remarked}, {"model.py": b"x = 2  # one\n"})
