"""What can be known before anything is written is: a run that is refused for it has not even asked for its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from conftest import run, tiny_gpt2, tiny_vit
from safetensors.torch import save_file

import hf_align
from hf_align.errors import HfAlignError
from hf_align.jobs import job

Arguments = list[object]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small ones of two kinds, with names that do not matter."""
    found = {}
    for name, kind, config in (
        *((n, transformers.GPT2LMHeadModel, tiny_gpt2()) for n in "abc"),
        *((n, transformers.ViTForImageClassification, tiny_vit()) for n in "vw"),
    ):
        torch.manual_seed(ord(name))
        found[name] = tmp_path_factory.mktemp("models") / name
        kind(config).save_pretrained(found[name])
    return found


@pytest.fixture(autouse=True)
def nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def claimed(*_: object, **__: object) -> None:
        raise AssertionError("the output folder was claimed")

    monkeypatch.setattr(job, "claimed", claimed)
    yield


def refused(capsys: pytest.CaptureFixture[str], out: Path, *arguments: object) -> str:
    """The one line of a command that has not come as far as its output."""
    assert run(*arguments, "--quiet") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("hf-align: ") and "was claimed" not in line and not out.exists()
    return line


def recipe(tmp_path: Path, folders: dict[str, Path], **more: object) -> Path:
    each = [{"model": str(folders[name]), "parameters": {"weight": 0.5}} for name in "ab"]
    entries = {"merge_method": "linear", "models": each, **more}
    (tmp_path / "r.yml").write_text(yaml.safe_dump({k: v for k, v in entries.items() if v is not None}))
    return tmp_path / "r.yml"


# Examples -------------------------------------------------------------------------------------------------------------

DATA: dict[str, tuple[str, str]] = {
    "out of range": ("d.jsonl", '{"input_ids": [1, 100]}'),
    "negative": ("d.jsonl", '{"input_ids": [-1, 2]}'),
    "ragged": ("d.jsonl", '{"input_ids": [1, 2]}\n{"input_ids": [1]}'),
    "empty": ("d.jsonl", ""),
    "empty rows": ("d.jsonl", '{"input_ids": []}\n{"input_ids": []}'),
    "1-D": ("d.jsonl", '{"input_ids": 1}\n{"input_ids": 2}'),
    "wrong keys": ("d.jsonl", '{"tokens": [1, 2]}\n{"tokens": [1, 2]}'),
    "no numbers": ("d.jsonl", '{"input_ids": ["a"]}'),
    "no JSON": ("d.jsonl", "{"),
    "another encoding": ("d.txt", "caf\xe9"),
    "no text": ("d.txt", ""),
    "longer than positions": ("d.jsonl", json.dumps({"input_ids": [1] * 11})),
    "no safetensors": ("d.safetensors", "x"),
    "not there": ("d.jsonl", ""),
}
COMMANDS: dict[str, Callable[[Path, dict[str, Path], Path, Path], Arguments]] = {
    "merge": lambda t, m, d, out: ["merge", m["a"], m["b"], "-o", out, "--data", d],
    "plain": lambda t, m, d, out: ["merge", m["a"], m["b"], "-o", out, "--data", d, "--match", "none"],
    "learned": lambda t, m, d, out: ["merge", m["a"], m["b"], "-o", out, "--data", d, "--match", "learned"],
    "curve": lambda t, m, d, out: ["merge", m["a"], m["b"], "-o", out, "--data", d, "--method", "curve"],
    "distil": lambda t, m, d, out: ["merge", m["a"], m["b"], "-o", out, "--data", d, "--method", "distil"],
    "transport": lambda t, m, d, out: ["transport", m["a"], "--base", m["b"], "--onto", m["c"], "-o", out, "--data", d],
    "several": lambda t, m, d, out: ["merge", m["a"], m["b"], m["c"], "-o", out, "--data", d],
    "align": lambda t, m, d, out: ["align", m["a"], m["b"], "-o", out, "--data", d, "--match", "activation"],
    "ties": lambda t, m, d, out: ["merge", m["a"], m["b"], "-o", out, "--data", d, "--method", "nuslerp"],
    "recipe": lambda t, m, d, out: ["mergekit", recipe(t, m, align={"data": str(d), "match": "activation"}), out],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_examples(command: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = DATA if command == "merge" else {k: DATA[k] for k in ("out of range", "not there")}
    for kind, (name, text) in kinds.items():
        file = tmp_path / name
        file.unlink(missing_ok=True)
        if kind != "not there":
            file.write_bytes(text.encode("latin-1"))
        out = tmp_path / "out"
        assert name in refused(capsys, out, *COMMANDS[command](tmp_path, models, file, out)), kind


def test_examples_without_anything_to_predict(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would do to match on; there would be nothing to report, after all was written."""
    save_file({"pixel_values": torch.zeros(4, 1, 4, 4)}, tmp_path / "d.safetensors")
    for more in ((), ("--match", "none")):
        arguments = ("merge", models["v"], models["w"], "-o", tmp_path / "out", "--data", tmp_path / "d.safetensors")
        assert "no labels" in refused(capsys, tmp_path / "out", *arguments, *more)


ODD: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "size": ({"pixel_values": torch.zeros(4, 1, 8, 8), "labels": torch.zeros(4).long()}, "does not run on it (Input"),
    "class": ({"pixel_values": torch.zeros(4, 1, 4, 4), "labels": torch.tensor([0, 1, 77, 1])}, "Target 77 is out of"),
    "no label": ({"pixel_values": torch.zeros(4, 1, 4, 4), "labels": torch.full((4,), -100)}, "all labels"),
}


@pytest.mark.parametrize("kind", ODD)
def test_examples_that_the_model_does_not_run_on(
    kind: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The modelling code says so only when it runs, which it did when all had been written."""
    data, said = ODD[kind]
    save_file(data, file := tmp_path / "d.safetensors")
    for more in ((), ("--method", "regression"), ("--match", "none")):
        arguments = ("merge", models["v"], models["w"], "-o", tmp_path / "out", "--data", file, *more)
        assert said in refused(capsys, tmp_path / "out", *arguments)
    with pytest.raises(HfAlignError) as raised:
        hf_align.evaluate(models["v"], models["w"], data, points=3)
    assert said in str(raised.value)


# Options --------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Arguments, str]] = {
    "a baseline": (["--residual", "separate"], "--allow-inexact"),
    "features": (["--residual", "first"], "needs --match activation"),
    "no such space": (["--spaces", "nothing"], "no space is called nothing"),
    "no device": (["--device", "foo"], "foo is no device"),
    "no such device": (["--device", "cuda:77"], "device cuda:77 is not available"),
    "shards": (["--max-shard-size", "much"], "not a shard size"),
    "shards of nothing": (["--max-shard-size", "0"], "not a shard size"),
    "shards of a plain merge": (["--max-shard-size", "much", "--match", "none"], "not a shard size"),
    "no such alignment": (["--alignment", "nowhere"], "is not an alignment file"),
    "another alignment": (["--alignment", "OTHER"], "made for another architecture"),
    "too large for a curve": (["--method", "curve", "--offload"], "--method curve holds both models in memory"),
    "too large to learn": (["--match", "learned", "--offload"], "--match learned holds all models in memory"),
    "too large for fisher": (["--method", "fisher", "--offload"], "--method fisher holds"),
    "a method of two": (["C", "--method", "slerp"], "merges two models"),
    "a weight of two": (["C", "--weight", "0.3"], "equal shares"),
    "no base": (["--method", "ties"], "say with --base which it is"),
    "a proof of nothing": (["--match", "none", "--method", "linear", "--certify"], "--match none moves none"),
    "a proof with a method of mergekit": (["--method", "karcher", "--certify"], "--certify is not for"),
    "a parameter twice": (["--method", "nearswap", "--parameter", "t=1", "--parameter", "t=2"], "t is given twice"),
    "data twice": (["--data", "x.txt", "--data", "y.txt"], "--data is given 2 times, and takes one value"),
    "no parameter": (["--method", "nearswap"], "needs --parameter t=VALUE"),
    "a weight of a method that has none": (["--method", "karcher", "--weight", "0.3"], "gives no model a weight"),
    "a parameter of another method": (["--method", "nuslerp", "--parameter", "densty=0.5"], "has no parameter densty"),
    "a parameter of another kind": (["--method", "nearswap", "--parameter", "t=much"], "'much': Input should be"),
    "a parameter without a value": (["--method", "nearswap", "--parameter", "t"], "not of the form name=value"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, message = OPTIONS[case]
    other = tmp_path / "other.safetensors"
    save_file({}, other, {"hf-align alignment": "{}"})
    arguments = [{"C": models["c"], "OTHER": other}.get(str(word), word) for word in given]
    assert message in refused(
        capsys, tmp_path / "out", "merge", models["a"], models["b"], *arguments, "-o", tmp_path / "out"
    )


def cut(*ranges: tuple[str, int, int]) -> list[dict[str, object]]:
    return [{"sources": [{"model": model, "layer_range": [start, stop]}]} for model, start, stop in ranges]


@pytest.mark.parametrize("align", [True, None], ids=["aligned", ""])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"merge_method": "ties"}, "does not fit its method"),
        ({"merge_method": "nearswap", "base_model": "A"}, "Missing required parameter t"),
        ({"dtype": "float5"}, "float5 is not a dtype"),
        ({"out_dtype": "float5"}, "float5 is not a dtype"),
        ({"dtype": "float32", "out_dtype": "float5"}, "float5 is not a dtype"),
        (
            {"models": None, "slices": [("A", 0, 1), ("B", 1, 3)], "merge_method": "passthrough"},
            "the 1 layers of the model",
        ),
    ],
    ids=["base", "parameter", "dtype", "out_dtype", "both", "slices"],
)
def test_recipes(
    more: dict[str, object], message: str, align: bool | None, models: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    named = {"A": str(models["a"]), "B": str(models["b"])}
    asked = {k: named.get(v, v) if isinstance(v, str) else v for k, v in more.items()}
    if isinstance(slices := more.get("slices"), list):
        asked["slices"] = cut(*((named[model], start, stop) for model, start, stop in slices))
    file = recipe(tmp_path, models, **asked, **({"align": True} if align else {}))
    assert message in refused(capsys, tmp_path / "out", "mergekit", file, tmp_path / "out")


def test_a_merge_that_is_sound_comes_as_far_as_its_folder(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("merge", models["a"], models["b"], "-o", tmp_path / "out", "--quiet") == 2
    assert "was claimed" in capsys.readouterr().err
