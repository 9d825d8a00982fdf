"""What the witness costs beside weight matching: python benchmarks/witness.py [--size 0.06 …] [--folder DIR]

Llamas of random weights in bfloat16. *Alike*: a model and the same in another basis. *Noisy*: that, with noise of the
size of every matrix. *Unlike*: two models. CPU seconds on one thread, a process for each row. Writes
benchmarks/witness.md, where rows of other sizes stay, and exits with status 1 where the witness of unlike models takes
more than a fifth of matching at 1 billion.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from engine import models, moved_pair, noisy_pair
from matching import write
from revision import revision

HERE = Path(__file__)
TABLE = HERE.with_suffix(".md")
SHARE, AT = 0.2, 1.0
HEADER = ("| billion parameters | models | matching | sweeps | witness of B | of A | of that, moving B "
          "| share of the rest | longest text | peak GiB | revision |")  # fmt: skip
ABOUT = f"""# What the witness costs

    OMP_NUM_THREADS=1 python benchmarks/witness.py --size 0.06 --size 0.25

CPU seconds. *Alike*: a model and the same in another basis. *Noisy*: that, with noise of the size of every matrix: as
much is common to the two as is not. *Unlike*: two models of random weights, which have nothing to be found, and take
most sweeps to find the best of it. What B is moved to stays in memory for the merge, which would have to move it all
the same: that is no cost of the witness. The limit is a share of {SHARE:.0%} at {AT:g} billion parameters; it was set
when matching took several times as long. Shorter inputs would cost less, and show less.

"""


def measure(a: str, b: str) -> dict[str, float]:
    """All stages, in this process: CPU seconds by model, tokens of the longest text, GiB."""
    from hf_align.jobs.witnessing import moved_model
    from hf_align.matching.balanced import Balanced
    from hf_align.matching.weights import match_weights
    from hf_align.opening.pairs import open_pair
    from hf_align.settings.options import Options
    from hf_align.symmetry.alignment import AlignedWeights
    from hf_align.witness.witness import hold

    torch.set_num_threads(1)
    pair = open_pair(a, b)
    began = time.process_time()
    models = Balanced.of(pair.spec, pair.a.weights, pair.b.weights)
    elements, sweeps = match_weights(models)
    match = models.match(elements, sweeps)
    found = {"matching": time.process_time() - began, "sweeps": sweeps}
    began = time.process_time()
    for _ in AlignedWeights(pair.b.weights, pair.spec, match.b).values():
        pass
    found["moving"] = time.process_time() - began
    for called, model, elements in (("B", pair.b, match.b), ("A", pair.a, match.a)):
        began = time.process_time()
        moved = moved_model(called, model, pair, pair.spec, elements, pair.layout(pair.a), Options())
        held = hold(moved, torch.device("cpu"))
        found[called] = time.process_time() - began
        found["longest"] = max(int(n) for at in held.cases.values() for n in at if n)
    found["gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def row(size: float, kind: str, found: dict[str, float]) -> str:
    """A line of the table."""
    return (f"| {size:g} | {kind} | {found['matching']:.1f} | {found['sweeps']} | {found['B']:.1f} "
            f"| {found['A']:.1f} | {found['moving']:.1f} | {share(found):.0%} | {found['longest']:.0f} "
            f"| {found['gib']:.1f} | {revision()} |")  # fmt: skip


def share(found: dict[str, float]) -> float:
    """What the witness costs beyond moving B, which merging needs, over what matching costs."""
    return (found["A"] + found["B"] - found["moving"]) / found["matching"]


def main(
    pair: Annotated[list[str] | None, typer.Argument(help="Two folders, of which what is found is printed.")] = None,
    size: Annotated[list[float] | None, typer.Option(help="Billions of parameters: 0.06, 0.25, 0.5, 1.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where models are made.")] = None,
) -> None:
    if pair:
        typer.echo(json.dumps(measure(*pair)))
        return
    rows, dear = {}, False
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for billions in size or [0.06, 0.25, AT]:
            for kind, of in (("alike", moved_pair), ("noisy", noisy_pair), ("unlike", models)):
                both = of(Path(place), billions)
                command = [sys.executable, str(HERE), *map(str, both)]
                found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                rows[f"{billions:g}", kind] = row(billions, kind, found)
                typer.echo(rows[f"{billions:g}", kind])
                dear |= billions == AT and kind == "unlike" and share(found) > SHARE
    write(rows, TABLE, ABOUT, HEADER)
    raise typer.Exit(int(dear))


if __name__ == "__main__":
    typer.run(main)
