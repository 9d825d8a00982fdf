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

from hf_align import cli, pipeline, plain  # noqa: F401  (loaded before forks)

CHANGES = ("posix_fallocate", "pwrite", "fsync", "replace", "unlink", "write", "mkdir", "rmdir")


def counted(change: Callable[..., Any], counter: list[int], kill_at: int | None) -> Callable[..., Any]:
    def hooked(*arguments: Any, **options: Any) -> Any:
        counter[0] += 1
        if counter[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*arguments, **options)

    return hooked


def run(arguments: list[str], out: Path, *, kill_at: int | None = None, most: int | None = None) -> tuple[int, int]:
    """One run in a process of its own: its wait status, and the changes to the disk that it counted.

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
    cli.emit = counted(cli.emit, counter, kill_at)
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    command = [str(out) if a == "OUT" else a for a in arguments]
    sys.argv = ["hf-align", *command, *([] if "OUT" in arguments else ["-o", str(out)]), "--quiet"]
    try:
        cli.main()
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        print(counter[0], file=os.fdopen(write, "w"), flush=True)
        os._exit(status)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def main(points: int, seed: int, out: Path, arguments: list[str]) -> None:
    status, changes = run(arguments, out)
    assert status == 0 and changes, "the run that is not killed"
    whole = contents(out)
    rng = random.Random(seed)
    # The last ones are when all is written: as the claim is given up, and before the run says that it is done.
    late = range(max(1, changes - 4), changes + 1)
    early = rng.sample(range(1, late.start), min(points - len(late), late.start - 1))
    for kill_at in sorted([*early, *late]):
        shutil.rmtree(out)
        killed, _ = run(arguments, out, kill_at=kill_at)
        status, again = run(arguments, out)
        same = status == 0 and contents(out) == whole
        print(
            json.dumps({"at": kill_at, "of": changes, "killed": os.WIFSIGNALED(killed), "same": same, "again": again})
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[5:])
