"""Time and memory of the engine: python benchmarks/engine.py [PART …] [--peer mergekit-yaml] [--folder DIR]

Two synthetic Llama checkpoints of random weights, bfloat16, in shards; every command in a process of its own, peers in
turn; medians of `--runs`. Each part prints its tables as it goes, and benchmarks/engine.md has the last run of each.
What it writes is in a temporary folder, under `--folder`, that is gone when it ends.

This process holds nothing large: what a child is said to have taken at most is never less than its parent.
"""

from __future__ import annotations

import hashlib
import json
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__)
OURS = [sys.executable, "-m", "hf_align"]
SIZES = (0.25, 0.5, 1.0, 2.0)
"""Billions of parameters."""
ASSIGNMENTS, POLAR = (4096, 11008, 14336), (1024, 2048, 4096)
"""Hidden units, and widths of the residual stream, of models that are used."""
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


def sizes_of(billions: float, width: int | None = None) -> dict[str, int]:
    """The sizes of a Llama: of width 2048, or for what is measured in a minute of 768, unless it is said."""
    width = width or (2048 if billions > 0.06 else 768)
    kv, hidden, vocabulary = width // 512, 43 * width // 16, 32000
    layer = 2 * width**2 + 2 * width * 128 * kv + 3 * width * hidden
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": width // 128,
        "num_key_value_heads": kv,
        "num_hidden_layers": round((billions * 1e9 - 2 * vocabulary * width) / layer),
    }


def models(folder: Path, billions: float, width: int | None = None) -> list[Path]:
    """Two checkpoints of a size, made once."""
    pair = [folder / f"{billions}-{seed}" for seed in "01"]
    for seed, path in enumerate(pair):
        if not (path / "config.json").is_file():
            subprocess.run([sys.executable, HERE, "make", "--folder", path, "--billions", str(billions),
                            "--seed", str(seed), *(["--width", str(width)] if width else [])], check=True,
                           stderr=subprocess.DEVNULL)  # fmt: skip
    return pair


def moved_pair(folder: Path, billions: float, width: int | None = None) -> list[Path]:
    """A checkpoint of a size, and the same model in another basis: what matching finds in a few sweeps."""
    first, second = models(folder, billions, width)[0], folder / f"{billions}-moved"
    if not (second / "config.json").is_file():
        inside("move", first, folder=second)
    return [first, second]


def noisy_pair(folder: Path, billions: float, width: int | None = None) -> list[Path]:
    """A checkpoint of a size, and the same model in another basis with noise of the size of every matrix: models that
    have as much in common as they have apart."""
    first, moved = moved_pair(folder, billions, width)
    second = folder / f"{billions}-noisy"
    if not (second / "config.json").is_file():
        inside("blur", moved, folder=second)
    return [first, second]


def inside(what: str, *arguments: object, folder: Path | None = None) -> None:
    """A part of this script in a process of its own."""
    where = [] if folder is None else ["--folder", folder]
    subprocess.run([sys.executable, HERE, what, *map(str, arguments), *map(str, where)], check=True)


def plain(pair: list[Path], out: Path, *more: object) -> list[object]:
    return [*OURS, "merge", *pair, "-o", out, "--match", "none", "--quiet", "--overwrite", *more]


def table(head: str, rows: Sequence[Sequence[object]]) -> None:
    typer.echo(f"\n| {head} |\n|{' --- |' * (head.count('|') + 1)}")
    for row in rows:
        typer.echo("| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in row) + " |")


# Parts --------------------------------------------------------------------------------------------------------------


def speed(folder: Path, runs: int, peer: str | None, size: float) -> None:
    """Plain linear merge against the peer, and against reading both and writing one."""
    pair, out = models(folder, size), folder / "out"
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
    """Plain linear merge of growing models."""
    rows = []
    for size in sizes:
        pair, out = models(folder, size), folder / "out"
        taken = median([measure(plain(pair, out)) for _ in range(runs)])
        rows.append((f"{size} B", taken.seconds, taken.cpu, taken.gib))
        for path in (out, *pair):
            shutil.rmtree(path)
    table("parameters | seconds | CPU seconds | peak GiB", rows)


def processes(folder: Path, runs: int, size: float) -> None:
    """Two processes against one, a thread each: a plain merge, and matching by weights; the bytes of both."""
    for what, at, matching in (("plain", size, "none"), ("matched by weights", size / 4, "weight")):
        pair = models(folder, at) if matching == "none" else moved_pair(folder, at)
        rows, digests = [], set()
        for count in (1, 2):
            out = folder / "out"
            launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision",
                      "no", "--dynamo_backend", "no", "--main_process_port", "0",
                      *(["--multi_gpu"] if count > 1 else []), "--num_processes", count, "-m", "hf_align"]  # fmt: skip
            merged = plain(pair, out, "--max-shard-size", "250MB")[3:]
            merged[merged.index("none")] = matching
            command = ["env", "OMP_NUM_THREADS=1", *launch, *merged]
            taken = median([measure(command) for _ in range(runs if matching == "none" else 1)])
            rows.append((count, taken.seconds, taken.cpu))
            digests.add(digest(out))
            shutil.rmtree(out)
        typer.echo(f"\n{at} B, {what}; the bytes are {'the same' if len(digests) == 1 else 'DIFFERENT'}.")
        table("processes | seconds | CPU seconds", rows)


def aligned(folder: Path, size: float) -> None:
    """A whole aligned merge of a model with itself in another basis, rounded: each stage, and its transforms."""
    pair, out = moved_pair(folder, size), folder / "out"
    planned = [*OURS, "merge", *pair, "-o", out, "--dry-run", "--json"]
    bound = json.loads(subprocess.run(list(map(str, planned)), check=True, capture_output=True, text=True).stdout)
    inside("whole", *pair, folder=folder)
    typer.echo(f"\n--dry-run: at most {bound['peak_bytes'] / 2**30:.2f} GiB beside the program ({bound['largest']})")
    alignment = out / "hf-align" / "alignment.safetensors"
    shutil.copyfile(alignment, folder / alignment.name)
    inside("products", *pair, folder=folder)
    shutil.rmtree(out)


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
        early += not out.exists() or (out / ".hf-align").exists()
        same += measure(command).status == 0 and digest(out) == expected
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


def solvers(sizes: Sequence[int]) -> None:
    """What matching solves, at the widths of real models."""
    inside("solve", *map(str, sizes))


# What runs in a process of its own ----------------------------------------------------------------------------------


def make(folder: Path, billions: float, seed: int, width: int | None) -> None:
    """A checkpoint of random weights in four shards."""
    import torch
    import transformers

    from hf_align.checkpoints.claim import claimed
    from hf_align.checkpoints.plan import ShardPlan
    from hf_align.checkpoints.shards import whole, write_shards

    config = transformers.LlamaConfig(
        **sizes_of(billions, width), tie_word_embeddings=False, dtype="bfloat16", architectures=["LlamaForCausalLM"]
    )
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


def move(model: list[Path], folder: Path) -> None:
    """A model in a random basis."""
    import torch

    from hf_align.checkpoints.claim import claimed
    from hf_align.jobs.job import silent
    from hf_align.jobs.writing import draft_of, entries_of
    from hf_align.opening.pairs import open_pair
    from hf_align.settings.options import Options
    from hf_align.symmetry.alignment import AlignedWeights

    pair = open_pair(str(model[0]), str(model[0]))
    spec, rng = pair.spec, torch.Generator().manual_seed(0)
    elements = {n: s.group.random(spec.index_shape(n), rng) for n, s in spec.spaces.items() if s.group}
    weights = AlignedWeights(pair.a.weights, spec, elements)
    options = Options(dtype="bfloat16", max_shard_size="600MB")
    draft = draft_of(pair, pair.a, options)
    with claimed(folder, {}) as claim:
        draft.write(claim, entries_of(pair, pair.a, options, weights.__getitem__, silent), silent, quiet=True)


def blur(model: list[Path], folder: Path) -> None:
    """A model with noise of the size of every matrix."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model[0], folder)
    rng = torch.Generator().manual_seed(0)
    for file in sorted(folder.glob("*.safetensors")):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=rng)
                weights[name] = (weight.float() + noise * weight.float().std()).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})


def whole(pair: list[Path], folder: Path) -> None:
    """A whole merge: seconds, CPU seconds and the most memory of each stage."""
    import resource as used

    from hf_align.jobs import job
    from hf_align.jobs.merge import Merge
    from hf_align.settings.options import Options

    rows: list[tuple[object, ...]] = []

    def memory() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is counted anew from here
        return peak

    def cpu() -> float:
        so_far = used.getrusage(used.RUSAGE_SELF)
        return so_far.ru_utime + so_far.ru_stime

    typer.echo(f"\nThe program itself: {memory():.2f} GiB")
    began = [cpu()]

    class Clock(job.Clock):
        def lap(self, name: str) -> None:
            super().lap(name)
            rows.append((name, self.laps[name], cpu() - began[0], memory()))
            began[0] = cpu()

    started = time.perf_counter()
    said: list[str] = []
    asked = job.Asked(Options(quiet=True, device="cpu"), clock=Clock(),
                      say=lambda line: said.append(f"{time.perf_counter() - started:.0f} s: {line}"))  # fmt: skip
    job.run(Merge.open([*map(str, pair)], asked, certify=False), folder / "out")
    table("stage | seconds | CPU seconds | peak GiB", rows)
    typer.echo("\n" + "\n".join(said))


def products(pair: list[Path], folder: Path) -> None:
    """The matrix products in the transforms of both models, in float32 and nothing else; and the transforms."""
    import torch

    from hf_align.matching.match import Match
    from hf_align.opening.pairs import open_pair
    from hf_align.symmetry.alignment import AlignedWeights
    from hf_align.symmetry.elements import Matrix

    opened = open_pair(*map(str, pair))
    spec = opened.spec
    match = Match.load(folder / "alignment.safetensors", spec)
    began, count = time.perf_counter(), 0
    for name in spec.parameters:
        for side in (match.a, match.b):
            for block in spec.blocks(name):
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
    """Assignments and polar factors of cross matrices as matching has them, and other ways to solve them."""
    import torch

    rng = torch.Generator().manual_seed(0)

    def gain(n: int, noise: float) -> torch.Tensor:
        """Of n units that are alike up to noise, in 512 features."""
        a, b = (torch.randn(n, 512, generator=rng, dtype=torch.float64) for _ in range(2))
        return a @ (a + noise * b)[torch.randperm(n, generator=rng)].T

    for n in sizes:
        assigning, turning = n in ASSIGNMENTS, n in POLAR
        if assigning or not turning:
            for kind, noise in (("alike", 1.0), ("unlike", 1e3)):
                table(f"assignment, {n} units {kind} | seconds | gain missed",
                      list(assignments(gain(n, noise).numpy(), n <= 4096)))  # fmt: skip
        if turning or not assigning:
            m = torch.randn(n, n, generator=rng, dtype=torch.float64)
            table(f"polar factor, {n}, Gaussian | seconds | off an orthogonal map by | step",
                  list(polar_factors(m)))  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def assignments(gain: Any, every: bool) -> Iterator[tuple[object, ...]]:
    """Ways to the assignment of most gain, [n, n] float64: what is used first; some only where `every`."""
    import numpy
    from scipy.optimize import linear_sum_assignment

    rows = numpy.arange(len(gain))

    def row(name: str, work: Callable[[], Any]) -> tuple[object, ...]:
        seconds, order = timed(work)
        return name, seconds, f"{1 - gain[rows, order].sum() / best:.0e}"

    seconds, order = timed(lambda: linear_sum_assignment(gain, maximize=True)[1])
    best = gain[rows, order].sum()
    yield "scipy (used)", seconds, "0"
    near = gain + 0.01 * gain.std() * numpy.random.default_rng(0).standard_normal(gain.shape)
    last = linear_sum_assignment(near, maximize=True)[1]
    yield row("scipy, units in the last sweep's order", lambda: last[linear_sum_assignment(gain[:, last], True)[1]])
    yield row("Sinkhorn first, scipy on what is left", lambda: linear_sum_assignment(reduced(gain), maximize=True)[1])
    try:
        import lap

        yield row("lapx (lap.lapjv)", lambda: lap.lapjv(-gain)[1])
    except ImportError:
        pass
    if every:
        yield row("auction, ε-scaling, to 1e-4", lambda: auction(gain))


def reduced(gain: Any) -> Any:
    """Gains less the potentials of an entropic transport, which change no assignment's rank; near zero where it is."""
    import torch

    m, temperature = torch.from_numpy(gain).float(), 0.05 * float(gain.std())
    u, v = torch.zeros(len(m), 1), torch.zeros(1, len(m))
    for _ in range(20):
        u = temperature * torch.logsumexp((m - v) / temperature, 1, keepdim=True)
        v = temperature * torch.logsumexp((m - u) / temperature, 0, keepdim=True)
    return gain - u.double().numpy() - v.double().numpy()


def auction(gain: Any) -> Any:
    """Bertsekas' auction (Jacobi), all who have nothing bidding at once."""
    import torch

    m = torch.from_numpy(gain)
    n, prices, owner = len(m), torch.zeros(len(m), dtype=torch.float64), torch.full((len(m),), -1)
    step, least = float(m.std()), 1e-4 * float(m.std())
    while True:
        owner.fill_(-1)
        has = torch.full((n,), -1)
        while (free := (has < 0).nonzero().squeeze(1)).numel():
            values, wanted = (m[free] - prices).topk(2, 1)
            bids, wanted = values[:, 0] - values[:, 1] + step, wanted[:, 0]
            # Of those who want the same, the highest bid has it: the last one written.
            order = bids.argsort()
            winner = torch.full((n,), -1)
            winner[wanted[order]] = order
            won = (winner >= 0).nonzero().squeeze(1)
            lost = owner[won]
            has[lost[lost >= 0]] = -1
            owner[won] = free[winner[won]]
            has[free[winner[won]]] = won
            prices[won] += bids[winner[won]]
        if step <= least:
            return has.numpy()
        step = max(step / 5, least)


def polar_factors(m: Any) -> Iterator[tuple[object, ...]]:
    """Ways to the polar factor of m, [n, n] float64: what is used first."""
    import torch

    from hf_align.symmetry.groups import polar

    eye = torch.eye(len(m), dtype=m.dtype)

    def row(name: str, work: Callable[[], tuple[torch.Tensor, object]]) -> tuple[object, ...]:
        seconds, (found, steps) = timed(work)
        return name, seconds, f"{float((found.T @ found - eye).norm() / len(m) ** 0.5):.0e}", steps

    yield row("Newton, scaled (used)", lambda: (polar(m), ""))
    last = polar(m + 0.01 * torch.randn(m.shape, generator=torch.Generator().manual_seed(1), dtype=m.dtype))
    yield row("the same, turned by the last sweep's factor", lambda: (polar(m @ last.T) @ last, ""))
    yield row("QDWH", lambda: qdwh(m))
    yield row("Newton–Schulz", lambda: newton_schulz(m))
    yield row("singular values", lambda: (lambda u, _, v: (u @ v, ""))(*torch.linalg.svd(m)))
    yield row("one product of two such matrices", lambda: (eye if (m @ m) is not None else m, ""))


def newton_schulz(m: Any) -> tuple[Any, int]:
    """X ← X (3 - XᵀX) / 2, from where it converges; products alone, so that it suits an accelerator."""
    x, steps = m / (m.norm(1) if m.dim() == 1 else (m.abs().sum(0).max() * m.abs().sum(1).max()).sqrt()), 0
    while True:
        gram = x.T @ x
        x, steps = 1.5 * x - 0.5 * x @ gram, steps + 1
        gram.diagonal().sub_(1)
        if float(gram.norm()) < 1e-7 * len(m) ** 0.5 or steps == 60:
            return x, steps


def qdwh(m: Any) -> tuple[Any, int]:
    """Nakatsukasa, Bai & Gygi (SIAM J. Matrix Anal. Appl. 31, 2010): by QR while it is ill-conditioned, then by
    Cholesky."""
    import torch

    x = m / (m.abs().sum(0).max() * m.abs().sum(1).max()).sqrt()
    eye = torch.eye(len(m), dtype=m.dtype)
    low, steps = 1 / float((x.abs().sum(0).max() * torch.linalg.inv(x).abs().sum(1).max()) * len(m) ** 0.5), 0
    while abs(1 - low) > 1e-15 and steps < 12:
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        a = (1 + d) ** 0.5 + (8 - 4 * d + 8 * (2 - low**2) / (low**2 * (1 + d) ** 0.5)) ** 0.5 / 2
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        if c > 100:
            q, _ = torch.linalg.qr(torch.cat([c**0.5 * x, eye]))
            x = b / c * x + (a - b / c) / c**0.5 * q[: len(m)] @ q[len(m) :].T
        else:
            factor = torch.linalg.cholesky(eye + c * x.T @ x)
            x = b / c * x + (a - b / c) * torch.cholesky_solve(x.T, factor).T
        low, steps = min(1.0, low * (a + b * low**2) / (1 + c * low**2)), steps + 1
    return x, steps


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
        typer.Argument(help="speed, aligned, growth, processes, faults, solvers; by default all."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where its temporary folder of up to 12 GB goes.")] = None,
    peer: Annotated[str | None, typer.Option(help="mergekit-yaml of mergekit 0.1.5.")] = None,
    runs: int = 3,
    billions: float = 1.0,
    seed: int = 0,
    width: int | None = None,
    size: Annotated[float, typer.Option(help="Billions of parameters: 0.06 (aligned), 0.25, 0.5, 1 or 2.")] = 1.0,
    sizes: Annotated[list[int] | None, typer.Option(help="Of what solvers solves; by default those of models.")] = None,
) -> None:
    part = part or ["speed", "aligned", "growth", "processes", "faults", "solvers"]
    within: dict[str, Callable[[list[Path], Path], None]] = {
        "copy": copy, "move": move, "blur": blur, "whole": whole, "products": products,
    }  # fmt: skip
    if part[0] == "make":
        return make(Path(str(folder)), billions, seed, width)
    if part[0] == "solve":
        return solve([int(n) for n in part[1:]])
    if part[0] in within:
        return within[part[0]]([Path(p) for p in part[1:]], Path(str(folder)))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        parts: dict[str, Callable[[], None]] = {
            "speed": lambda: speed(place, runs, peer, size),
            "aligned": lambda: aligned(place, size),
            "growth": lambda: growth(place, runs, [s for s in SIZES if s <= 2 * size]),
            "processes": lambda: processes(place, runs, size),
            "faults": lambda: faults(place, 20),
            "solvers": lambda: solvers(sizes or sorted({*ASSIGNMENTS, *POLAR})),
        }
        for name in part:
            typer.echo(f"\n## {name}")
            room = 14e9 * size
            if name != "solvers" and shutil.disk_usage(place).free < room:
                typer.echo(f"hf-align benchmarks: {place} has no room for {room / 1e9:.0f} GB", err=True)
                raise typer.Exit(2)
            parts[name]()


if __name__ == "__main__":
    typer.run(main)
