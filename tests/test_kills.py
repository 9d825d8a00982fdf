"""Every command that writes or uploads, killed anywhere: the same again ends as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
import torch
import yaml
from conftest import tiny_gpt2
from faults import contents
from forks import forked
from hub_server import Hub
from test_output import LLAMA, mixture_of, recipe_of
from transformers import GPT2LMHeadModel

FEW, MANY = 3, 20
OFTEN = pytest.mark.parametrize(
    "points", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = [tmp_path_factory.mktemp("models") / name for name in "abc"]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        GPT2LMHeadModel(tiny_gpt2()).save_pretrained(folder)
    rows = torch.randint(11, (32, 10), generator=torch.Generator().manual_seed(0)).tolist()
    (folders[0].parent / "d.jsonl").write_text("\n".join(json.dumps({"input_ids": r, "labels": r}) for r in rows))
    return [*map(str, folders), str(folders[0].parent / "d.jsonl")]


def documents_of(a: str, b: str, c: str, file: Path) -> Path:
    """A recipe of which one document merges two models, and the other one its result with a third."""
    parts = [
        {"name": "half", "merge_method": "linear", "models": [a, b]},
        {"merge_method": "linear", "models": ["half", c]},
    ]
    whole = [{**p, "models": [{"model": m, "parameters": {"weight": 0.5}} for m in p["models"]]} for p in parts]
    file.write_text(yaml.safe_dump_all(whole))
    return file


SMALL = ("--max-shard-size", "2KB")
COMMANDS: dict[str, Callable[[list[str], Path], list[object]]] = {
    "plain": lambda m, t: ["merge", *m[:2], "--match", "none", *SMALL],
    "merge": lambda m, t: ["merge", *m[:2], *SMALL],
    "align": lambda m, t: ["align", *m[:2]],
    "learned": lambda m, t: ["merge", *m[:2], "--match", "learned", "--steps", "52", "--data", m[3]],
    "curve": lambda m, t: ["merge", *m[:2], "--method", "curve", "--steps", "52", "--data", m[3]],
    "regression": lambda m, t: ["merge", *m[:2], "--method", "regression", "--data", m[3]],
    "distil": lambda m, t: ["merge", *m[:2], "--method", "distil", "--steps", "12", "--data", m[3]],
    "transport": lambda m, t: ["transport", m[0], "--base", m[1], "--onto", m[2], "--data", m[3], *SMALL],
    "method": lambda m, t: ["merge", *m[:2], "--method", "ties", "--base", m[2], *SMALL],
    "several": lambda m, t: ["merge", *m[:3], *SMALL],
    "aligned recipe": lambda m, t: ["mergekit", recipe_of(Path(m[0]), Path(m[1]), t / "r.yml", align=True), "OUT"],
    "recipe of two documents": lambda m, t: ["mergekit", documents_of(*m[:3], file=t / "r.yml"), "OUT"],
    "mixture": lambda m, t: ["mergekit", mixture_of(LLAMA / "0", LLAMA / "1", t / "r.yml", align=True), "OUT"],
}  # fmt: skip


QUICK = ("plain", "several", "aligned recipe")


@OFTEN
@pytest.mark.parametrize("command", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in COMMANDS])
def test_the_same_again_ends_the_same(command: str, points: int, models: list[str], tmp_path: Path) -> None:
    arguments = [*map(str, COMMANDS[command](models, tmp_path))]
    ran = forked(faults.main, points, points, tmp_path / "out", arguments)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) >= points and all(f["killed"] and f["same"] for f in found), found


@OFTEN
@pytest.mark.parametrize("command", ["push", "merge --push"])
def test_an_upload_ends_the_same(command: str, points: int, models: list[str], hub: Hub, tmp_path: Path) -> None:
    """Whatever the server had done of it by then."""
    merged, repository = tmp_path / "merged", "alice/whole"
    plain = ["merge", *models[:2], "--match", "none", *SMALL]
    assert forked(faults.killed_once, 0, merged, plain).stdout.split()[:2] == ["False", "0"]

    def asked() -> list[str]:
        if command == "push":
            return ["push", "OUT", repository, "--private"]
        return [*plain, "--push", repository, "--private"]

    rng = random.Random(points)
    changes = kills = 0
    for number in range(points + 1):
        out, repository = (merged if command == "push" else tmp_path / str(number)), f"alice/x{number}"
        kill_at = rng.randint(1, changes) if number else 0
        ran = forked(faults.killed_once, kill_at, out, asked())
        assert ran.stdout, ran.stderr
        killed, status, counted = ran.stdout.split()
        came_so_far = kill_at > 0 and (killed == "True" or int(counted) >= kill_at)
        assert (killed, status) == (str(came_so_far), "0"), (kill_at, counted, ran.stderr)
        changes, kills = int(counted) or changes, kills + (killed == "True")  # a later push finds digests that are kept
        uploaded = {k: v for k, v in hub.files(repository).items() if k != ".gitattributes"}
        assert uploaded == {k: v for k, v in contents(out).items() if not k.startswith(".hf-align")}, kill_at
        assert hub.repositories[repository].private
    assert kills > points // 2, "a run may end before it is killed: one upload makes a few changes less than another"
