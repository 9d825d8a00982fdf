"""Nothing of the user's is lost: inputs are read-only, and only what hf-align wrote is ever removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import MODELS, run
from faults import contents
from safetensors.torch import save_file

LLAMA = MODELS / "llama"
SCRIPT = Path(__file__).with_name("faults.py")
PLAIN = ("--match", "none", "--quiet")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Copies of two models, in a folder of their own."""
    for seed in "01":
        shutil.copytree(LLAMA / seed, tmp_path / "in" / seed)
    return tmp_path / "in" / "0", tmp_path / "in" / "1"


def recipe_of(a: Path, b: Path, file: Path, **more: object) -> Path:
    models = [{"model": str(m), "parameters": {"weight": 0.5}} for m in (a, b)]
    file.write_text(yaml.safe_dump({"merge_method": "linear", "models": models, **more}))
    return file


def mixture_of(a: Path, b: Path, file: Path, **more: object) -> Path:
    """A recipe of mergekit-moe, with the first model as base and both as experts."""
    experts = [{"source_model": str(model), "positive_prompts": [f"text {i}"]} for i, model in enumerate((a, b))]
    file.write_text(yaml.safe_dump({"base_model": str(a), "gate_mode": "random", "experts": experts, **more}))
    return file


def lora_of(base: Path, folder: Path) -> Path:
    """An adapter of a base, in PEFT's layout."""
    if not folder.is_dir():
        folder.mkdir()
        wanted = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 4,
                  "target_modules": ["q_proj"]}  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(wanted))
        width = json.loads((LLAMA / "0" / "config.json").read_text())["hidden_size"]
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        shapes = {name.format("A"): (2, width), name.format("B"): (width, 2)}
        save_file({n: torch.full(shape, 0.01) for n, shape in shapes.items()}, folder / "adapter_model.safetensors")
    return folder


COMMANDS: dict[str, Callable[[Path, Path, Path], list[object]]] = {
    "plain": lambda a, b, out: ["merge", a, b, "-o", out, *PLAIN],
    "merge": lambda a, b, out: ["merge", a, b, "-o", out, "--quiet"],
    "several": lambda a, b, out: ["merge", a, b, LLAMA / "2", "-o", out, "--quiet"],
    "ties": lambda a, b, out: ["merge", a, b, "-o", out, "--quiet", "--match", "none", "--method", "nuslerp"],
    "align": lambda a, b, out: ["align", a, b, "-o", out, "--quiet"],
    "recipe": lambda a, b, out: ["mergekit", recipe_of(a, b, a.parent.parent / "r.yml"), out, "--quiet"],
    "aligned recipe": lambda a, b, out: [
        "mergekit", recipe_of(a, b, a.parent.parent / "r.yml", align=True), out, "--quiet"
    ],
    "mixture": lambda a, b, out: ["mergekit", mixture_of(a, b, a.parent.parent / "r.yml"), out, "--quiet"],
    "aligned mixture": lambda a, b, out: [
        "mergekit", mixture_of(a, b, a.parent.parent / "r.yml", align=True), out, "--quiet"
    ],
    "adapter": lambda a, b, out: ["merge", lora_of(a, a.parent.parent / "lora"), b, "-o", out, *PLAIN],
    "transport": lambda a, b, out: [
        "transport", a, "--base", b, "--onto", LLAMA / "2", "-o", out, "--method", "task_arithmetic", "--quiet"
    ],
    "transported adapter": lambda a, b, out: [
        "transport", lora_of(a, a.parent.parent / "lora"), "--base", a, "--onto", b, "-o", out,
        "--method", "task_arithmetic", "--quiet",
    ],
}  # fmt: skip

SLOW = ("several", "mixture", "aligned mixture", "transported adapter")
ALL_BUT_SLOW = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in COMMANDS]
"""Three models are matched for ten seconds, and mixtures are made by another program."""


def outputs(tmp_path: Path, a: Path, b: Path) -> dict[str, Path]:
    """Every way to name a place where an input is."""
    (tmp_path / "link").symlink_to(a)
    (tmp_path / "parents").symlink_to(a.parent)
    return {
        "A": a, "B": b, "inside": b / "merged", "deep inside": a / "x" / "y", "a parent": a.parent,
        "a link": tmp_path / "link", "through a link": tmp_path / "parents" / "1",
        "inside a link": tmp_path / "link" / "out", "roundabout": a / ".." / "0" / ".",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
def test_inputs_are_never_written_to(
    command: str, overwrite: tuple[str, ...], pair: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    a, b = pair
    ways = outputs(tmp_path, a, b)
    if "none" not in command and command not in ("plain", "recipe"):  # those that open the models take longer
        ways = {k: ways[k] for k in ("B", "inside a link", "a parent")}
    before = contents(tmp_path / "in")
    for way, out in ways.items():
        assert run(*COMMANDS[command](a, b, out), *overwrite) == 2, way
        error = capsys.readouterr().err
        assert "which is read; choose another -o" in error and len(error.splitlines()) == 1, (way, error)
        assert contents(tmp_path / "in") == before, way
        assert not (tmp_path / "in" / "0" / "x").exists()


def test_a_model_whose_files_are_in_the_output(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Its folder is elsewhere, and holds links to weights."""
    a, b = pair
    (tmp_path / "linked").mkdir()
    for file in a.iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    before = contents(a)
    assert run("merge", tmp_path / "linked", b, "-o", a, "--overwrite", *PLAIN) == 2
    assert contents(a) == before


def test_data_and_the_like_are_inputs_too(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    out = tmp_path / "out"
    assert run("align", a, b, "-o", out, "--quiet") == 0
    before = contents(out)
    assert run("merge", a, b, "-o", out, "--alignment", out / "alignment.safetensors", "--overwrite", "--quiet") == 2
    recipe = recipe_of(a, b, out / "recipe.yml")
    assert run("mergekit", recipe, out, "--overwrite", "--quiet") == 2
    recipe.unlink()
    assert contents(out) == before


MINE = ("notes.txt", "model.gguf.bak", "mine.safetensors", "data/train.jsonl", ".git/config")


@pytest.mark.parametrize("command", ALL_BUT_SLOW)
def test_overwriting_removes_what_was_written_and_nothing_else(
    command: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """The result of another command, with files of the user's in between."""
    a, b = pair
    out = tmp_path / "out"
    assert run("merge", a, b, "-o", out, "--max-shard-size", "200KB", *PLAIN) == 0
    for name in MINE:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    assert run(*COMMANDS[command](a, b, out), "--overwrite") == 0
    assert all((out / name).read_text() == name for name in MINE)
    assert not list(out.glob("model-0*")) and not (out / ".hf-align").exists()
    noted = json.loads((out / "hf-align" / "complete.json").read_text())["files"]
    there = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert there == {*noted, *MINE, "hf-align/complete.json"}


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model-00001-of-00002.safetensors", "alignment.safetensors", "config.json", "tokenizer.json",
     "README.md", "hf-align/notes.md"],
)  # fmt: skip
@pytest.mark.parametrize("command", ["plain", "recipe"])
def test_a_file_of_the_users_is_never_replaced(
    command: str, name: str, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    assert run(*COMMANDS[command](*pair, out), "--overwrite") == 2
    error = capsys.readouterr().err
    assert name.split("/")[0] in error and "was not written by hf-align" in error
    assert contents(out) == {name: b"mine"}


def test_a_result_that_was_changed_since_is_the_users(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("merge", *pair, "-o", tmp_path / "out", *PLAIN)
    assert run(*arguments) == 0
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text() + "\nMy own words.\n")
    before = contents(tmp_path / "out")
    assert run(*arguments, "--overwrite") == 2 and "was changed since" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("make", ["folder", "file", "link", "lock"])
@pytest.mark.parametrize("command", ["plain", "recipe"])
def test_a_folder_of_the_users_with_our_name(make: str, command: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if make == "file":
        (out / ".hf-align").write_text("mine")
    elif make == "link":
        (tmp_path / "elsewhere").mkdir()
        (out / ".hf-align").symlink_to(tmp_path / "elsewhere")
    else:
        (out / ".hf-align").mkdir()
        (out / ".hf-align" / ("lock" if make == "lock" else "notes.txt")).write_text("mine")
    before = contents(out)
    assert run(*COMMANDS[command](*pair, out)) == 2
    assert run(*COMMANDS[command](*pair, out), "--overwrite") == 2
    assert contents(out) == before and os.path.lexists(out / ".hf-align") and len(list(out.iterdir())) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_refused_run_leaves_nothing(command: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    config = json.loads((b / "config.json").read_text())
    (b / "config.json").write_text(json.dumps({**config, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    before = contents(tmp_path / "in")
    assert run(*COMMANDS[command](a, b, tmp_path / "new" / "deep" / "out")) == 2
    assert not (tmp_path / "new").exists() and contents(tmp_path / "in") == before


# A run is what it was asked, in order ---------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[Path, Path, Path], list[object]]] = {
    "order": lambda a, b, out: ["merge", b, a, "-o", out, *PLAIN],
    "twice": lambda a, b, out: ["merge", a, a, "-o", out, *PLAIN],
    "weight": lambda a, b, out: ["merge", a, b, "-o", out, *PLAIN, "--weight", "0.3"],
    "three": lambda a, b, out: ["merge", a, b, a, "-o", out, *PLAIN],
    "three, in another order": lambda a, b, out: ["merge", a, a, b, "-o", out, *PLAIN],
    "align": lambda a, b, out: ["align", a, b, "-o", out, "--quiet"],
    "method": lambda a, b, out: ["merge", a, b, "-o", out, *PLAIN, "--method", "slerp"],
    "recipe": lambda a, b, out: ["mergekit", recipe_of(a, b, a.parent.parent / "r1.yml"), out, "--quiet"],
    "recipe, in another order": lambda a, b, out: [
        "mergekit", recipe_of(b, a, a.parent.parent / "r2.yml"), out, "--quiet"
    ],
}  # fmt: skip


QUICK = ("plain", "order", "three", "recipe")


@pytest.mark.parametrize(
    "command", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in ("plain", *OTHERS)]
)
def test_a_complete_result_is_that_of_its_own_command_only(
    command: str, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways, out = {"plain": COMMANDS["plain"], **OTHERS}, tmp_path / "out"
    ways = {k: way for k, way in ways.items() if command not in QUICK or k in QUICK or k.startswith(command)}
    assert run(*ways[command](*pair, out)) == 0
    before = contents(out)
    for other, way in ways.items():
        assert (run(*way(*pair, out)) == 0) is (other == command), other
        assert other == command or "is not empty" in capsys.readouterr().err
    assert contents(out) == before


def killed_and_followed(tmp_path: Path, points: int, commands: list[list[str]]) -> list[list[object]]:
    """Of each command, killed a number of times, and each followed by another: the statuses, and what came of it."""
    script = f"""
import json, os, random, shutil, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from pathlib import Path
from faults import contents, run
commands, out, rng = {commands!r}, Path({str(tmp_path / "out")!r}), random.Random(0)
whole, counts = [], []
for command in commands:
    status, count = run(command, out)
    assert status == 0, command
    whole.append({{k: v for k, v in contents(out).items() if k.endswith("safetensors")}})
    counts.append(count)
    shutil.rmtree(out)
for first in range(len(commands)):
    for second in range(len(commands)):
        for kill_at in rng.sample(range(1, counts[first] + 1), {points}):
            run(commands[first], out, kill_at=kill_at)
            status, _ = run(commands[second], out)
            found = {{k: v for k, v in contents(out).items() if k.endswith("safetensors")}} if out.exists() else {{}}
            print(json.dumps([first, second, kill_at, status >> 8, found == whole[second]]))
            shutil.rmtree(out, ignore_errors=True)
"""
    ran = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in ran.stdout.decode().splitlines()]


@pytest.mark.parametrize("points", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_two_commands_mix_when_one_is_killed(points: int, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever follows a killed run ends with exit status 2, or with its own result."""
    ways = [COMMANDS["plain"], *(OTHERS[k] for k in ("order", "twice", "weight", "method"))]
    commands = [[*map(str, way(*pair, Path("OUT"))), "--max-shard-size", "100KB"] for way in ways]
    found = killed_and_followed(tmp_path, points, commands)
    assert len(found) == points * len(ways) ** 2
    for first, second, kill_at, status, is_own in found:
        assert (status == 0 and is_own) or (status == 2 and first != second), (first, second, kill_at, status)
