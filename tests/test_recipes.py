"""What a recipe says beside mergekit's own: mappings, several documents, the key align, and what came of it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import DATA, MODELS, run, save, tiny_llama, tiny_vit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_align.checkpoints.hub import Source
from hf_align.errors import CheckpointError
from hf_align.mergekit import taking
from hf_align.mergekit.config import Align, Recipe
from hf_align.mergekit.documents import in_order
from hf_align.mergekit.taking import require_numbers_in
from hf_align.publishing.provenance import Provenance

pytest.importorskip("mergekit", reason="pip install hf-align[mergekit]")

Document = dict[str, Any]


def linear(*models: object, **more: Any) -> Document:
    each = [{"model": m if isinstance(m, (str, dict)) else str(m), "parameters": {"weight": 1.0}} for m in models]
    return {"models": each, "merge_method": "linear", **more}


def merged(folder: Path, *documents: Document) -> dict[str, torch.Tensor]:
    """What a recipe gives."""
    recipe = folder.parent / f"{folder.name}.yml"
    recipe.write_text(yaml.safe_dump_all(documents))
    assert run("mergekit", recipe, folder, "--quiet") == 0
    return load_file(folder / "model.safetensors")


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [save(tmp_path / f"model{seed}", tiny_llama(), seed) for seed in range(3)]


def refused(recipe: Document, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that a recipe is refused with; nothing is left behind."""
    (folder / "refused.yml").write_text(yaml.safe_dump(recipe))
    capsys.readouterr()
    assert run("mergekit", folder / "refused.yml", folder / "refused", "--quiet", *flags) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and not (folder / "refused").exists()
    return said[0]


def change(model: Path, name: str, entry: int, value: float) -> None:
    stored = load_file(model / "model.safetensors")
    stored[name].view(-1)[entry] = value
    save_file(stored, model / "model.safetensors", {"format": "pt"})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_models_may_be_written_as_mappings(models: list[Path], tmp_path: Path) -> None:
    a, b = map(str, models[:2])
    plain = merged(tmp_path / "plain", linear(a, b))
    for number, mapping in enumerate(
        ({"path": b}, {"path": b, "revision": None}, {"model": {"path": b}, "lora": None})
    ):
        assert same(merged(tmp_path / f"mapping{number}", linear(a, mapping)), plain)


@pytest.mark.parametrize("align", [None, True])
@pytest.mark.parametrize("last", [None, "last"])
def test_a_document_takes_the_result_of_another(
    last: str | None, align: bool | None, models: list[Path], tmp_path: Path
) -> None:
    a, b, c = models
    final: Document = {"align": align, **linear("first", c)} | ({"name": last} if last else {})
    first = {"align": align, "name": "first", **linear(a, b)}
    found = merged(tmp_path / "out", first, final)
    by_hand = merged(tmp_path / "one", {"align": align, **linear(a, b)})
    assert same(load_file(tmp_path / "out.parts" / "first" / "model.safetensors"), by_hand)
    assert same(merged(tmp_path / "two", {"align": align, **linear(tmp_path / "one", c)}), found)
    if last is None:  # the order in which they are written does not matter then
        assert same(merged(tmp_path / "turned", final, first), found)


def test_a_result_may_be_the_reference_of_another_document() -> None:
    recipes = [Recipe("first", linear("a/b"), None), Recipe(None, linear("first", "a/c"), Align(reference="first"))]
    (_, first), (last, _) = in_order(recipes, Path("out"))
    assert last.align is not None and last.align.reference == str(first)


@pytest.mark.parametrize("output", [".", "..", "x/.."])
def test_a_folder_may_be_named_by_where_it_lies(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    recipes = [Recipe("first", linear("a/b"), None), Recipe(None, linear("first", "a/c"), None)]
    (_, first), (_, last) = in_order(recipes, Path(output))
    whole = Path(output).resolve()
    assert last == Path(output) and first.resolve() == whole.parent / f"{whole.name}.parts" / "first"


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([{"name": "x", **linear("y", "a/b")}, {"name": "y", **linear("x", "a/b")}], "depend on each other"),
        ([linear("a/b", "a/c"), linear("a/b", "a/c")], "called nothing"),
        ([{"name": "x", **linear("a/b")}, {"name": "x", **linear("a/b")}], "called x"),
        ([{"name": "../x", **linear("a/b")}], "name is '../x'"),
        ([{"name": "x", **linear("a/b")}, linear("x", merge_method="magic")], "magic"),
        ([linear("a/b", "a/c", align={"heads": "two_stage"})], "align: heads: Input should be 'two-stage', 'circuits'"),
        ([linear("a/b", "a/c", align={"steps": 0})], "align: steps"),
        ([{"name": "x", **linear("a/b", "a/c")}, linear("x", "a/c", align={"reference": "y"})], "reference y"),
    ],
    ids=[
        "cycle",
        "two without a name",
        "one name twice",
        "a path",
        "method of a later one",
        "heads",
        "steps",
        "reference of a later one",
    ],
)
def test_documents_that_are_none(
    documents: list[Document], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump_all(documents))
    assert run("mergekit", tmp_path / "recipe.yml", tmp_path / "out") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yml"]


def test_how_it_is_aligned_is_the_recipes_choice(tmp_path: Path) -> None:
    heads = tiny_llama(num_attention_heads=4, num_key_value_heads=4)
    models = [save(tmp_path / f"model{seed}", heads, seed) for seed in range(2)]
    asked = [{"match": "weight"}, {"spaces": ["*mlp*"]}, {"heads": "monotonic"}, {"match": "learned", "steps": 1},
             {"match": "learned", "steps": 2}, {"match": "learned", "steps": 2, "seed": 1}]  # fmt: skip
    found = [merged(tmp_path / f"out{n}", linear(*models, align=align)) for n, align in enumerate(asked)]
    assert not any(same(one, other) for i, one in enumerate(found) for other in found[:i])
    assert Provenance.load(tmp_path / "out1").strategy["spaces"] == "*mlp*"


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Sixteen rows of held-out text."""
    rows = load_file(DATA / "eval_lm_kjv.safetensors")["input_ids"][:16]
    save_file({"input_ids": rows.clone()}, tmp_path / "few.safetensors")
    return tmp_path / "few.safetensors"


def test_what_came_of_a_recipe_is_measured_and_reported(few: Path, tmp_path: Path) -> None:
    gpt2 = MODELS / "gpt2"
    merged(tmp_path / "out", linear(gpt2 / "0", gpt2 / "1", align={"data": str(few)}))
    made = Provenance.load(tmp_path / "out")
    said = next(note for note in made.notes if note.startswith("linear merges to a loss of"))
    tokens = load_file(few)["input_ids"].long()
    with torch.no_grad():
        loss = float(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens, labels=tokens).loss)
    assert f"a loss of {loss:.3f};" in said and f"the mean of the aligned models {loss:.3f}" in said
    assert made.comparison is not None and made.comparison["aligned"]["losses"][10] == pytest.approx(loss, abs=1e-4)
    assert any("alignment lowers the barrier from 1." in note for note in made.notes)
    assert run("report", tmp_path / "out", "-o", tmp_path / "report.html") == 0
    assert "barrier" in (tmp_path / "report.html").read_text()


def test_fine_tunes_that_stay_as_they_are_are_measured_too(few: Path, tmp_path: Path) -> None:
    llama = MODELS / "llama" / "0"
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    model.save_pretrained(tmp_path / "tuned")
    merged(tmp_path / "out", linear(llama, tmp_path / "tuned", align={"data": str(few)}))
    made = Provenance.load(tmp_path / "out")
    assert any("share a basis already" in note for note in made.notes)
    said = next(note for note in made.notes if note.startswith("linear merges to a loss of"))
    assert made.comparison is not None and "the plain mean" in said
    assert f"a loss of {made.comparison['naive']['losses'][10]:.3f};" in said


def test_weights_of_nothing_are_no_fault_of_a_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [
        {"model": str(save(tmp_path / str(seed), tiny_vit(), seed)), "parameters": {"weight": 0}} for seed in "01"
    ]
    recipe = {"merge_method": "linear", "models": models, "align": True}
    (tmp_path / "r.yml").write_text(yaml.safe_dump(recipe))
    assert run("mergekit", tmp_path / "r.yml", tmp_path / "out", "--quiet") == 2
    assert "comes to NaN, though all models are finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("weights", "more", "said"),
    [
        ((1.0, -1.0), {}, "that torch.float32 cannot hold"),
        ((0.0, 0.0), {}, "comes to NaN, though all models are finite"),
        pytest.param((0.0, 0.0), {"align": True}, "comes to NaN, though all models are finite", marks=pytest.mark.slow),
        ((1e6, 1e6), {"dtype": "float16", "parameters": {"normalize": False}}, "that torch.float16 cannot hold"),
    ],
    ids=["difference", "nothing", "aligned", "float16"],
)
def test_what_mergekit_writes_has_numbers_only(
    weights: tuple[float, float], more: Document, said: str, models: list[Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recipe = linear(*models[:2], **more)
    for entry, weight in zip(recipe["models"], weights, strict=True):
        entry["parameters"]["weight"] = weight
    error = refused(recipe, tmp_path, capsys)
    assert said in error
    # One that comes to numbers is written as ever.
    for entry in recipe["models"]:
        entry["parameters"]["weight"] = 0.5
    found = merged(tmp_path / "sound", recipe)
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_a_later_shard_and_a_later_slice_are_read_too(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "_SLICE", 5)
    change(models[0], "model.norm.weight", -1, 3e38)
    recipe = linear(*models[:2], parameters={"normalize": False})
    recipe["models"][0]["parameters"]["weight"] = 2.0
    said = "model.norm.weight has entries that torch.float32 cannot hold"
    assert said in refused(recipe, tmp_path, capsys, "--out-shard-size", "100")
    recipe["models"][0]["parameters"]["weight"] = 1.0
    assert merged(tmp_path / "sound", recipe)["model.norm.weight"][-1] == 3e38


def test_a_model_that_is_damaged_is_named(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(models[1], "model.norm.weight", 0, torch.nan)
    error = refused(linear(*models), tmp_path, capsys)
    assert f"model.norm.weight in {models[1]} has NaN or infinite entries; this checkpoint is damaged" in error


@pytest.mark.slow
def test_of_another_version_what_is_written_has_numbers_only_too(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command writes it."""
    recipe = linear(*models[:2])
    for entry in recipe["models"]:
        entry["parameters"]["weight"] = 0.0
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1.4")
    assert "comes to NaN, though all models are finite" in refused(recipe, tmp_path, capsys)


def test_limits_that_all_models_have_stay(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = models
    for model in (a, b):
        change(model, "model.norm.weight", 3, -torch.inf)
        change(model, "model.norm.weight", 5, 1e38)
    found = merged(tmp_path / "out", linear(a, b))
    assert [name for name, tensor in found.items() if not tensor.isfinite().all()] == ["model.norm.weight"]
    assert found["model.norm.weight"].isinf().nonzero().tolist() == [[3]]
    said = f"model.norm.weight in {a} has NaN or infinite entries; this checkpoint is damaged"
    assert said in refused(linear(a, c), tmp_path, capsys)
    # One more that the models do not have is no limit.
    recipe = linear(a, b, parameters={"normalize": False})
    recipe["models"][0]["parameters"]["weight"] = 4.0
    assert "model.norm.weight has entries that torch.float32 cannot hold" in refused(recipe, tmp_path, capsys)


def test_limits_stay_where_layers_are_stacked(tmp_path: Path) -> None:
    """The layers are numbered anew."""
    a, out = tmp_path / "a", tmp_path / "out"
    for folder, layers in ((a, 2), (out, 3)):
        folder.mkdir()
        masks = {f"layers.{layer}.mask": torch.tensor([0.0, -torch.inf]) for layer in range(layers)}
        save_file(masks, folder / "model.safetensors")
    require_numbers_in(out, [Source(str(a), a)])
    save_file({"layers.2.mask": torch.tensor([-torch.inf, 0.0])}, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.2.mask has entries that torch.float32 cannot hold"):
        require_numbers_in(out, [Source(str(a), a)])


def test_a_method_of_mergekit_is_measured_too(few: Path, tmp_path: Path) -> None:
    llama = MODELS / "llama"
    assert run("merge", llama / "0", llama / "1", "-o", tmp_path / "out", "--method", "nuslerp", "--data", few,
               "--quiet") == 0  # fmt: skip
    notes = Provenance.load(tmp_path / "out").notes
    assert any(note.startswith("--method nuslerp merges to a loss of 3.") for note in notes)
    assert any(note.startswith("alignment lowers the barrier") for note in notes)


def test_flags_of_mergekit_are_honoured(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text(yaml.safe_dump(linear(*models[:2])))
    flags = {
        "small": ["--out-shard-size", "1000", "--lazy-unpickle"],
        "bare": ["--no-copy-tokenizer", "--allow-crimes"],
    }
    for name, words in {**flags, "plain": []}.items():
        assert run("mergekit", tmp_path / "r.yml", tmp_path / name, "--quiet", *words) == 0
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1 == len(list((tmp_path / "plain").glob("*.safet*")))
    assert run("mergekit", tmp_path / "r.yml", tmp_path / "small", "--quiet") == 2  # it was asked for otherwise


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out-shard-size", "many"], "--out-shard-size is many"),
        (["--out-shard-size", "5X"], "--out-shard-size is 5X"),
        (["--out-shard-size", "1.5B"], "--out-shard-size is 1.5B"),
        (["--device", "nowhere"], "nowhere"),
        (["--cuda"], "cuda"),
    ],
    ids=["size", "letter", "fraction", "device", "cuda"],
)
def test_flags_that_cannot_be_honoured(
    words: list[str], message: str, models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and words == ["--cuda"]:
        pytest.skip("there is one")
    (tmp_path / "r.yml").write_text(yaml.safe_dump(linear(*models[:2])))
    assert run("mergekit", tmp_path / "r.yml", tmp_path / "out", *words) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0] and not (tmp_path / "out").exists()
