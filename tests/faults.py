"""Runs of the command line that are killed for real: python tests/faults.py POINTS SEED OUT -- ARGUMENTS of hf-align,
where `-o OUT` is put behind them unless OUT is one of them.

One process loads the program, and every run is a fork of it, killed by SIGKILL when it has changed the disk a random
number of times. Prints one line of JSON for each point: how many changes there were, and whether the run that went on
had the same files in the end as one that was never killed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_weights import by_weights
from huggingface_hub.utils import get_session

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.cli import console
from hf_align.cli.app import main as hf_align
from hf_align.jobs import aligned, merge  # noqa: F401  (loaded before forks)
from hf_align.jobs.lacking import asked_of_code
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.tracing.build import read_config

CHANGES = ("posix_fallocate", "pwrite", "fsync", "replace", "unlink", "write", "mkdir", "rmdir")


def counted(change: Callable[..., Any], counter: list[int], kill_at: int | None) -> Callable[..., Any]:
    def hooked(*arguments: Any, **options: Any) -> Any:
        counter[0] += 1
        if counter[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*arguments, **options)

    return hooked


def requested(send: Callable[..., Any], counter: list[int], kill_at: int | None) -> Callable[..., Any]:
    """What asks a server: a kill may come before it is asked, and before the answer is looked at."""
    answered = counted(lambda answer: answer, counter, kill_at)
    return lambda *arguments, **options: answered(counted(send, counter, kill_at)(*arguments, **options))


def run(arguments: list[str], out: Path, *, kill_at: int | None = None, most: int | None = None) -> tuple[int, int]:
    """One run in a process of its own: its wait status, and the changes to the disk and requests that it counted.

    Args:
        most: bytes that a file may have, as on a disk that is full.
    """
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read) as pipe:
            count = int(pipe.read() or 0)
        return os.waitpid(child, 0)[1], count
    counter, status = [0], 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name), counter, kill_at))
    console.emit = counted(console.emit, counter, kill_at)
    client: Any = type(get_session())
    client.send = requested(client.send, counter, kill_at)
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    command = by_weights([str(out) if a == "OUT" else a for a in arguments])
    sys.argv = ["hf-align", *command, *([] if "OUT" in arguments else ["-o", str(out)]), "--quiet"]
    try:
        hf_align()
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        print(counter[0], file=os.fdopen(write, "w"), flush=True)
        os._exit(status)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def killed_once(kill_at: int, out: Path, arguments: list[str]) -> None:
    """Prints the statuses of a run that is killed, if it comes that far, and of the same again; and its changes."""
    killed, changes = run(arguments, out, kill_at=kill_at or None)
    print(os.WIFSIGNALED(killed), run(arguments, out)[0] >> 8, changes)


def main(points: int, seed: int, out: Path, arguments: list[str]) -> None:
    for folder in (Path(a) for a in arguments if (Path(a) / "config.json").is_file()):
        symmetries(read_config(folder))  # once for all runs, which are forks
        with asked_of_code(folder, Checkpoint.open(folder), trust_remote_code=False) as said:
            said()
    run(arguments, out)  # what is found out once for all runs is written by this one, and not counted
    made = sorted(out.parent.glob(f"{out.name}*"))  # a recipe of several documents makes two folders
    for folder in made:
        shutil.rmtree(folder)
    status, changes = run(arguments, out)
    assert status == 0 and changes, "the run that is not killed"
    whole = [contents(folder) for folder in made]
    rng = random.Random(seed)
    # The last ones are when all is written: as the claim is given up, and before the run says that it is done.
    late = range(max(1, changes - min(4, points // 2)), changes + 1)
    early = rng.sample(range(1, late.start), min(points - len(late), late.start - 1))
    for kill_at in sorted([*early, *late]):
        for folder in made:
            shutil.rmtree(folder)
        killed, _ = run(arguments, out, kill_at=kill_at)
        status, again = run(arguments, out)
        same = status == 0 and [contents(folder) for folder in made] == whole
        print(
            json.dumps({"at": kill_at, "of": changes, "killed": os.WIFSIGNALED(killed), "same": same, "again": again})
        )


def begun_anew_with_another_weight(out: Path, arguments: list[str]) -> None:
    """Prints the status of a run, and of the same after each of three with another weight that were killed."""
    other = [*arguments, "--weight", "0.3", "--overwrite"]
    changes = run(other, out.with_name("other"))[1]
    statuses = [run(arguments, out)[0] >> 8]
    for kill_at in (changes // 2, changes - 5, changes - 3):
        run(other, out, kill_at=kill_at)
        statuses.append(run(arguments, out)[0] >> 8)
    print(*statuses)


def on_a_full_disk(out: Path, arguments: list[str]) -> None:
    """Prints the status, the shards that are left, the status with room again, and that of a run beside it."""
    status = run(arguments, out, most=200_000)[0]
    left = [p.name for p in out.rglob("*.safetensors")]
    print(status >> 8, left, run(arguments, out)[0], run([*arguments, "--overwrite"], Path(f"{out}2"))[0])


def while_an_input_changes(out: Path, arguments: list[str], changing: Path) -> None:
    """Prints whether a run was killed, how many shards it left, and the statuses after the change."""
    _, changes = run(arguments, out.with_name("whole"))
    late = changes * 3 // 4  # shards reach the disk beside the ones that are computed
    print(os.WIFSIGNALED(run(arguments, out, kill_at=late)[0]), len(list(out.glob("*.safetensors"))))
    os.utime(changing)
    print(run(arguments, out)[0] >> 8, run([*arguments, "--overwrite"], out)[0] >> 8)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[5:])
