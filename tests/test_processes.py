"""Several processes at one merge: the same bytes as one, and one error for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODELS
from faults import contents

from hf_align.errors import CheckpointError, HfAlignError
from hf_align.processes import Processes

PAIR = (str(MODELS / "llama" / "0"), str(MODELS / "llama" / "1"))
LAUNCH = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no",
          "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip


def launch(processes: int, cwd: Path, *arguments: str, out_folder: str = "out") -> subprocess.CompletedProcess[str]:
    several = ["--multi_gpu"] if processes > 1 else []
    command = [sys.executable, *LAUNCH, *several, "--num_processes", str(processes), "-m", "hf_align", *arguments]
    cwd.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, "-o", out_folder], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("matching", ["none", "weight"])
def test_the_same_bytes_as_one_process(matching: str, tmp_path: Path) -> None:
    arguments = ("merge", *PAIR, "--match", matching, "--max-shard-size", "300KB", "--quiet")
    for processes in (1, 3):
        ran = launch(processes, tmp_path / str(processes), *arguments)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("is written") == 1
    one, three = (contents(tmp_path / n / "out") for n in "13")
    assert one == three and len([name for name in one if name.startswith("model-")]) > 3


def test_an_error_in_one_is_said_once(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("")
    ran = launch(2, tmp_path / "run", "merge", *PAIR, "--match", "none", "--quiet", out_folder=str(taken))
    assert ran.returncode != 0
    said = [line for line in ran.stderr.splitlines() if line.startswith("hf-align:")]
    assert len(said) == 1 and "is not empty" in said[0]
    assert [p.name for p in taken.iterdir()] == ["mine"]


def test_shares_are_even_and_whole() -> None:
    sizes = [5, 1, 4, 4, 2, 7, 1]
    items = list(range(len(sizes)))
    for count in range(1, 9):
        shares = [Processes(rank, count).share_of(items, sizes.__getitem__) for rank in range(count)]
        assert sorted(item for share in shares for item in share) == items
        loads = [sum(sizes[i] for i in share) for share in shares]
        assert max(loads) <= max(max(sizes), 2 * sum(sizes) / count)


def test_the_error_of_one_is_the_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Processes(1, 2)
    monkeypatch.setattr("accelerate.utils.gather_object", lambda own: [("CheckpointError", "w is bad"), *own])
    with pytest.raises(CheckpointError, match="w is bad") as caught, second.together():
        pass
    assert caught.value.shared
    alone = Processes()
    with pytest.raises(HfAlignError, match="mine") as caught_alone, alone.together():
        raise HfAlignError("mine")
    assert caught_alone.value.shared
