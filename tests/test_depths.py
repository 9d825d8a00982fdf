"""Models of other depth: which weights make a layer silent, where the layers belong, and that nothing changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import built, run, tiny_bert, tiny_gpt2, tiny_llama
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from hf_align.errors import IncompatibleModels
from hf_align.opening.depths import corresponding, deepening_of
from hf_align.opening.heads import tied_alike, untied
from hf_align.opening.pairs import open_pair
from hf_align.running.network import Network
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.certificate.random_copy import random_elements

SIZES = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def tiny_neox(**changes: int) -> PretrainedConfig:
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2,
             "max_position_embeddings": 16, "num_hidden_layers": 1}  # fmt: skip
    return GPTNeoXConfig(**{**sizes, **changes}, architectures=["GPTNeoXForCausalLM"])


def tiny_mixtral(**changes: int) -> PretrainedConfig:
    sizes = {"vocab_size": 11, **SIZES, "num_local_experts": 3, "num_hidden_layers": 1}
    return MixtralConfig(**{**sizes, **changes}, architectures=["MixtralForCausalLM"])


@pytest.mark.parametrize(
    ("build", "depth", "silent"),
    [
        (tiny_llama, "num_hidden_layers", {"self_attn.o_proj.weight", "mlp.down_proj.weight"}),
        (tiny_gpt2, "n_layer", {f"{part}.c_proj.{kind}" for part in ("attn", "mlp") for kind in ("weight", "bias")}),
        (tiny_neox, "num_hidden_layers", {f"{part}.{kind}" for part in ("attention.dense", "mlp.dense_4h_to_h")
                                          for kind in ("weight", "bias")}),
        (tiny_mixtral, "num_hidden_layers", {"self_attn.o_proj.weight", "mlp.experts.down_proj"}),
    ],
)  # fmt: skip
def test_what_a_layer_writes_with_is_found_by_running_it(build: object, depth: str, silent: set[str]) -> None:
    shallow, deep = build(), build(**{depth: 3})  # type: ignore[operator]
    found = deepening_of(shallow, deep)
    assert found is not None and found.silent == silent
    assert deepening_of(deep, shallow) is None and deepening_of(deep, deep) is None


def test_layers_that_are_normalised_behind_cannot_be_silent() -> None:
    with pytest.raises(IncompatibleModels, match="norms come after it"):
        deepening_of(tiny_bert(), tiny_bert(num_hidden_layers=2))


def test_layers_stand_where_they_fit_best_in_their_order() -> None:
    assert corresponding([{0: 0.9}, {0: 0.8, 1: 0.1}, {1: 0.9}]) == (0, None, 1)
    assert corresponding([{0: 0.1}, {0: 0.8, 1: 0.9}, {1: 0.5}]) == (None, 0, 1)
    assert corresponding([{0: 0.1}, {0: 0.2, 1: 0.9}, {1: 0.5}]) == (0, 1, None)
    assert corresponding([{0: 1.0}, {1: 1.0}]) == (0, 1)


def without_layer(model: PreTrainedModel, gone: int) -> dict[str, torch.Tensor]:
    """The weights of a model without one of its layers, the others numbered anew."""
    found = {}
    for name, weight in model.state_dict().items():
        path, _, rest = name.partition(".layers.")
        if rest:
            number, _, rest = rest.partition(".")
            if int(number) == gone:
                continue
            name = f"{path}.layers.{int(number) - (int(number) > gone)}.{rest}"
        found[name] = weight
    return found


def a_model_and_itself_without_a_silent_layer(folder: Path, gone: int) -> tuple[PreTrainedModel, list[Path]]:
    """A model in which a layer does nothing, and the same model without that layer, in another basis."""
    deep, shallow = (tiny_llama(**SIZES, num_hidden_layers=n, vocab_size=40) for n in (4, 3))
    model = built(deep, 0)
    with torch.no_grad():
        for part in (model.model.layers[gone].self_attn.o_proj, model.model.layers[gone].mlp.down_proj):
            part.weight.zero_()
    other = built(shallow, 1)
    other.load_state_dict(without_layer(model, gone))
    model.save_pretrained(folder / "deep"), other.save_pretrained(folder / "plain")
    pair = open_pair(str(folder / "plain"), str(folder / "plain"))
    elements = random_elements(pair.spec, torch.Generator().manual_seed(0))
    moved = AlignedWeights(pair.a.weights, pair.spec, elements)
    other.load_state_dict({name: moved[name].float() for name in pair.spec.parameters})
    other.save_pretrained(folder / "shallow")
    return model, [folder / "deep", folder / "shallow"]


@pytest.mark.parametrize(("gone", "order"), [(0, 1), (1, -1), (2, 1), (3, -1)])
def test_a_layer_that_did_nothing_is_found_and_put_back(
    gone: int, order: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folders = a_model_and_itself_without_a_silent_layer(tmp_path, gone)
    assert run("merge", *folders[::order], "-o", tmp_path / "out", "--method", "linear", "-q", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert any(f"(3 layers to 4; layer {gone} writes nothing)" in note for note in report["notes"]), report["notes"]
    assert report["distance_after"] < report["distance_before"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (m(tokens).logits for m in (model, merged))
    assert merged.config.num_hidden_layers == 4
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))


def test_a_model_that_was_made_deeper_answers_as_before(tmp_path: Path) -> None:
    deep, shallow = (built(tiny_gpt2(n_layer=n), n) for n in (3, 1))
    deep.save_pretrained(tmp_path / "deep"), shallow.save_pretrained(tmp_path / "shallow")
    pair = open_pair(str(tmp_path / "deep"), str(tmp_path / "shallow"))
    tokens = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weights = {name: pair.b.weights[name] for name in pair.spec.parameters}
        found, expected = Network(pair.config)(weights, {"input_ids": tokens}).logits, shallow(tokens).logits
    assert pair.b.idle and not pair.a.idle
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options", [["--match", "weight"], ["--match", "activation"], ["--tie-word-embeddings"]], ids=str
)
def test_heads_that_are_tied_are_untied_at_another_depth(options: list[str], tmp_path: Path) -> None:
    for layers in (3, 1):
        model = built(tiny_gpt2(n_layer=layers, n_embd=16, vocab_size=40, tie_word_embeddings=True), layers)
        model.save_pretrained(tmp_path / str(layers))
    for weight, name in ((0, "3"), (1, "1")):
        assert run("merge", tmp_path / "3", tmp_path / "1", "-o", tmp_path / "out", "--method", "linear", "-q",
                   "--weight", weight, "--overwrite", *options) == 0  # fmt: skip
        tokens = torch.randint(40, (3, 8), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            both = [AutoModelForCausalLM.from_pretrained(tmp_path / n)(tokens).logits for n in ("out", name)]
        torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-4)


def test_a_narrow_and_shallow_model_merges_with_a_large_one(tmp_path: Path) -> None:
    large = tiny_llama(hidden_size=12, intermediate_size=9, num_hidden_layers=2)
    for name, config, seed in (("small", tiny_llama(), 0), ("large", large, 1)):
        built(config, seed).save_pretrained(tmp_path / name)
    for weight, name in ((0, "small"), (1, "large")):
        assert run("merge", tmp_path / "small", tmp_path / "large", "-o", tmp_path / "out", "--method", "linear", "-q",
                   "--weight", weight, "--overwrite") == 0  # fmt: skip
        tokens = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            both = [AutoModelForCausalLM.from_pretrained(tmp_path / n)(tokens).logits for n in ("out", name)]
        torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2, "hidden_size": 4}, "one is deeper and the other wider"),
        ({"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}, "rope_theta"),
    ],
)
def test_what_does_not_fit_besides_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built(tiny_llama(), 0).save_pretrained(tmp_path / "a")
    built(tiny_llama(**changes), 1).save_pretrained(tmp_path / "b")
    for pair in (("a", "b"), ("b", "a")):
        assert run("merge", *(tmp_path / n for n in pair), "-o", tmp_path / "out", "--method", "linear", "-q") == 2
        assert message in capsys.readouterr().err


def windowed(layers: int) -> PretrainedConfig:
    """Every other layer looks back over a window that no short text reaches beyond."""
    kinds = ["sliding_attention", "full_attention"]
    return Qwen3Config(**{**SIZES, "vocab_size": 11, "num_hidden_layers": layers, "max_position_embeddings": 4096},
                       sliding_window=3000, use_sliding_window=True, tie_word_embeddings=False,
                       layer_types=[kinds[i % 2] for i in range(layers)],
                       architectures=["Qwen3ForCausalLM"])  # fmt: skip


@pytest.mark.parametrize(("deep", "silent"), [(3, [(2,)]), (4, [(0, 1), (1, 2), (2, 3)])])
def test_layers_keep_their_windows(deep: int, silent: list[tuple[int, ...]], tmp_path: Path) -> None:
    for layers in (2, deep):
        built(windowed(layers), layers).save_pretrained(tmp_path / str(layers))
    pair = open_pair(str(tmp_path / str(deep)), str(tmp_path / "2"))
    idle = {int(name.split(".layers.")[1].partition(".")[0]) for name in pair.b.idle}
    assert tuple(sorted(idle)) in silent


def test_more_than_two_models_are_of_one_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, layers in (("a", 2), ("b", 1), ("c", 2)):
        built(tiny_llama(num_hidden_layers=layers), ord(name)).save_pretrained(tmp_path / name)
    assert run("merge", *(tmp_path / n for n in "abc"), "-o", tmp_path / "out", "--method", "linear", "-q") == 2
    assert "is smaller than the others" in capsys.readouterr().err


def test_a_config_that_needs_all_of_its_layers_is_asked_whole_whether_it_can_be_untied() -> None:
    """No layer of a copy of two would have keys of its own."""
    config = Gemma3nTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=20, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size_per_layer_input=48, hidden_size_per_layer_input=6,
        num_kv_shared_layers=2, altup_num_inputs=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=5, max_position_embeddings=32,
        architectures=["Gemma3nForCausalLM"],
    )  # fmt: skip
    both = tied_alike(("a", "b"), (config, untied(config)), None)
    assert [each.tie_word_embeddings for each in both] == [False, False]


class _NeedsThree(LlamaConfig):
    """Refuses to be made of two layers, as one whose lists must be as long as something else."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        if self.num_hidden_layers < 3:
            raise ValueError("there must be three layers")


def test_a_config_that_refuses_two_layers_is_asked_whole_whether_it_can_be_untied() -> None:
    config = _NeedsThree(**tiny_llama(num_hidden_layers=3, tie_word_embeddings=True).to_dict())
    both = tied_alike(("a", "b"), (config, untied(config)), None)
    assert [each.tie_word_embeddings for each in both] == [False, False]
