"""What weight matching costs beside its own matrix products: python benchmarks/matching.py [--size 0.25 …]

Synthetic Llamas of width 2048 in bfloat16, in memory. *Alike*: the weights of B are those of A in another basis, plus
noise of their own size. *Unlike*: two models of random weights. CPU seconds on one thread, a process for each row.
Writes benchmarks/matching.md, where rows of other sizes stay.

The products are those that a sweep cannot do without: of every weight for every space that it carries, the cross
matrix; and B's weight moved by every map of another of its spaces. They are timed by themselves in the same process.
"""

from __future__ import annotations

import itertools
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from engine import sizes_of
from revision import revision

if TYPE_CHECKING:
    from hf_align.symmetry.spec import SymmetrySpec

HERE = Path(__file__)
TABLE = HERE.with_suffix(".md")
NEAR = 1e-4
"""The part of the objective after which the rest counts as nothing."""
HEADER = (
    "| billion parameters | models | balance | start and first sweep | a later sweep | products of a sweep | ratio "
    f"| sweeps | within {NEAR:g} of the last after | all | peak GiB | revision |"
)
ABOUT = """# What weight matching costs

    OMP_NUM_THREADS=1 python benchmarks/matching.py --size 0.06 --size 0.25 --size 1

CPU seconds on one thread. *Alike*: the weights of B are those of A in another basis, plus noise of their own size.
*Unlike*: random weights. *Products* are those of one sweep over everything, timed by themselves in the same process:
the cross matrix of every weight for every space that it carries, and B's weights moved by the maps of their other
spaces. *Ratio* is a later sweep to them; it may be below one, for what the tables say is computed once, and a space is
left out whose neighbours have not moved, or that stayed where it was although they had. The rows of 956dda0 were
measured beside other work, that of 1386ca4 while the machine was 2.7 times slower than it had been: at 7a4f0f6 the same
models took 566 s with products of 105.5 s, a later sweep 1.68 times as long as these. Unlike models of 1 B were given
up at 7a4f0f6 after 20 minutes.

"""


def measure(size: float, alike: bool) -> dict[str, float]:
    """One row, in this process."""
    import transformers

    from hf_align.matching.balanced import Balanced
    from hf_align.matching.weights import match_weights
    from hf_align.symmetry.derivation.spec_cache import derived_spec

    torch.set_num_threads(1)
    spec = derived_spec(transformers.LlamaConfig(
        **sizes_of(size), tie_word_embeddings=False, architectures=["LlamaForCausalLM"]
    ))  # fmt: skip
    a, b = models(spec, alike)
    marks, objectives = [time.process_time()], []

    def after(_: int, objective: float) -> None:
        marks.append(time.process_time())
        objectives.append(objective)

    balanced = Balanced.of(spec, a, b)
    marks.append(time.process_time())
    match_weights(balanced, after)
    spent = [later - earlier for earlier, later in itertools.pairwise(marks)]
    last, sweeps = objectives[-1], len(objectives)
    later = sum(spent[2:]) / max(1, sweeps - 1)
    near = next(i for i, o in enumerate(objectives, 1) if last - o <= NEAR * abs(last))
    return {"balance": spent[0], "first": spent[1], "later": later, "products": products(spec), "sweeps": sweeps,
            "near": near, "all": marks[-1] - marks[0],
            "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # fmt: skip


def models(spec: SymmetrySpec, alike: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of both."""
    from hf_align.symmetry.alignment import AlignedWeights

    rng = torch.Generator().manual_seed(0)

    def noise(name: str) -> torch.Tensor:
        return 0.02 * torch.randn(spec.shape(name), generator=rng)

    def random(name: str) -> torch.Tensor:
        return (noise(name) + (len(spec.shape(name)) == 1)).bfloat16()

    a = {name: random(name) for name in spec.parameters}
    if not alike:
        return a, {name: random(name) for name in spec.parameters}
    noisy = {name: a[name] + noise(name) for name in a}
    elements = {n: s.group.random(spec.index_shape(n), rng) for n, s in spec.spaces.items() if s.group}
    moved = AlignedWeights(noisy, spec, elements)
    return a, {name: moved[name].bfloat16() for name in a}


def products(spec: SymmetrySpec) -> float:
    """Seconds of the matrix products of one sweep, in float32."""
    from hf_align.symmetry.groups import ScaledPermutation

    seconds = 0.0
    for name in spec.parameters:
        for block in spec.blocks(name):
            sizes = [f.size for f in block.factors]
            for move in block.moves:
                heads = math.prod(sizes[i] for i in move.index)
                n = sizes[move.axis]
                rows = torch.randn(heads, n, math.prod(sizes) // (heads * n))
                moves = [m for m in block.moves if m.space != move.space
                         and not isinstance(spec.group(m.space), ScaledPermutation)]  # fmt: skip
                began = time.process_time()
                rows @ rows.mT
                seconds += time.process_time() - began
                for other in moves:
                    heads, n = math.prod(sizes[i] for i in other.index), sizes[other.axis]
                    matrix, rows = torch.randn(heads, n, n), torch.randn(heads, math.prod(sizes) // (heads * n), n)
                    began = time.process_time()
                    rows @ matrix
                    seconds += time.process_time() - began
    return seconds


def row(size: float, kind: str, found: dict[str, float]) -> str:
    """A line of the table."""
    return (f"| {size:g} | {kind} | {found['balance']:.1f} | {found['first']:.1f} | {found['later']:.1f} | "
            f"{found['products']:.1f} | {found['later'] / found['products']:.2f} | {found['sweeps']:.0f} | "
            f"{found['near']:.0f} | {found['all']:.0f} | {found['gib']:.1f} | {revision()} |")  # fmt: skip


def write(rows: dict[tuple[str, str], str], table: Path, about: str, header: str) -> None:
    """A table, with these rows beside those that it has of other sizes."""
    before = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    kept = {tuple(c.strip() for c in line.split("|")[1:3]): line for line in before
            if line.startswith("| ") and line[2].isdigit()}  # fmt: skip
    lines = [line for _, line in sorted({**kept, **rows}.items(), key=lambda item: (float(item[0][0]), item[0][1]))]
    head = [header, "|" + " --- |" * (header.count("|") - 1)]
    table.write_text(about + "\n".join([*head, *lines]) + "\n", encoding="utf-8")


def main(
    size: Annotated[list[float] | None, typer.Option(help="Billions of parameters: 0.06, 0.25, 0.5, 1.")] = None,
    only: Annotated[str | None, typer.Option(help="alike or unlike: print what is found of the one size.")] = None,
) -> None:
    sizes = size or [0.06, 0.25, 1.0]
    if only:
        typer.echo(json.dumps(measure(sizes[0], only == "alike")))
        return
    rows = {}
    for billions in sizes:
        for kind in ("alike", "unlike"):
            command = [sys.executable, str(HERE), "--size", str(billions), "--only", kind]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            rows[f"{billions:g}", kind] = row(billions, kind, found)
            typer.echo(rows[f"{billions:g}", kind])
    write(rows, TABLE, ABOUT, HEADER)


if __name__ == "__main__":
    typer.run(main)
