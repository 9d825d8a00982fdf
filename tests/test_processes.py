"""Several processes at one merge: the same bytes as one, and one error for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import MODELS, tiny_llama
from faults import contents
from forks import forked, script

from hf_align.errors import CheckpointError, HfAlignError
from hf_align.runtime import processes
from hf_align.runtime.processes import Processes

PAIR = (str(MODELS / "llama" / "0"), str(MODELS / "llama" / "1"))
LAUNCH = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no",
          "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip


COUNTING = Path(__file__).with_name("counting.py")
"""The program, and who solved what."""


def launch(
    processes: int, cwd: Path, *arguments: str, out_folder: str = "out", program: tuple[str, ...] = ("-m", "hf_align")
) -> subprocess.CompletedProcess[str]:
    several = ["--multi_gpu"] if processes > 1 else []
    command = [sys.executable, *LAUNCH, *several, "--num_processes", str(processes), *program, *arguments]
    cwd.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, "-o", out_folder], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_same_bytes_as_one_process(tmp_path: Path) -> None:
    arguments = ("merge", *PAIR, "--match", "none", "--max-shard-size", "300KB", "--quiet")
    for count in (1, 3):
        ran = launch(count, tmp_path / str(count), *arguments)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("is written") == 1
    one, three = (contents(tmp_path / n / "out") for n in "13")
    assert one == three and len([name for name in one if name.startswith("model-")]) > 3


def test_each_process_matches_its_share(tmp_path: Path) -> None:
    """Layers and spaces are solved once among all, by all of them, and all end with the bytes of one."""
    # Fewer tokens than the stream has dimensions: what they leave open is found in all layers.
    sizes = dict(hidden_size=32, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, head_dim=8)
    for n in range(2):
        torch.manual_seed(n)
        transformers.LlamaForCausalLM(tiny_llama(**sizes)).save_pretrained(tmp_path / "models" / str(n))
    pair = (str(tmp_path / "models" / n) for n in "01")
    arguments = ("merge", *pair, "--match", "weight", "--max-shard-size", "30KB", "--quiet")
    done: dict[int, list[dict[str, int]]] = {}
    for count in (1, 2):
        where = tmp_path / str(count)
        if count > 1:
            ran = launch(count, where, *arguments, program=(str(COUNTING),))
        else:
            where.mkdir()
            ran = forked(script, str(COUNTING), *arguments, "-o", "out", cwd=where)
        assert ran.returncode == 0, ran.stderr
        done[count] = [json.loads((where / f"{rank}.json").read_text()) for rank in range(count)]
        # Threads of the connection that outlive the interpreter may abort it.
        assert [(where / f"{rank}.end").read_text() for rank in range(count)] == ["False"] * count
    assert contents(tmp_path / "1" / "out") == contents(tmp_path / "2" / "out")
    for kind, whole in done[1][0].items():
        shares = [counts.get(kind, 0) for counts in done[2]]
        assert sum(shares) == whole, (kind, shares, whole)
        if whole > 10:
            assert min(shares) > whole / 6, (kind, shares)  # shares are even in work, not in number
    assert set(done[1][0]) == {"steps", "stream", "products", "gauges"}


@pytest.mark.slow
def test_one_process_where_several_were_asked_for_is_said(tmp_path: Path) -> None:
    """Without a GPU, --num_processes alone starts one."""
    command = [sys.executable, *LAUNCH, "--num_processes", "2", "-m", "hf_align", "merge", *PAIR, "--match", "none",
               "--quiet", "-o", str(tmp_path / "out")]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0
    said = [line for line in ran.stderr.splitlines() if line.startswith("hf-align:")]
    assert len(said) == 1 and "asked for several processes and has started one" in said[0] and "--multi_gpu" in said[0]
    command[command.index("2")] = "1"
    ran = subprocess.run([*command, "--overwrite"], capture_output=True, text=True)
    assert ran.returncode == 0 and "hf-align:" not in ran.stderr


def test_work_is_spread_and_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes in turn, each told what the others will say."""
    items = [3, 1, 4, 1, 5, 9, 2, 6]

    def spread(said: list[object], rank: int) -> list[str]:
        monkeypatch.setattr(processes, "_from", lambda by, own: own if by == rank else said[by])
        return Processes(rank, 3).spread(items, lambda n: n, lambda own: [f"{rank}:{n}" for n in own])

    shares = [Processes(rank, 3).share_of(items, lambda n: n) for rank in range(3)]
    said = [(None, [f"{rank}:{n}" for n in share]) for rank, share in enumerate(shares)]
    found = [spread(list(said), rank) for rank in range(3)]
    assert found[0] == found[1] == found[2] and [int(f[2:]) for f in found[0]] == items
    assert {f[0] for f in found[0]} == set("012")
    with pytest.raises(CheckpointError, match="w is bad") as caught:
        spread([said[0], (("CheckpointError", "w is bad"), ()), said[2]], 0)
    assert caught.value.shared


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
