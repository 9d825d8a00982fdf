"""The command line from end to end, on the trained models and on bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import DATA, MODELS, built, run, save, tiny_bert, tiny_llama
from safetensors.torch import load_file, save_file

LLAMA = MODELS / "llama"
GPT2 = MODELS / "gpt2"


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
def test_a_merge_loads_whole(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = MODELS / family / "0", MODELS / family / "1"
    assert run("merge", a, b, "-o", tmp_path / "out", "--json", "--max-shard-size", "1MB") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["distance_after"] < report["distance_before"]
    assert report["untied"] == (family == "gpt2")
    auto = transformers.AutoModelForImageClassification if family == "vit" else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(model).__name__ in json.loads((a / "config.json").read_text())["architectures"]
    for file in a.glob("tokenizer*"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


@pytest.mark.quick
def test_a_merge_is_the_midpoint_of_the_aligned_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (LLAMA / "0", LLAMA / "1", "--no-witness")
    assert run("merge", *common, "-o", tmp_path / "zero", "--weight", 0) == 0
    assert run("merge", *common, "-o", tmp_path / "one", "--weight", 1) == 0
    assert run("merge", *common, "-o", tmp_path / "half") == 0
    ends = [load_file(tmp_path / n / "model.safetensors") for n in ("zero", "one", "half")]
    for name in ends[0]:
        torch.testing.assert_close((ends[0][name] + ends[1][name]) / 2, ends[2][name])


def test_the_ends_compute_what_the_inputs_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = load_file(DATA / "eval_lm_kjv.safetensors")["input_ids"][:4].long()
    for weight, source in ((0, "0"), (1, "1")):
        assert run("merge", GPT2 / "0", GPT2 / "1", "-o", tmp_path / source, "--weight", weight) == 0
        models = [transformers.AutoModelForCausalLM.from_pretrained(p) for p in (GPT2 / source, tmp_path / source)]
        with torch.no_grad():
            before, after = (m(ids).logits for m in models)
        assert float((before - after).abs().max()) < 1e-4
    assert models[1].config.tie_word_embeddings is False


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
def test_align_writes_the_same_function(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, out = MODELS / family / "0", MODELS / family / "1", tmp_path / "out"
    assert run("align", a, b, "-o", out) == 0
    auto = transformers.AutoModelForImageClassification if family == "vit" else transformers.AutoModelForCausalLM
    data = load_file(DATA / ("eval_digits.safetensors" if family == "vit" else "eval_lm_kjv.safetensors"))
    key = "pixel_values" if family == "vit" else "input_ids"
    inputs = data[key][:8] if family == "vit" else data[key][:8].long()
    with torch.no_grad():
        before, after = (auto.from_pretrained(p)(inputs).logits for p in (b, out))
    assert float((before - after).abs().max()) < 1e-4
    assert (out / "alignment.safetensors").is_file()


def test_a_saved_alignment_is_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = (LLAMA / "0", LLAMA / "1")
    assert run("align", *pair, "-o", tmp_path / "aligned") == 0
    assert run("merge", *pair, "-o", tmp_path / "first") == 0
    saved = tmp_path / "aligned" / "alignment.safetensors"
    assert run("merge", *pair, "-o", tmp_path / "second", "--alignment", saved) == 0
    assert (tmp_path / "first/model.safetensors").read_bytes() == (tmp_path / "second/model.safetensors").read_bytes()
    assert run("merge", GPT2 / "0", GPT2 / "1", "-o", tmp_path / "third", "--alignment", saved) == 2
    assert "another architecture" in capsys.readouterr().err


def test_an_alignment_of_other_weights_is_told_from_that_of_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B keeps its function whatever moves it, so that no witness finds this out."""
    a, b = (save(tmp_path / n, tiny_llama(), seed) for seed, n in enumerate("ab"))
    assert run("align", a, b, "-o", tmp_path / "aligned", "--quiet") == 0
    saved, told = tmp_path / "aligned" / "alignment.safetensors", "--alignment was found for other weights"
    for number, (pair, notes) in enumerate((((a, b), 0), ((b, a), 1))):
        capsys.readouterr()
        assert run("merge", *pair, "-o", tmp_path / f"merged{number}", "--alignment", saved, "--quiet", "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert sum(told in note for note in report["notes"]) == notes
        assert (report["distance_after"] < report["distance_before"]) == (notes == 0)
        assert (told in (tmp_path / f"merged{number}" / "README.md").read_text()) == (notes == 1)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
@pytest.mark.parametrize("options", [["--match", "none"], ["--match", "weight", "--no-witness"]], ids=" ".join)
def test_a_result_is_loaded_in_the_dtype_that_it_is_stored_in(
    options: list[str], key: str | None, tmp_path: Path
) -> None:
    """transformers loads in the dtype that the config names, and loses digits without a word."""
    for seed, name in enumerate("ab"):
        built(tiny_llama(), seed).half().save_pretrained(tmp_path / name)
        config = tmp_path / name / "config.json"
        said = {k: v for k, v in json.loads(config.read_text()).items() if k != "dtype"}
        config.write_text(json.dumps(said | ({key: "float16"} if key else {})))
    a, b, out = (tmp_path / name for name in ("a", "b", "out"))
    assert run("merge", a, b, "-o", out, "--quiet", "--method", "linear", "--dtype", "float32", *options) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32
    assert json.loads((out / "config.json").read_text())[key or "dtype"] == "float32"


@pytest.mark.parametrize(
    ("stored", "asked"), [("bfloat16", None), ("float16", "float32"), ("float32", "float16"), ("float64", "bfloat16")]
)
def test_dtypes_in_and_out(stored: str, asked: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is stored is rounded once: arithmetic knows neither dtype."""
    for n in "01":
        shutil.copytree(LLAMA / n, tmp_path / n)
        rounded = {k: t.to(getattr(torch, stored)) for k, t in load_file(LLAMA / n / "model.safetensors").items()}
        save_file(rounded, tmp_path / n / "model.safetensors", {"format": "pt"})
        wide = {k: t.float() for k, t in rounded.items()}
        shutil.copytree(LLAMA / n, tmp_path / f"wide{n}")
        save_file(wide, tmp_path / f"wide{n}" / "model.safetensors", {"format": "pt"})
    more = ["--dtype", asked] if asked else []
    assert run("merge", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "out", "--quiet", *more) == 0
    assert run("merge", tmp_path / "wide0", tmp_path / "wide1", "-o", tmp_path / "exact", "--quiet") == 0
    found, exact = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "exact"))
    for name, tensor in exact.items():
        assert found[name].dtype == getattr(torch, asked or stored)
        if stored == "float64":  # its arithmetic stays wide
            torch.testing.assert_close(found[name], tensor.to(found[name].dtype), rtol=2**-7, atol=1e-5)
        else:
            assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def test_bert_with_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        transformers.BertForMaskedLM(tiny_bert(num_hidden_layers=2)).save_pretrained(tmp_path / str(seed))
    assert run("merge", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "out", "--weight", 1) == 0
    ids = torch.randint(11, (3, 10), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before, after = (
            transformers.BertForMaskedLM.from_pretrained(tmp_path / p).eval()(ids).logits for p in ("1", "out")
        )
    assert float((before - after).abs().max()) < 1e-5


def test_evaluate_speaks_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "held_out.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 20)
    assert run("evaluate", LLAMA / "0", LLAMA / "1", "--data", text, "--points", 3, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["lambdas"] == [0.0, 0.5, 1.0]
    for path in ("naive", "aligned"):
        assert len(result[path]["losses"]) == 3
        assert result[path]["barrier"] == pytest.approx(
            result[path]["losses"][1] - (result["loss_a"] + result["loss_b"]) / 2, rel=1e-4
        )


def test_spec_explain_and_certify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("spec", LLAMA / "0", "-o", tmp_path / "spec.yaml") == 0
    assert "RotaryCommutant" in (tmp_path / "spec.yaml").read_text()
    assert run("explain", LLAMA / "0", "model.layers.0.mlp.up_proj.weight", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["axes"][1] == "128:residual^-1"
    assert run("certify", LLAMA / "0", "--layers", 1, "--json") == 0
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["complete"] == {"moved": 54, "fixed": 24, "flat": 0, "open": 0, "found": 78, "nullity": 78}
    assert certificate["sound"]["max_error"] < 1e-9
    assert run("explain", LLAMA / "0", "nothing") == 2


# Bad input: one line, exit status 2, nothing written ---------------------------------------------------------------


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def poison(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def other_vocabulary(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[:2]
    words[first], words[second] = words[second], words[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def narrow(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def become_gpt2(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(GPT2 / "0", folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_tensor, "lacks model.norm.weight, which LlamaForCausalLM needs; if it is of another class"),
        (poison, "up_proj.weight in model.safetensors has NaN"),
        (truncate, "truncated"),
        (other_vocabulary, "different vocabularies"),
        (narrow, "different sizes"),
        (no_config, "has no config.json"),
        (become_gpt2, "they do not merge"),
        (shutil.rmtree, "not a folder"),
    ],
)
def test_bad_input_is_one_line(
    damage: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    bad = tmp_path / "bad"
    shutil.copytree(LLAMA / "1", bad)
    damage(bad)
    assert run("merge", LLAMA / "0", bad if bad.exists() else "no/such", "-o", tmp_path / "out", "--quiet") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("hf-align: ")
    assert message in error[0]
    assert not (tmp_path / "out").exists()


def test_an_unwritable_output_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "file" / "x", "--quiet") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_installed_command_runs() -> None:
    command = [sys.executable, "-m", "hf_align", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "merge" in shown and "certify" in shown
