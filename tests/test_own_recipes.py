"""Recipes with methods that mergekit does not have: what they give is what the commands give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import built, run, tiny_llama
from safetensors.torch import load_file
from test_transport import tuned

from hf_align.publishing.provenance import Provenance

pytest.importorskip("mergekit", reason="pip install hf-align[mergekit]")

Document = dict[str, Any]


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Two bases with a fine-tune each, and a third base."""
    bases = [built(tiny_llama(), seed) for seed in range(3)]
    made = {"a": bases[0], "c": bases[2], "b": bases[1], "chat": tuned(bases[0], tiny_llama(), 8),
            "code": tuned(bases[2], tiny_llama(), 9)}  # fmt: skip
    for name, model in made.items():
        model.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in made}


def written(folder: Path, *documents: Document) -> Path:
    recipe = folder.parent / f"{folder.name}.yml"
    recipe.write_text(yaml.safe_dump_all(documents))
    return recipe


def same(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def carrying(models: dict[str, str], *pairs: tuple[str, str], **more: Any) -> Document:
    entries = [{"model": models[f], "base_model": models[a]} for f, a in pairs]
    return {"merge_method": "transport", "base_model": models["b"], "models": entries, "align": True, **more}


def test_a_recipe_carries_one_as_the_command_does(models: dict[str, str], tmp_path: Path) -> None:
    recipe = written(tmp_path / "out", carrying(models, ("chat", "a"), parameters={"keep": 0.5}))
    assert run("mergekit", recipe, tmp_path / "out", "--quiet") == 0
    assert run("transport", models["chat"], "--base", models["a"], "--onto", models["b"], "--keep", "0.5", "-o",
               tmp_path / "command", "--quiet") == 0  # fmt: skip
    assert same(tmp_path / "out", tmp_path / "command")
    assert Provenance.load(tmp_path / "out").command == "hf-align mergekit out.yml OUT"


def test_a_recipe_carries_several_and_takes_the_result_of_another(models: dict[str, str], tmp_path: Path) -> None:
    document = carrying(models, ("chat", "a"), ("code", "c"))
    document["models"][1]["parameters"] = {"weight": 0.0}
    first = {
        "merge_method": "linear",
        "models": [{"model": models["b"], "parameters": {"weight": 1.0}}],
        "name": "onto",
    }
    several = written(tmp_path / "out", first, {**document, "base_model": "onto"})
    assert run("mergekit", several, tmp_path / "out", "--quiet") == 0
    without = written(tmp_path / "plain", carrying(models, ("chat", "a")))
    assert run("mergekit", without, tmp_path / "plain", "--quiet") == 0
    assert not same(tmp_path / "out", tmp_path / "plain"), "the text of the second is heard, though its change is not"
    sources = [each.name for each in Provenance.load(tmp_path / "out").inputs]
    assert sources == ["onto", "a", "c", "chat", "code"]


@pytest.mark.parametrize("method", ["curve", "regression"])
def test_a_recipe_merges_several_as_the_command_does(method: str, models: dict[str, str], tmp_path: Path) -> None:
    align = {"steps": 3} if method == "curve" else True
    document = {"merge_method": method, "models": [{"model": models[n]} for n in "abc"], "align": align}
    assert run("mergekit", written(tmp_path / "out", document), tmp_path / "out", "--quiet") == 0
    steps = ["--steps", "3"] if method == "curve" else []
    assert run("merge", *(models[n] for n in "abc"), "--match", "weight", "--method", method, *steps, "-o",
               tmp_path / "command", "--quiet") == 0  # fmt: skip
    assert same(tmp_path / "out", tmp_path / "command")


def with_weights(models: dict[str, str], *weights: float) -> list[Document]:
    return [{"model": models[n], "parameters": {"weight": w}} for n, w in zip("abc", weights, strict=False)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {"base_model": None}, "needs a base_model, which the fine-tunes are carried to"),
        (lambda m: {"models": [{"model": m["chat"]}]}, "needs the base_model that"),
        (lambda m: {"slices": []}, "slices means nothing to merge_method transport"),
        (lambda m: {"parameters": {"density": 0.5}}, "density means nothing to merge_method transport"),
        (lambda m: {"parameters": {"keep": 2}}, "keep is 2.0"),
        (lambda m: {"parameters": {"keep": [0, 1]}}, "needs one finite number"),
        (lambda m: {"align": {"reference": m["a"]}}, "reference means nothing"),
        (lambda m: {"models": []}, "needs a list of models"),
        (lambda m: {"merge_method": "curve"}, "base_model means nothing to merge_method curve"),
        (lambda m: {"merge_method": "curve", "base_model": None, "models": with_weights(m, 1, 1, 2)}, "in equal parts"),
        (lambda m: {"merge_method": "curve", "base_model": None, "models": with_weights(m, 1)}, "needs two models"),
        (lambda m: {"merge_method": "curve", "base_model": None, "models": with_weights(m, 1, -2)}, "must be positive"),
    ],
)
def test_what_has_no_meaning(
    change: Any, message: str, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = written(tmp_path / "out", carrying(models, ("chat", "a")) | change(models))
    assert run("mergekit", recipe, tmp_path / "out", "--quiet") == 2
    said = capsys.readouterr().err.strip()
    assert message in " ".join(said.split()) and not (tmp_path / "out").exists()
