"""Loss barriers of every pair of seeds under every strategy: python benchmarks/barriers.py

Writes benchmarks/barriers.md and exits with status 1 if a limit is not met.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer

from hf_align import pipeline
from hf_align.matching.match import Match
from hf_align.models import Pair, open_pair

ROOT = Path(__file__).parent.parent
DATA = {"gpt2": "eval_lm_kjv", "llama": "eval_lm_kjv", "vit": "eval_digits"}
TABLE = Path(__file__).with_suffix(".md")
STRATEGIES = {
    "naive": pipeline.Options(match="none"),
    "weight, permuted residual": pipeline.Options(residual="permutation"),
    "weight, orthogonal residual": pipeline.Options(),
}
LIMITS = {("gpt2", "weight, orthogonal residual"): 0.50, ("llama", "weight, orthogonal residual"): 1.15}
HEADER = "| family | strategy | pairs | loss A | loss B | midpoint | barrier | distance | match s |"


@dataclass(frozen=True)
class Row:
    family: str
    strategy: str
    pair: str
    loss_a: float
    loss_b: float
    midpoint: float
    barrier: float
    distance: float
    seconds: float


def measure(family: str, first: Path, second: Path, points: int) -> list[Row]:
    pair = open_pair(str(first), str(second))
    rows = []
    for strategy, options in STRATEGIES.items():
        began = time.perf_counter()
        match = pipeline.find_match(pair, options)
        seconds = time.perf_counter() - began
        data = ROOT / "examples" / "data" / f"{DATA[family]}.safetensors"
        path = pipeline.compare(pair, options, match, data, points).aligned
        rows.append(
            Row(family, strategy, f"{first.name}–{second.name}", path.losses[0], path.losses[-1],
                path.losses[points // 2], path.barrier, _distance(pair, options, match), seconds)
        )  # fmt: skip
        typer.echo(f"{family} {rows[-1].pair} {strategy}: {rows[-1].barrier:.3f}", err=True)
    return rows


def _distance(pair: Pair, options: pipeline.Options, match: Match | None) -> float:
    from hf_align.symmetry.alignment import distance

    weights = pipeline.aligned_weights(pair, options, match)
    return distance(*({n: w[n] for n in pair.spec.parameters} for w in weights))


def table(rows: list[Row]) -> list[str]:
    lines = [HEADER, "| --- " * 9 + "|"]
    for (family, strategy), group in itertools.groupby(
        sorted(rows, key=lambda r: (r.family, list(STRATEGIES).index(r.strategy))), key=lambda r: (r.family, r.strategy)
    ):
        members = list(group)
        columns = ("loss_a", "loss_b", "midpoint", "barrier", "distance", "seconds")
        values = [_mean([getattr(r, c) for r in members]) for c in columns]
        pairs = ", ".join(r.pair for r in members)
        lines.append(f"| {family} | {strategy} | {pairs} | {' | '.join(values)} |")
    return lines


def _mean(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def main(points: int = 21, output: Path = TABLE) -> None:
    rows = []
    for family in DATA:
        seeds = sorted((ROOT / "examples" / "models" / family).iterdir())
        for first, second in itertools.combinations(seeds, 2):
            rows += measure(family, first, second, points)
    text = [
        "# Loss barriers",
        "",
        "`python benchmarks/barriers.py` on the models of `examples/models`; all held-out examples, 21 mixing weights.",
        "The barrier is the largest rise over the line between the endpoint losses (nats). Mean ± standard error over",
        "pairs. Distance is that of the weights in the gauge in which they are averaged.",
        "",
        *table(rows),
        "",
    ]
    output.write_text("\n".join(text), encoding="utf-8")
    naive = {(r.family, r.pair): r.barrier for r in rows if r.strategy == "naive"}
    failures = [r for r in rows if r.barrier > LIMITS.get((r.family, r.strategy), float("inf"))]
    failures += [r for r in rows if "orthogonal" in r.strategy and r.barrier > naive[r.family, r.pair]]
    for row in failures:
        typer.echo(f"limit not met: {row}", err=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
