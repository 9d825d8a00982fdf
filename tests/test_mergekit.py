"""mergekit's recipes: by mergekit itself with our loaders, and by its methods where it gives no whole model."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import transformers
import yaml
from conftest import DATA, MODELS, run, tiny_bert, tiny_llama, tiny_vit
from hub_server import Hub
from safetensors.torch import load_file, save_file
from test_output import mixture_of
from torch import Tensor, nn

from hf_align.api.alignment import Alignment
from hf_align.checkpoints.claim import claimed
from hf_align.checkpoints.hub import resolve
from hf_align.errors import OutputError
from hf_align.jobs.job import silent
from hf_align.jobs.opened import Basis, Opened
from hf_align.mergekit import loaders
from hf_align.mergekit.extra import models_of, parse
from hf_align.mergekit.flags import Flags
from hf_align.mergekit.folders import run_script
from hf_align.mergekit.methods import Loop, least_bytes, merge_here
from hf_align.mergekit.slices import stack_here
from hf_align.publishing.provenance import Provenance
from hf_align.settings.choices import AnyMethod, MergekitMethod
from hf_align.settings.options import Options

pytest.importorskip("mergekit", reason="pip install hf-align[mergekit]")

Kind = type[transformers.PreTrainedModel]
LLAMA, GPT2 = MODELS / "llama", MODELS / "gpt2"


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_recipe(path: Path, **recipe: Any) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path


def linear(*models: Path, **more: Any) -> dict[str, Any]:
    each = [{"model": str(model), "parameters": {"weight": 1.0}} for model in models]
    return {"models": each, "merge_method": "linear", **more}


def by_mergekit(recipe: dict[str, Any], out: Path) -> dict[str, Tensor]:
    """What mergekit gives by itself."""
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    run_merge(parse(recipe), str(out), MergeOptions(quiet=True, random_seed=0))
    return weights(out)


def written(loop: Loop, models: Opened, out: Path) -> None:
    """What our own loop makes of models that stay as they are."""
    with claimed(out, {}) as claim:
        loop.draft.write(claim, loop.entries(Basis(models)), silent, quiet=True)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **(tolerance or {"rtol": 0, "atol": 0}))


def assert_whole(folder: Path, kind: type[transformers.PreTrainedModel]) -> transformers.PreTrainedModel:
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


@pytest.fixture
def random_pairs(tmp_path: Path) -> Callable[..., list[Path]]:
    """Folders of models with random weights, of one architecture."""

    def make(kind: Kind, config: transformers.PretrainedConfig, count: int = 2) -> list[Path]:
        folders = []
        for seed in range(count):
            torch.manual_seed(seed)
            model = kind(config)
            for parameter in model.parameters():  # gains of one and biases of zero would hide what is forgotten
                nn.init.normal_(parameter, std=0.5)
            folders.append(tmp_path / kind.__name__ / str(seed))
            model.save_pretrained(folders[-1])
        return folders

    return make


GRADIENTS = {
    "slices": [{"sources": [{"model": str(LLAMA / seed), "layer_range": [0, 3]} for seed in "01"]}],
    "merge_method": "slerp",
    "base_model": str(LLAMA / "0"),
    "parameters": {
        "t": [{"filter": "self_attn", "value": [0, 0.3, 1]}, {"filter": "mlp", "value": [1, 0.2]}, {"value": 0.5}]
    },
    "dtype": "float32",
}  # fmt: skip
TIES = {
    "models": [
        {"model": str(LLAMA / "1"), "parameters": {"weight": [0.2, 0.9], "density": 0.6}},
        {"model": str(LLAMA / "2"), "parameters": {"weight": [{"filter": "mlp", "value": 0.1}, {"value": 0.7}]}},
    ],
    "merge_method": "ties", "base_model": str(LLAMA / "0"), "parameters": {"normalize": True},
}  # fmt: skip

TASKS = {
    "slices": [{
        "base_model": str(LLAMA / "2"),
        "sources": [{"model": str(LLAMA / seed), "layer_range": [0, 3], "parameters": {"weight": weight}}
                    for seed, weight in (("2", 0.2), ("1", 0.5))],
    }],
    "merge_method": "task_arithmetic",
}  # fmt: skip
"""One slice with a base model of its own, which may be another than that of the recipe."""
READ = {
    "linear": linear(LLAMA / "0", LLAMA / "1"), "slerp": GRADIENTS, "ties": TIES, "base": TASKS,
    "other base": {**TASKS, "base_model": str(LLAMA / "0")},
}  # fmt: skip


@pytest.mark.parametrize("recipe", READ.values(), ids=READ)
def test_without_align_it_is_what_mergekit_gives(recipe: dict[str, Any], tmp_path: Path) -> None:
    assert run("mergekit", write_recipe(tmp_path / "recipe.yml", **recipe), tmp_path / "ours") == 0
    assert_same(weights(tmp_path / "ours"), by_mergekit(recipe, tmp_path / "theirs"))


def _part(seed: str, **parameters: Any) -> dict[str, Any]:
    return {"model": str(LLAMA / seed), **({"parameters": parameters} if parameters else {})}


def _layers(seed: str, start: int, stop: int) -> dict[str, Any]:
    return {**_part(seed), "layer_range": [start, stop]}


_SELF_ATTENTION, _MLP = [0, 0.5, 0.3, 0.7, 1], [1, 0.5, 0.7, 0.3, 0]
EXAMPLES: dict[str, dict[str, Any]] = {
    "arcee_fusion": {"models": [_part("0"), _part("1")], "merge_method": "arcee_fusion", "base_model": str(LLAMA / "0"),
                     "dtype": "bfloat16"},
    "bio-merge": {"models": [_part("1", density=0.5, weight=0.5), _part("2", density=0.5, weight=0.5)],
                  "merge_method": "ties", "base_model": str(LLAMA / "0"),
                  "parameters": {"normalize": False, "int8_mask": True}, "dtype": "float16"},
    "gradient-slerp": {"slices": [{"sources": [_layers("0", 0, 3), _layers("1", 0, 3)]}], "merge_method": "slerp",
                       "base_model": str(LLAMA / "0"), "dtype": "float16",
                       "parameters": {"t": [{"filter": "self_attn", "value": _SELF_ATTENTION},
                                            {"filter": "mlp", "value": _MLP}, {"value": 0.5}]}},
    "linear": {"models": [_part("0", weight=1.0), _part("1", weight=0.3), _part("2", weight=0.5)],
               "merge_method": "linear", "dtype": "float16"},
    "orcamini-platy-44layer": {"slices": [{"sources": [_layers("0", 0, 2)]}, {"sources": [_layers("1", 1, 3)]}],
                               "merge_method": "passthrough", "dtype": "float16"},
    "ties": {"models": [_part("0", density=[1, 0.7, 0.1], weight=1.0), _part("1", density=0.5, weight=[0, 0.3, 0.7, 1]),
                        _part("2", density=0.33, weight=[{"filter": "mlp", "value": 0.5}, {"value": 0}])],
             "merge_method": "ties", "base_model": str(MODELS / "llama" / "0"),
             "parameters": {"normalize": True, "int8_mask": True}, "dtype": "float16"},
}  # fmt: skip
"""The recipes under mergekit's own examples/, with three models of three layers in the place of large ones."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_mergekit(name: str, tmp_path: Path) -> None:
    recipe = EXAMPLES[name]
    assert run("mergekit", write_recipe(tmp_path / "recipe.yml", **recipe), tmp_path / "ours") == 0
    assert_same(weights(tmp_path / "ours"), by_mergekit(recipe, tmp_path / "theirs"))
    assert run("report", tmp_path / "ours") == 0
    assert run("mergekit", write_recipe(tmp_path / "recipe.yml", **recipe, align=True), tmp_path / "aligned") == 0
    assert_whole(tmp_path / "aligned", transformers.LlamaForCausalLM)
    assert Provenance.load(tmp_path / "aligned").witness
    assert run("report", tmp_path / "aligned") == 0


def test_a_recipe_may_list_modules(tmp_path: Path) -> None:
    """As mergekit writes them: what it makes of models, it makes of its only module."""
    recipe = linear(LLAMA / "0", LLAMA / "1")
    listed = {"modules": {"default": {"models": recipe.pop("models")}}, **recipe}
    for name, align in (("plain", {}), ("aligned", {"align": True})):
        assert run("mergekit", write_recipe(tmp_path / "r.yml", **listed, **align), tmp_path / name) == 0
        same = linear(LLAMA / "0", LLAMA / "1") | align
        assert run("mergekit", write_recipe(tmp_path / "r.yml", **same), tmp_path / f"{name} models") == 0
        assert_same(weights(tmp_path / name), weights(tmp_path / f"{name} models"))


def test_fine_tunes_of_one_base_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = transformers.AutoModelForCausalLM.from_pretrained(LLAMA / "0")
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=torch.manual_seed(0))
    tuned.save_pretrained(tmp_path / "tuned")
    recipe = linear(LLAMA / "0", tmp_path / "tuned")
    assert run("mergekit", write_recipe(tmp_path / "r.yml", **recipe, align=True), tmp_path / "ours") == 0
    assert "share a basis already" in capsys.readouterr().out
    assert_same(weights(tmp_path / "ours"), by_mergekit(recipe, tmp_path / "theirs"))
    assert Provenance.load(tmp_path / "ours").strategy["match"] == "none"
    told = write_recipe(tmp_path / "r.yml", **recipe, align={"match": "weight"})
    assert run("mergekit", told, tmp_path / "told") == 0
    assert "are in the basis of 0" in capsys.readouterr().out
    assert Provenance.load(tmp_path / "told").strategy["match"] == "weight"


@pytest.mark.parametrize("recipe", READ.values(), ids=READ)
def test_our_loop_reads_a_recipe_as_mergekit_does(recipe: dict[str, Any], tmp_path: Path) -> None:
    config = parse(recipe)
    names = sorted(models_of(recipe))  # the first is the reference
    models = Opened.open({n: n for n in names}, Options(match="none", untie=False), jointly=False)
    written(merge_here(config, models.first, Options(quiet=True)), models, tmp_path / "ours")
    assert_same(weights(tmp_path / "ours"), by_mergekit(recipe, tmp_path / "theirs"))


@pytest.mark.parametrize("family", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_aligned_and_averaged_it_is_what_merge_gives(family: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yml", **linear(family / "0", family / "1"), align=True)
    assert run("mergekit", recipe, tmp_path / "ours") == 0
    assert run("merge", family / "0", family / "1", "-o", tmp_path / "merged") == 0
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "merged"), rtol=1e-5, atol=1e-6)
    ours, merged = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "merged"))
    assert ours["tie_word_embeddings"] == merged["tie_word_embeddings"]
    assert_whole(tmp_path / "ours", transformers.AutoModelForCausalLM)
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == (family / "0" / "tokenizer.json").read_bytes()


def test_no_loader_stays_behind(tmp_path: Path) -> None:
    from mergekit.io.tasks import LoaderCache

    before = dict(LoaderCache().loaders)
    recipe = write_recipe(tmp_path / "recipe.yml", **linear(LLAMA / "0", LLAMA / "1"), align=True)
    assert run("mergekit", recipe, tmp_path / "out") == 0
    assert LoaderCache().loaders == before
    assert not list(tmp_path.glob("out/.*"))


def test_what_is_said_of_it_has_no_path(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "recipe.yml", **linear(LLAMA / "0", LLAMA / "1"), align={"residual": "permutation"}
    )
    assert run("mergekit", recipe, tmp_path / "out") == 0
    shown = yaml.safe_load((tmp_path / "out" / "mergekit_config.yml").read_text())
    assert [entry["model"] for entry in shown["models"]] == ["0", "1"]
    assert shown["align"]["residual"] == "permutation"
    made = Provenance.load(tmp_path / "out")
    assert made.strategy["residual"] == "permutation" and [i.name for i in made.inputs] == ["0", "1"]
    for file in (tmp_path / "out").rglob("*"):
        assert file.is_dir() or str(MODELS).encode() not in file.read_bytes(), file


def test_the_reference_is_a_choice(tmp_path: Path) -> None:
    for reference in "01":
        align = {"reference": str(LLAMA / reference)}
        recipe = write_recipe(tmp_path / "recipe.yml", **linear(LLAMA / "0", LLAMA / "1"), align=align)
        assert run("mergekit", recipe, tmp_path / reference) == 0
    zero, one = (weights(tmp_path / reference)["model.embed_tokens.weight"] for reference in "01")
    assert not torch.allclose(zero, one, atol=1e-2)
    card = " ".join((tmp_path / "1" / "README.md").read_text().split())
    assert "the other model was moved into the basis of `1`" in card


@pytest.mark.parametrize(
    ("method", "each"),
    [
        ("ties", {"weight": 0.5, "density": 0.5}), ("dare_linear", {"weight": 0.5, "density": 0.5}),
        ("model_stock", {}), ("karcher", {}),
    ],
)  # fmt: skip
def test_methods_of_mergekit_on_aligned_models(
    method: str, each: dict[str, float], tmp_path: Path, random_pairs: Callable[..., list[Path]]
) -> None:
    base, *others = random_pairs(transformers.LlamaForCausalLM, tiny_llama(num_hidden_layers=2), 3)
    models = [{"model": str(model), "parameters": each} for model in others]
    recipe = {"models": models, "merge_method": method, "align": True}
    if method != "karcher":
        recipe["base_model"] = str(base)
    path = write_recipe(tmp_path / "r.yml", **recipe)
    assert run("mergekit", path, tmp_path / "out", "--random-seed", 1) == 0
    model = assert_whole(tmp_path / "out", transformers.LlamaForCausalLM)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_layers_of_aligned_models_on_top_of_each_other(tmp_path: Path) -> None:
    """Slices that overlap: the second half of one model after the first of the other."""
    slices = [{"sources": [{"model": str(LLAMA / s), "layer_range": r}]} for s, r in (("0", [0, 2]), ("1", [1, 3]))]
    recipe = write_recipe(tmp_path / "r.yml", slices=slices, merge_method="passthrough", align=True)
    assert run("mergekit", recipe, tmp_path / "out") == 0
    model = assert_whole(tmp_path / "out", transformers.LlamaForCausalLM)
    assert model.config.num_hidden_layers == 4
    assert run("report", tmp_path / "out") == 0
    assert Alignment.from_pretrained(tmp_path / "out").config.num_hidden_layers == 3
    alone = write_recipe(tmp_path / "r.yml", **linear(LLAMA / "1", LLAMA / "0"), align={"reference": str(LLAMA / "0")})
    assert run("mergekit", alone, tmp_path / "both") == 0
    name = "model.layers.{}.mlp.up_proj.weight"
    stacked, mixed = weights(tmp_path / "out"), weights(tmp_path / "both")
    torch.testing.assert_close(2 * mixed[name.format(1)], stacked[name.format(1)] + stacked[name.format(2)])


T5 = transformers.T5Config(
    vocab_size=11, d_model=8, d_kv=4, d_ff=6, num_layers=2, num_heads=2, decoder_start_token_id=0
)
NEOX = transformers.GPTNeoXConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                                  intermediate_size=6, max_position_embeddings=16)  # fmt: skip


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.ViTForImageClassification, tiny_vit()), (transformers.BertForMaskedLM, tiny_bert()),
        (transformers.T5ForConditionalGeneration, T5), (transformers.GPTNeoXForCausalLM, NEOX),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_architectures_that_mergekit_does_not_give_whole(
    kind: type[transformers.PreTrainedModel], config: transformers.PretrainedConfig, aligned: bool, tmp_path: Path,
    random_pairs: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    a, b = random_pairs(kind, config)
    recipe = linear(a, b, **({"align": True} if aligned else {}))
    assert run("mergekit", write_recipe(tmp_path / "r.yml", **recipe), tmp_path / "out") == 0
    captured = capsys.readouterr()
    assert "tensor by tensor" in captured.out and "Traceback" not in captured.err
    assert_whole(tmp_path / "out", kind)
    if aligned:
        assert run("merge", a, b, "-o", tmp_path / "merged") == 0
        assert_same(weights(tmp_path / "out"), weights(tmp_path / "merged"), rtol=1e-4, atol=1e-5)
    else:
        first, second = weights(a), weights(b)
        assert_same(weights(tmp_path / "out"), {n: (first[n] + second[n]) / 2 for n in first}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", [{"tokenizer_source": "union"}, {"chat_template": "chatml"}, {"modules": {}}])
def test_what_only_mergekit_itself_does_is_refused_where_it_gives_no_whole_model(
    asked: dict[str, Any], tmp_path: Path, random_pairs: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = random_pairs(transformers.BertForMaskedLM, tiny_bert())
    plain = linear(a, b)
    if "modules" in asked:
        asked = {"modules": {"default": {"models": plain.pop("models")}}}
    recipe = write_recipe(tmp_path / "r.yml", **plain, **asked)
    capsys.readouterr()
    assert f"asks for {next(iter(asked))}, which only mergekit itself does" in refused(recipe, tmp_path / "out", capsys)


# Slices of architectures that mergekit does not know ----------------------------------------------------------------


def cut(*pieces: list[tuple[Path, int, int]], **more: Any) -> dict[str, Any]:
    """A recipe with slices, each of (model, first layer, layer after the last)."""
    slices = [{"sources": [{"model": str(m), "layer_range": [start, stop]} for m, start, stop in p]} for p in pieces]
    return {"slices": slices, "merge_method": "passthrough", **more}


STACKED = cut([(LLAMA / "0", 0, 2)], [(LLAMA / "2", 1, 3)], [(LLAMA / "1", 2, 3)])
BLENDED = cut(
    [(LLAMA / "0", 0, 2), (LLAMA / "1", 1, 3)], [(LLAMA / "1", 0, 1), (LLAMA / "0", 2, 3)],
    merge_method="slerp", base_model=str(LLAMA / "0"),
    parameters={"t": [{"filter": "mlp", "value": [0, 0.3]}, {"value": [0.9, 0.4]}]},
)  # fmt: skip


@pytest.mark.parametrize("recipe", [STACKED, BLENDED], ids=["stacked", "blended"])
def test_slices_are_what_mergekit_makes_of_them(recipe: dict[str, Any], tmp_path: Path) -> None:
    """In an architecture that both know: the same tensors to the last bit, and the same number of layers."""
    config, names = parse(recipe), models_of(recipe)
    models = Opened.open({n: n for n in names}, Options(match="none", untie=False), jointly=False)
    written(stack_here(config, models.first, Options(quiet=True)), models, tmp_path / "ours")
    assert_same(weights(tmp_path / "ours"), by_mergekit(recipe, tmp_path / "theirs"))
    ours, theirs = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "theirs"))
    assert ours["num_hidden_layers"] == theirs["num_hidden_layers"] != 0
    assert_whole(tmp_path / "ours", transformers.LlamaForCausalLM)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("kind", "config", "stack"),
    [
        (transformers.ViTForImageClassification, tiny_vit(num_hidden_layers=3), "layer"),
        (transformers.BertForMaskedLM, tiny_bert(num_hidden_layers=3), "layer"),
        (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**{**NEOX.to_dict(), "num_hidden_layers": 3}),
         "layers"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_layers_stacked_where_mergekit_cannot(
    kind: type[transformers.PreTrainedModel], config: transformers.PretrainedConfig, stack: str, aligned: bool,
    tmp_path: Path, random_pairs: Callable[..., list[Path]],
) -> None:  # fmt: skip
    a, b = random_pairs(kind, config)
    recipe = cut([(a, 0, 2)], [(b, 1, 3)], **({"align": True} if aligned else {}))
    assert run("mergekit", write_recipe(tmp_path / "r.yml", **recipe), tmp_path / "out") == 0
    model = assert_whole(tmp_path / "out", kind)
    assert model.config.num_hidden_layers == 4
    if aligned:
        return
    found, first, second = map(weights, (tmp_path / "out", a, b))
    for name, tensor in found.items():
        number = re.search(rf"(?<=\b{stack}\.)\d+", name)
        if number is None:
            assert torch.equal(tensor, first[name]) or torch.equal(tensor, second[name]), name
            continue
        place = int(number[0])
        source, layer = (first, place) if place < 2 else (second, place - 1)
        assert torch.equal(tensor, source[name[: number.start()] + str(layer) + name[number.end() :]]), name


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([("0", 0, 2), ("1", 1, 2)], "its sources must be equally many layers"),
        ([("0", 0, 2), ("0", 2, 4)], "equally many layers of different models"),
        ([("0", 2, 9)], "goes beyond the 4 layers of the model"),
    ],
)
def test_slices_that_are_none(
    slices: list[tuple[str, int, int]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = [(MODELS / "vit" / seed, start, stop) for seed, start, stop in slices]
    method = "passthrough" if len(slices) == 1 else "linear"
    recipe = write_recipe(tmp_path / "r.yml", **cut(pieces, merge_method=method, align=True))
    assert message in refused(recipe, tmp_path / "out", capsys)


@pytest.mark.parametrize("align", [False, True], ids=["plain", "aligned"])
def test_slices_of_an_encoder_and_a_decoder(
    align: bool, tmp_path: Path, random_pairs: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They are refused, and before anything is matched."""
    monkeypatch.setattr(Opened, "find", None)
    a, b = random_pairs(transformers.T5ForConditionalGeneration, T5)
    capsys.readouterr()
    recipe = write_recipe(tmp_path / "r.yml", **cut([(a, 0, 1)], [(b, 0, 1)], align=align))
    assert "has encoder.block, decoder.block; use models:" in refused(recipe, tmp_path / "out", capsys)


def test_a_recipe_with_models_from_the_hub(hub: Hub, tmp_path: Path, random_pairs: Callable[..., list[Path]]) -> None:
    for name, folder in zip("ab", random_pairs(transformers.LlamaForCausalLM, tiny_llama()), strict=True):
        hub.add(f"org/{name}", folder)
    commit = hub.repositories["org/b"].at("main").oid
    recipe = linear(Path("org/a"), Path(f"org/b@{commit}"))
    assert run("mergekit", write_recipe(tmp_path / "r.yml", **recipe, align=True), tmp_path / "out") == 0
    assert_whole(tmp_path / "out", transformers.LlamaForCausalLM)
    assert [i.repository for i in Provenance.load(tmp_path / "out").inputs] == ["org/a", "org/b"]
    assert Provenance.load(tmp_path / "out").inputs[1].commit == commit


@pytest.mark.slow
def test_experts_that_are_aligned_lose_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """mergekit-moe: unaligned the result is its own, aligned the second expert can read the stream."""
    experts = []
    for seed, prompt in (("0", "In the beginning"), ("1", "And it came to pass")):
        shutil.copytree(LLAMA / seed, tmp_path / seed)
        named = tmp_path / seed / "tokenizer_config.json"  # mergekit-moe pads with the first token of a text
        named.write_text(json.dumps({**json.loads(named.read_text()), "bos_token": "[PAD]"}))
        experts.append({"source_model": str(tmp_path / seed), "positive_prompts": [prompt]})
    recipe = {"base_model": str(tmp_path / "0"), "gate_mode": "cheap_embed", "experts": experts}
    assert run("mergekit", write_recipe(tmp_path / "r.yml", **recipe), tmp_path / "plain") == 0
    theirs = write_recipe(tmp_path / "theirs.yml", **recipe)
    subprocess.run([sys.executable, "-m", "mergekit.scripts.moe", theirs, tmp_path / "theirs"], check=True,
                   capture_output=True)  # fmt: skip
    assert_same(weights(tmp_path / "plain"), weights(tmp_path / "theirs"))
    data = load_file(DATA / "eval_lm_kjv.safetensors")["input_ids"][:16].long()
    align = {"data": str(DATA / "eval_lm_kjv.safetensors")}
    assert run("mergekit", write_recipe(tmp_path / "r.yml", **recipe, align=align), tmp_path / "aligned") == 0
    assert "mixture of experts merges to a loss of" in capsys.readouterr().out.replace("\n", " ")
    losses = {}
    for name in ("plain", "aligned"):
        model = assert_whole(tmp_path / name, transformers.AutoModelForCausalLM)
        assert model.config.num_local_experts == 2
        with torch.no_grad():
            losses[name] = float(model(input_ids=data, labels=data).loss)
    assert losses["aligned"] < losses["plain"] - 0.3, losses
    assert run("report", tmp_path / "aligned") == 0


@pytest.mark.parametrize("more", [{}, {"align": True}, {"dtype": "float16"}], ids=["plain", "aligned", "half"])
def test_no_room_is_said_before_mergekit_is_asked(
    more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    monkeypatch.setattr("hf_align.mergekit.recipe.run_mergekit", None)
    recipe = linear(LLAMA / "0", LLAMA / "1") | {"dtype": "float32"} | more
    assert run("mergekit", write_recipe(tmp_path / "r.yml", **recipe), tmp_path / "out") == 2
    size = sum(t.numel() for t in weights(LLAMA / "0").values()) * (2 if "float16" in more.values() else 4)
    assert f"1.00 MB free, but {size / 1e6:.2f} MB are needed" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_mixture_needs_room_for_the_models_that_are_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    monkeypatch.setattr(Opened, "find", None)
    recipe = mixture_of(LLAMA / "0", LLAMA / "1", tmp_path / "r.yml", align=True)
    assert run("mergekit", recipe, tmp_path / "out") == 2
    size = sum(t.nbytes for t in weights(LLAMA / "0").values())
    assert f"1.00 MB free, but {3 * size / 1e6:.2f} MB are needed" in capsys.readouterr().err.replace("\n", " ")


def test_the_output_is_taken_while_mergekit_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the run that started it was killed: what comes too late must not meet the next run's files."""
    program, started = tmp_path / "python", tmp_path / "started"
    program.write_text(f"#!/bin/sh\necho $$ > {started}.part && mv {started}.part {started}\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def merge() -> None:
        with claimed(tmp_path / "out", {}) as claim:
            run_script("moe", {}, {}, claim.scratch, Flags(), trust_remote_code=False)

    process = get_context("fork").Process(target=merge)
    process.start()
    while not started.is_file():
        process.join(0.05)
    process.kill()
    process.join()
    try:
        with pytest.raises(OutputError, match="another run is writing"), claimed(tmp_path / "out", {}):
            pass
    finally:
        os.kill(int(started.read_text()), signal.SIGKILL)
    for _ in range(100):
        with suppress(OutputError), claimed(tmp_path / "out", {}):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the folder stays taken")


def test_slices_need_the_room_of_their_layers() -> None:
    recipe = {"slices": [{"sources": [{"layer_range": [0, 3]}]}, {"sources": [{"layer_range": [1, 3]}]}]}
    whole, stacked = least_bytes({}, resolve(str(LLAMA / "0"))), least_bytes(recipe, resolve(str(LLAMA / "0")))
    layers = sum(t.nbytes for n, t in weights(LLAMA / "0").items() if ".layers." in n)
    assert stacked - whole == pytest.approx(layers * 2 / 3)
    quoted = {"slices": [{"sources": [{"layer_range": ["0", "3"]}]}, {"sources": [{"model": "all layers"}]}]}
    assert least_bytes(quoted, resolve(str(LLAMA / "0"))) - whole == pytest.approx(layers)
    assert least_bytes({"modules": {"default": recipe}}, resolve(str(LLAMA / "0"))) == 0


# hf-align merge --method ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", get_args(MergekitMethod))
def test_every_method_in_our_own_command(method: str, tmp_path: Path, random_pairs: Callable[..., list[Path]]) -> None:
    a, b, base = random_pairs(transformers.LlamaForCausalLM, tiny_llama(), 3)
    needs = [] if method in ("karcher", "nearswap", "arcee_fusion", "multislerp", "nuslerp") else ["--base", base]
    options = [*needs, *(["--parameter", "t=0.5"] if method == "nearswap" else [])]
    assert run("merge", a, b, "-o", tmp_path / "out", "--method", method, *options) == 0
    model = assert_whole(tmp_path / "out", transformers.LlamaForCausalLM)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert Provenance.load(tmp_path / "out").strategy["method"] == method


def test_all_methods_of_mergekit_are_there() -> None:
    from mergekit.merge_methods import registered_methods

    ours = set(get_args(AnyMethod))
    assert {m.spec.name for m in registered_methods()} - ours == {"passthrough"}


def test_task_arithmetic_on_a_common_base(tmp_path: Path, random_pairs: Callable[..., list[Path]]) -> None:
    """Without matching it is arithmetic: a + b - base; and its numbers are those of a recipe."""
    a, b, base = random_pairs(transformers.LlamaForCausalLM, tiny_llama(), 3)
    common = ("--method", "task_arithmetic", "--base", base, "--match", "none", "--parameter", "lambda=2")
    assert run("merge", a, b, "-o", tmp_path / "out", *common) == 0
    merged, (first, second, zero) = weights(tmp_path / "out"), map(weights, (a, b, base))
    assert_same(merged, {n: first[n] + second[n] - zero[n] for n in merged}, rtol=1e-5, atol=1e-6)


def test_a_base_is_no_part_of_the_mean(
    tmp_path: Path, random_pairs: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    """What a method is held against is the mean of the models that it merges."""
    a, b, base = random_pairs(transformers.LlamaForCausalLM, tiny_llama(), 3)
    data = tmp_path / "data.safetensors"
    save_file({"input_ids": torch.randint(3, 11, (16, 8), generator=torch.Generator().manual_seed(0))}, data)
    assert run("merge", a, b, "--base", base, "--method", "ties", "--data", data, "--points", "3", "--json", "--quiet",
               "-o", tmp_path / "out") == 0  # fmt: skip
    said = json.loads(capsys.readouterr().out)
    apart, middle = [said["comparison"][x] for x in ("loss_a", "loss_b")], said["comparison"]["aligned"]["losses"][1]
    assert said["notes"][-1].endswith(
        f"its models have {min(apart):.3f} to {max(apart):.3f}, the mean of the aligned models {middle:.3f}"
    )


def test_random_methods_give_the_same_again(tmp_path: Path, random_pairs: Callable[..., list[Path]]) -> None:
    a, b, base = random_pairs(transformers.LlamaForCausalLM, tiny_llama(), 3)
    common = ("--method", "dare_ties", "--base", base, "--parameter", "density=0.5")
    for name in ("one", "two"):
        assert run("merge", a, b, "-o", tmp_path / name, *common) == 0
    assert_same(weights(tmp_path / "one"), weights(tmp_path / "two"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "ties"), "say with --base"),
        (("--method", "linear", "--base", LLAMA / "2"), "are for methods of mergekit"),
        (("--method", "karcher", "--parameter", "tol"), "not of the form name=value"),
        (("--method", "dare_linear", "--base", LLAMA / "2", "--parameter", "weight=0.1"), "--weight is the share of B"),
        (("--method", "ties", "--base", LLAMA / "2", "--parameter", "density=-3"), "must lie between 0 and 1"),
        (("--method", "ties", "--base", LLAMA / "2", "--parameter", "density=1.5"), "must lie between 0 and 1"),
        (("--method", "ties", "--base", LLAMA / "2", "--parameter", "density=nan"), "density is nan"),
        (("--method", "breadcrumbs", "--base", LLAMA / "2", "--parameter", "gamma=inf"), "a finite number is needed"),
        (("--match", "none", "--specs", LLAMA), "--match none matches nothing"),
    ],
)
def test_options_that_do_not_fit_a_method(
    options: tuple[object, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", "--quiet", *options) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0] and not (tmp_path / "out").exists()


# Bad input -----------------------------------------------------------------------------------------------------------


def refused(recipe: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a recipe is refused with; nothing is written."""
    assert run("mergekit", recipe, out, "--quiet") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("hf-align: ") and not out.exists()
    return lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "is not a mapping"),
        ("a: [", "is not valid YAML"),
        ("merge_method: linear", "Exactly one of 'models'"),
        ("base_model: x/y\nexperts: [{source_model: x/z}]", "has 1 experts; experts_per_token is 2"),
        ("base_model: x/y\nexperts: [{}]\nalign: true", "experts.0.source_model: Field required"),
        ("base_model: x/y\ngate_mode: magic\nexperts_per_token: 1\nexperts: [{source_model: x/z}]", "'cheap_embed'"),
        ("base_model: x/y\nexperts_per_token: 1\nexperts: [{source_model: x/z}]", "needs positive_prompts"),
        ("merge_method: linear\nmodels: 3", "models: "),
        ("merge_method: magic\nmodels: [{model: x/y}]", "magic"),
        ("merge_method: linear\nmodels: [{model: x/y}]\nalign: {reference: z/z}", "not one of the recipe's models"),
        ("merge_method: linear\nmodels: [{model: x/y}]\nalign: {refrence: x/y}", "align: refrence: Extra inputs"),
        ("merge_method: linear\nmodels: [{model: x/y}]\nalign: {steps: 5}", "steps applies to match: learned"),
        (
            "merge_method: linear\nmodels: [{model: x/y}]\nname: a\n---\n"
            "merge_method: linear\nmodels: [{model: a}]\nalign: {steps: 5}",
            "steps applies to match: learned",
        ),
        (
            "merge_method: linear\nmodels: [{model: {model: {path: x/y}, override_architecture: X}}]",
            "names a model by model, override_",
        ),
        (
            "merge_method: linear\nmodels: [{model: x/y}, {model: x/z}]\ndtype: float5\nalign: true",
            "float5 is not a dtype",
        ),
    ],
)
def test_recipes_that_are_none(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yml").write_text(text)
    assert message in refused(tmp_path / "recipe.yml", tmp_path / "out", capsys)


def test_no_such_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in refused(tmp_path / "none.yml", tmp_path / "out", capsys)


def test_models_that_do_not_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path / "r.yml", **linear(LLAMA / "0", GPT2 / "0"), align=True)
    assert "they do not merge" in refused(recipe, tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("more", "passed"),
    [
        ({"aling": True}, ["aling"]),
        ({"parameters": {"densty": 0.5, "normalize": True}}, ["parameters: densty"]),
        ({}, []),
        (
            {"models": None, "slices": [{"sources": [
                {"model": str(LLAMA / seed), "layer_range": [0, 3], "wieght": 1, "parameters": {"weight": 0.5, "t": 1}}
                for seed in "01"], "outputs": 1}]},
            ["outputs", "wieght", "parameters: t"],
        ),
    ],
)  # fmt: skip
def test_what_a_recipe_says_to_nobody_is_told(
    more: dict[str, Any], passed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {k: v for k, v in {**linear(LLAMA / "0", LLAMA / "1"), **more}.items() if v is not None}
    assert run("mergekit", write_recipe(tmp_path / "r.yml", **recipe), tmp_path / "out") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "passed over" in line]
    assert lines == [f"warning: {key} means nothing to merge_method linear, and is passed over" for key in passed]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"merge_method": "ties"}, "base"),
        ({"merge_method": "slerp"}, "base"),
        ({"merge_method": "model_stock"}, "base"),
        ({"models": [{"model": str(MODELS / "vit" / seed)} for seed in "01"]}, "Missing required parameter weight"),
    ],
)
def test_recipes_that_do_not_fit_their_method(
    more: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = linear(MODELS / "vit" / "0", MODELS / "vit" / "1", align=True)
    error = refused(write_recipe(tmp_path / "r.yml", **{**recipe, **more}), tmp_path / "out", capsys)
    assert "the merge does not fit its method: " in error and message in error


def test_an_output_that_another_run_is_writing_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = tmp_path / "out" / "model-00001-of-00002.safetensors"
    recipe = write_recipe(tmp_path / "r.yml", **linear(LLAMA / "0", LLAMA / "1"))
    with claimed(tmp_path / "out", {}) as claim:
        shard.write_bytes(b"of the other run")
        assert run("mergekit", recipe, tmp_path / "out") == 2
        assert "another run is writing to" in capsys.readouterr().err
        assert shard.read_bytes() == b"of the other run" and claim.work.is_dir()


def test_an_output_that_is_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    recipe = write_recipe(tmp_path / "r.yml", **linear(LLAMA / "0", LLAMA / "1"))
    assert run("mergekit", recipe, tmp_path / "out") == 2
    assert "is not empty" in capsys.readouterr().err
    assert run("mergekit", recipe, tmp_path / "out", "--overwrite") == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


# Versions of mergekit that are not known -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "family"),
    [
        pytest.param("0.1.4", LLAMA, id="0.1.4-llama"),
        pytest.param("0.2.0", GPT2, id="0.2.0-gpt2", marks=pytest.mark.slow),
    ],
)
def test_another_version_gets_folders_that_are_aligned(
    version: str, family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of our loaders to the last bit, and one line says why it took longer."""
    recipe = write_recipe(tmp_path / "recipe.yml", **linear(family / "0", family / "1"), align=True)
    assert run("mergekit", recipe, tmp_path / "loaders") == 0
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(loaders, "run_mergekit", None)
    capsys.readouterr()
    assert run("mergekit", recipe, tmp_path / "folders") == 0
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if "is not one whose loaders are known" in line]
    assert len(said) == 1 and said[0].startswith(f"mergekit {version} ") and "aligned into folders" in said[0]
    assert f"merged by mergekit {version}" in captured.out
    assert_same(weights(tmp_path / "folders"), weights(tmp_path / "loaders"))
    assert_whole(tmp_path / "folders", transformers.AutoModelForCausalLM)
    assert not list(tmp_path.glob("folders/.mergekit"))
    for file in (tmp_path / "folders").rglob("*"):
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes(), file


@pytest.mark.parametrize("gone", [pytest.param("loaders", marks=pytest.mark.slow), "LoaderCache"])
def test_a_loader_cache_that_is_not_there(
    gone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is right, and what is lent to is not: mergekit is run as a command all the same."""
    from mergekit.io import tasks

    if gone == "loaders":
        monkeypatch.delattr(tasks.LoaderCache, gone)
    else:
        monkeypatch.delattr(tasks, gone)
    recipe = write_recipe(tmp_path / "recipe.yml", **linear(LLAMA / "0", LLAMA / "1"), align=True)
    assert run("mergekit", recipe, tmp_path / "out") == 0
    assert "aligned into folders" in capsys.readouterr().err
    monkeypatch.undo()
    assert run("mergekit", recipe, tmp_path / "loaders") == 0
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "loaders"))


@pytest.mark.slow
def test_another_version_that_does_not_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.2.0")
    recipe = write_recipe(tmp_path / "r.yml", **linear(MODELS / "vit" / "0", MODELS / "vit" / "1"), align=True)
    error = refused(recipe, tmp_path / "out", capsys)
    assert "mergekit 0.2.0 does not merge these models whole (" in error and "pip install" in error
    recipe = write_recipe(tmp_path / "r.yml", **linear(LLAMA / "0", LLAMA / "1", merge_method="magic"))
    assert "magic" in refused(recipe, tmp_path / "out", capsys)
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", "--method", "karcher", "--quiet") == 2
    assert "mergekit 0.2.0 are not called as those of 0.1.5" in capsys.readouterr().err


def test_where_mergekit_ends_in_an_error_of_its_own_its_methods_are_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of BERT without a head it adds a list to a tuple."""
    config = transformers.BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=6, max_position_embeddings=8)  # fmt: skip
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        transformers.BertModel(config).save_pretrained(tmp_path / name)
    recipe = write_recipe(tmp_path / "r.yml", **linear(tmp_path / "a", tmp_path / "b"))
    assert run("mergekit", recipe, tmp_path / "out") == 0
    assert "merged by the methods of mergekit, tensor by tensor" in " ".join(capsys.readouterr().out.split())
    a, b, merged = (weights(tmp_path / name) for name in ("a", "b", "out"))
    assert merged.keys() == a.keys()
    for name in merged:
        torch.testing.assert_close(merged[name].float(), (a[name] + b[name]).float() / 2, rtol=1e-2, atol=1e-2)
