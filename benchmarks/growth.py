"""What each step of a merge costs as models grow: python benchmarks/growth.py [--size 0.25 …] [--width 2048]

A Llama of random weights in bfloat16, and the same in another basis, of one width and more and more layers. CPU
seconds on one thread and the memory that a step takes at most, all steps of a size in one process. Writes
benchmarks/growth.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from engine import OURS, SIZES, measure, moved_pair, sizes_of
from revision import revision

HERE = Path(__file__)
TABLE = HERE.with_suffix(".md")
EXAMPLES, LENGTH = 16, 64
"""Of what the models are run on for a regression."""
MATCH = "match.safetensors"
STEPS = ("trace", "spec", "match", "witness", "forward", "regression", "write")
ABOUT = """# What each step costs as models grow

    OMP_NUM_THREADS=1 python benchmarks/growth.py {sizes}

Revision {revision}, one run. CPU seconds on one thread, and GiB at most. A Llama of random weights in bfloat16, and the
same in another basis, of width {width} with {layers} layers. *Trace* is one call at full depth, *spec* the whole
derivation without its cache. *Match* is by weights, in {sweeps} sweeps. The *witness* runs both models with and
without their alignment. *Forward* is three passes over the {tokens} tokens that the *regression* is found on.
*Write* applies the alignment, and merges to disk. Exponents are those of the line through all points: cost grows as
parameters, or as layers, to their power. {tables:.0f} million parameters of each are its two tables of 32000
tokens: models that have few others grow slower than their layers, and what costs as much as these grows faster than
parameters.

"""


@contextmanager
def counted(found: dict[str, tuple[float, float]], step: str) -> Iterator[None]:
    """CPU seconds of a step of this process, and the most memory that it has had meanwhile, in GiB."""
    Path("/proc/self/clear_refs").write_text("5")
    began = time.process_time()
    yield
    seconds = time.process_time() - began
    status = Path("/proc/self/status").read_text()
    kib = int(status.partition("VmHWM:")[2].split()[0])
    found[step] = seconds, kib / 2**20


def steps(a: str, b: str, folder: Path) -> dict[str, tuple[float, float]]:
    """Every step of one pair, in this process but for the last; the match is left in the folder."""
    from hf_align.jobs.opened import Basis, Opened
    from hf_align.matching.balanced import Balanced
    from hf_align.matching.weights import match_weights
    from hf_align.merging.regression import regression_of
    from hf_align.merging.samples import Samples
    from hf_align.settings.options import Options
    from hf_align.symmetry.derivation.depth import derive_by_depth
    from hf_align.tracing.trace import trace
    from hf_align.witness.witness import hold

    torch.set_num_threads(1)
    found: dict[str, tuple[float, float]] = {}
    opened = Opened.open({"A": a, "B": b}, Options(quiet=True))
    with counted(found, "trace"):
        trace(opened.first.config, length=LENGTH)
    with counted(found, "spec"):
        derive_by_depth(opened.first.config, (), ())
    objectives: list[float] = []
    with counted(found, "match"):
        models = Balanced.of(opened.spec, *(m.weights for m in opened.models))
        match = models.match(*match_weights(models, lambda _, objective: objectives.append(objective)))
    match.save(folder / MATCH, opened.spec)
    found["sweeps"] = len(objectives), 0.0
    basis = Basis(opened, [match])
    with counted(found, "witness"):
        for moved in basis.moved():
            hold(moved, torch.device("cpu"))
    network = opened.network
    both = [network.placed(weights) for weights in basis.weights]
    rows = {"input_ids": torch.randint(opened.first.config.vocab_size, (EXAMPLES, LENGTH))}
    with counted(found, "forward"), torch.no_grad():
        for weights in (*both, both[0]):
            network(weights, rows)
    with counted(found, "regression"):
        regression_of(both, (0.5, 0.5), Samples(network, (rows, rows)), opened.spec)
    return found


def measured(a: Path, b: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """Every step of one pair, in processes of their own."""
    command = [sys.executable, str(HERE), "--pair", str(a), "--pair", str(b), "--folder", str(folder)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    run = measure([*OURS, "merge", a, b, "-o", folder / "merged", "--alignment", folder / MATCH, "--method", "linear",
                   "--no-witness", "--quiet", "--overwrite"])  # fmt: skip
    if run.status:
        raise SystemExit("the merge failed")
    return {**found, "write": (run.cpu, run.gib)}


def exponent(sizes: Sequence[float], seconds: list[float]) -> float:
    """The slope of log seconds over log size."""
    x, y = torch.tensor(sizes).log(), torch.tensor(seconds).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def table(found: dict[float, dict[str, tuple[float, float]]], layers: list[int]) -> str:
    """A line for each step: seconds and GiB at each size, and the exponents."""
    sizes = list(found)
    lines = ["| step | " + " | ".join(f"{size:g} B" for size in sizes) + " | in parameters | in layers |",
             "|" + " --- |" * (len(sizes) + 3)]  # fmt: skip
    for step in STEPS:
        seconds = [found[size][step][0] for size in sizes]
        cells = [f"{s:.1f} s, {found[size][step][1]:.1f} GiB" for size, s in zip(sizes, seconds, strict=True)]
        cells += [f"{exponent(of, seconds):.2f}" for of in (sizes, layers)]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(
    size: Annotated[list[float] | None, typer.Option(help="Billions of parameters; by default 0.25 to 2.")] = None,
    width: Annotated[int, typer.Option(help="Of all models, a multiple of 256.")] = 2048,
    folder: Annotated[Path | None, typer.Option(help="Where models are made.")] = None,
    pair: Annotated[list[Path] | None, typer.Option(help="Two folders: print what is found of them.")] = None,
) -> None:
    if pair and folder:
        typer.echo(json.dumps(steps(str(pair[0]), str(pair[1]), folder)))
        return
    found = {}
    for billions in size or SIZES:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            found[billions] = measured(*moved_pair(Path(place), billions, width), Path(place))
        typer.echo(f"{billions:g} B: {found[billions]}", err=True)
    if len(found) < 2:
        return
    sweeps = " to ".join(f"{n:.0f}" for n in sorted({f["sweeps"][0] for f in found.values()}))
    asked = " ".join([f"--width {width}", *(f"--size {billions:g}" for billions in found)])
    layers = [sizes_of(billions, width)["num_hidden_layers"] for billions in found]
    listed = f"{', '.join(map(str, layers[:-1]))} and {layers[-1]}"
    about = ABOUT.format(sizes=asked, revision=revision(), sweeps=sweeps, tokens=EXAMPLES * LENGTH, width=width,
                         layers=listed, tables=64000 * width / 1e6)  # fmt: skip
    TABLE.write_text(about + table(found, layers), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
