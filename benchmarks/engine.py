"""Time and memory of the engine: python benchmarks/engine.py [PART …] [--peer mergekit-yaml] [--folder DIR]

Two synthetic Llama checkpoints of random weights, bfloat16, in shards; every command in a process of its own, peers in
turn; medians of `--runs`. Each part prints its tables as it goes, and benchmarks/engine.md has the last run of each.

This process holds nothing large: what a child is said to have taken at most is never less than its parent.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__)
OURS = [sys.executable, "-m", "hf_align"]
LAYERS = {0.25: 3, 0.5: 8, 1.0: 20, 2.0: 43}
"""Billions of parameters -> layers of width 2048."""
MERGE = "models:\n  - model: {}\n    parameters: {{weight: 0.5}}\n  - model: {}\n    parameters: {{weight: 0.5}}\n" \
        "merge_method: linear\ndtype: bfloat16\n"  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What the system counted for a process, its children not included."""

    seconds: float
    cpu: float
    gib: float
    status: int = 0


def measure(command: Sequence[object], folder: Path | None = None, limits: Callable[[], None] | None = None) -> Run:
    began = time.perf_counter()
    child = subprocess.Popen(list(map(str, command)), cwd=folder, preexec_fn=limits, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return Run(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20, child.returncode)


def median(runs: Sequence[Run]) -> Run:
    assert not any(r.status for r in runs), "a command failed"
    return Run(*(statistics.median(getattr(r, f) for r in runs) for f in ("seconds", "cpu", "gib")))


def models(folder: Path, billions: float) -> list[Path]:
    """Two checkpoints of a size, made once."""
    pair = [folder / f"{billions}-{seed}" for seed in "01"]
    for seed, path in enumerate(pair):
        if not (path / "config.json").is_file():
            subprocess.run([sys.executable, HERE, "make", "--folder", path, "--billions", str(billions),
                            "--seed", str(seed)], check=True, stderr=subprocess.DEVNULL)  # fmt: skip
    return pair


def plain(pair: list[Path], out: Path, *more: object) -> list[object]:
    return [*OURS, "merge", *pair, "-o", out, "--match", "none", "--quiet", "--overwrite", *more]


def table(head: str, rows: Sequence[Sequence[object]]) -> None:
    typer.echo(f"\n| {head} |\n|{' --- |' * (head.count('|') + 1)}")
    for row in rows:
        typer.echo("| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in row) + " |")


# Parts --------------------------------------------------------------------------------------------------------------


def speed(folder: Path, runs: int, peer: str | None) -> None:
    """Plain linear merge of 1 B against the peer, and against reading both and writing one."""
    pair, out = models(folder, 1.0), folder / "out"
    (folder / "merge.yml").write_text(MERGE.format(*pair))
    theirs = [peer, folder / "merge.yml", out, "--no-copy-tokenizer", "--quiet"]
    commands: dict[str, Sequence[object]] = {
        "hf-align": plain(pair, out),
        "read both, write one, fsync": [sys.executable, HERE, "copy", *pair, "--folder", out],
        "`cp -r` of one": ["cp", "-r", pair[0], out],
    }
    if peer:
        commands["mergekit-yaml 0.1.5"] = theirs
        commands["mergekit-yaml 0.1.5, shards of 500 M"] = [*theirs, "--out-shard-size", "500M"]
    found: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            shutil.rmtree(out, ignore_errors=True)
            found[name].append(measure(command))
            os.sync()
    medians = {name: median(r) for name, r in found.items()}
    own = medians["hf-align"]
    table(
        "command | seconds | CPU seconds | peak GiB | seconds, of ours | CPU, of ours | peak, of ours",
        [(n, r.seconds, r.cpu, r.gib, r.seconds / own.seconds, r.cpu / own.cpu, r.gib / own.gib)
         for n, r in medians.items()],
    )  # fmt: skip


def growth(folder: Path, runs: int, sizes: Sequence[float]) -> None:
    """Plain linear merge of 0.25 to 2 B."""
    rows = []
    for size in sizes:
        pair, out = models(folder, size), folder / "out"
        taken = median([measure(plain(pair, out)) for _ in range(runs)])
        rows.append((f"{size} B", taken.seconds, taken.cpu, taken.gib))
        shutil.rmtree(out)
        if size != 1.0:
            for path in pair:
                shutil.rmtree(path)
    table("parameters | seconds | CPU seconds | peak GiB", rows)


def processes(folder: Path, runs: int) -> None:
    """Two processes against one, a thread each; the bytes of both."""
    pair, rows, digests = models(folder, 1.0), [], set()
    for count in (1, 2):
        out = folder / "out"
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no",
                  "--dynamo_backend", "no", "--main_process_port", "0", *(["--multi_gpu"] if count > 1 else []),
                  "--num_processes", count, "-m", "hf_align"]  # fmt: skip
        command = ["env", "OMP_NUM_THREADS=1", *launch, *plain(pair, out, "--max-shard-size", "250MB")[3:]]
        taken = median([measure(command) for _ in range(runs)])
        rows.append((count, taken.seconds, taken.cpu))
        digests.add(digest(out))
        shutil.rmtree(out)
    table("processes | seconds | CPU seconds", rows)
    typer.echo(f"\nThe bytes are {'the same' if len(digests) == 1 else 'DIFFERENT'}.")


def faults(folder: Path, points: int) -> None:
    """Killed at random moments of a run, and run again; a file that may not grow; two runs at once."""
    pair, out = models(folder, 0.25), folder / "out"
    command = plain(pair, out, "--max-shard-size", "100MB")
    command.remove("--overwrite")
    whole = measure(command)
    expected, same, early, rng = digest(out), 0, 0, random.Random(0)
    for _ in range(points):
        shutil.rmtree(out, ignore_errors=True)
        child = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.2, 1.0) * whole.seconds)
        child.send_signal(signal.SIGKILL)
        child.wait()
        # One that was killed on its way out, all written, is not run again: it would be refused as finished runs are.
        finished = out.exists() and not (out / ".hf-align").exists()
        early += not finished
        same += (finished or measure(command).status == 0) and digest(out) == expected
    shutil.rmtree(out)
    full = measure(command, limits=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000, 50_000_000)))
    again = measure(command).status == 0 and digest(out) == expected
    shutil.rmtree(out)
    two = [subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
           for _ in range(2)]  # fmt: skip
    said = [child.communicate()[1] for child in two]
    refused = [child.returncode for child in two].count(2) == 1 and any("another run" in s for s in said)
    ours = digest(out) == expected
    shutil.rmtree(out)
    full_disk = f"exit status {full.status}; then without: {'the same' if again else 'OTHER'} bytes"
    second = f"{'the second refuses' if refused else 'NOT refused'}; {'the same' if ours else 'OTHER'} bytes"
    rows = [
        (f"SIGKILL at {points} random moments, {early} before the end; run again", f"{same} byte-identical"),
        ("files of at most 50 MB (RLIMIT_FSIZE)", full_disk),
        ("two runs into one folder at once", second),
    ]
    table("fault | outcome", rows)


def transforms(folder: Path, size: float) -> None:
    """Merging with a given alignment: the transforms of both models against the matrix products that they are."""
    pair, out = models(folder, size), folder / "out"
    subprocess.run([sys.executable, HERE, "elements", *pair, "--folder", folder], check=True, stderr=subprocess.DEVNULL)
    command = [*OURS, "merge", *pair, "-o", out, "--alignment", folder / "alignment.safetensors", "--no-certify",
               "--quiet", "--overwrite", "--json"]  # fmt: skip
    taken = measure(command)
    assert taken.status == 0
    typer.echo(f"\nMerge: {taken.seconds:.1f} s, CPU {taken.cpu:.1f} s, peak {taken.gib:.2f} GiB")
    shutil.rmtree(out)
    measured = [sys.executable, HERE, "products", *pair, "--folder", folder]
    subprocess.run(measured, check=True, stderr=subprocess.DEVNULL)


def solvers(sizes: Sequence[int]) -> None:
    """What matching solves, at the widths of real models."""
    subprocess.run([sys.executable, HERE, "solve", *map(str, sizes)], check=True)


# What runs in a process of its own ----------------------------------------------------------------------------------


def make(folder: Path, billions: float, seed: int) -> None:
    """A checkpoint of random weights in four shards."""
    import torch
    import transformers

    from hf_align.shards import ShardPlan, claimed, whole, write_shards

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=LAYERS[billions],
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in transformers.LlamaForCausalLM(config).named_parameters()}
    rng = torch.Generator().manual_seed(seed)

    def produce(name: str) -> torch.Tensor:
        gain = len(shapes[name]) == 1
        return ((1 if gain else 0) + 0.02 * torch.randn(shapes[name], generator=rng)).bfloat16()

    plan = ShardPlan.build([(n, s, torch.bfloat16) for n, s in shapes.items()], f"{int(600 * billions)}MB")
    with claimed(folder, {}) as claim:
        write_shards(claim, plan, whole(produce))
    config.save_pretrained(folder)


def copy(pair: list[Path], out: Path) -> None:
    """Read two models and write the bytes of one, with nothing in between."""
    out.mkdir()
    chunk = memoryview(bytearray(2**22))
    for first in sorted(pair[0].glob("*.safetensors")):
        with first.open("rb", 0) as a, (pair[1] / first.name).open("rb", 0) as b, (out / first.name).open("wb", 0) as o:
            while count := a.readinto(chunk):
                b.readinto(chunk)
                o.write(chunk[:count])
            os.fsync(o.fileno())


def elements(pair: list[Path], folder: Path) -> None:
    """Random elements of every group, as an alignment file."""
    import torch

    from hf_align.matching.match import Match
    from hf_align.models import open_pair

    spec = open_pair(*map(str, pair)).spec
    rng = torch.Generator().manual_seed(0)
    sides = [{n: s.group.random(spec.index_shape(n), rng) for n, s in spec.spaces.items() if s.group} for _ in "ab"]
    Match(*sides).save(folder / "alignment.safetensors", spec)


def products(pair: list[Path], folder: Path) -> None:
    """The matrix products in the transforms of both models, in float32 and nothing else; and the transforms."""
    import torch

    from hf_align.matching.match import Match
    from hf_align.models import open_pair
    from hf_align.symmetry.action import blocks
    from hf_align.symmetry.alignment import AlignedWeights
    from hf_align.symmetry.elements import Matrix

    opened = open_pair(*map(str, pair))
    spec = opened.spec
    match = Match.load(folder / "alignment.safetensors", spec)
    began, count = time.perf_counter(), 0
    for name in spec.parameters:
        for side in (match.a, match.b):
            for block in blocks(spec, name):
                view = block.factored(torch.empty(spec.shape(name)))
                dense = [side[str(f.space)] for f in block.factors if f.space in side]
                for matrix in [e.matrix.float() for e in dense if isinstance(e, Matrix)]:
                    n, heads = matrix.shape[-1], matrix.shape[:-2]
                    torch.empty(*heads, view.numel() // (n * heads.numel()), n) @ matrix
                    count += 2 * view.numel() * n
    alone = time.perf_counter() - began
    began = time.perf_counter()
    for weights, side in ((opened.a.weights, match.a), (opened.b.weights, match.b)):
        moved = AlignedWeights(weights, spec, side)
        for name in spec.parameters:
            moved[name]
    taken = time.perf_counter() - began
    typer.echo(f"{count / 1e12:.1f} T operations: products alone {alone:.1f} s; "
               f"reading, gauges and transforms {taken:.1f} s: {taken / alone:.2f} times")  # fmt: skip


def solve(sizes: Sequence[int]) -> None:
    """Assignments and polar factors of cross matrices as matching has them."""
    import torch

    from hf_align.symmetry.groups import assign, polar

    rng = torch.Generator().manual_seed(0)

    def timed(work: Callable[[torch.Tensor], object], on: torch.Tensor) -> float:
        began = time.perf_counter()
        work(on)
        return time.perf_counter() - began

    def gain(n: int, noise: float) -> torch.Tensor:
        """Of n units that are alike up to noise, in 512 features."""
        a, b = (torch.randn(n, 512, generator=rng, dtype=torch.float64) for _ in range(2))
        return a @ (a + noise * b)[torch.randperm(n, generator=rng)].T

    rows: list[tuple[object, ...]] = []
    for n in (s for s in sizes if s in (4096, 11008, 14336)):
        for kind, noise in (("models alike", 1.0), ("models unlike", 1e3)):
            rows.append((f"assignment, {kind}", n, timed(assign, gain(n, noise))))
    for n in (s for s in sizes if s in (1024, 2048, 4096)):
        m = torch.randn(n, n, generator=rng, dtype=torch.float64)
        rows.append(("polar factor", n, timed(polar, m)))
        if n < 4096:
            rows.append(("polar factor by singular values", n, timed(torch.linalg.svd, m)))
        rows.append(("one product of two such matrices", n, timed(lambda m: m @ m, m)))
    table("problem | n | seconds", rows)


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            found.update(file.name.encode())
            with file.open("rb") as opened:
                found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def main(
    part: Annotated[
        list[str] | None,
        typer.Argument(help="speed, growth, processes, faults, transforms, solvers; by default all."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="For the models: 15 GB; by default a temporary one.")] = None,
    peer: Annotated[str | None, typer.Option(help="mergekit-yaml of mergekit 0.1.5.")] = None,
    runs: int = 3,
    billions: float = 1.0,
    seed: int = 0,
    heavy: Annotated[bool, typer.Option("--heavy", help="The largest sizes too.")] = False,
) -> None:
    part = part or ["speed", "growth", "processes", "faults", "transforms", "solvers"]
    inside: dict[str, Callable[[list[Path], Path], None]] = {"copy": copy, "elements": elements, "products": products}
    if part[0] == "make":
        return make(Path(str(folder)), billions, seed)
    if part[0] == "solve":
        return solve([int(n) for n in part[1:]])
    if part[0] in inside:
        return inside[part[0]]([Path(p) for p in part[1:]], Path(str(folder)))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = folder or Path(temporary)
        place.mkdir(exist_ok=True)
        parts: dict[str, Callable[[], None]] = {
            "speed": lambda: speed(place, runs, peer),
            "growth": lambda: growth(place, runs, [0.25, 0.5, 1.0, *([2.0] if heavy else [])]),
            "processes": lambda: processes(place, runs),
            "faults": lambda: faults(place, 20),
            "transforms": lambda: transforms(place, 1.0 if heavy else 0.25),
            "solvers": lambda: solvers([4096, 1024, 2048, *([11008, 14336] if heavy else [])]),
        }
        for name in part:
            typer.echo(f"\n## {name}")
            parts[name]()


if __name__ == "__main__":
    typer.run(main)
