"""Carrying fine-tunes to another base: python benchmarks/transport.py --models … --data …

Writes benchmarks/transport.md. The fine-tunes are those of a small Llama on the Jargon File and on Python source; the
other base is the same architecture from another seed, trained on the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from hf_align.jobs.job import silent
from hf_align.jobs.opened import Basis, Opened
from hf_align.merging.distil import TowardsMix, distilled
from hf_align.merging.transport import Fine, samples_of
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

TABLE = Path(__file__).with_suffix(".md")
TEXTS, KNOWN = ("jargon", "py"), "kjv"
STEPS, ROWS = 200, 16
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Bench:
    """A fine-tune, its base and the other base, with evaluators of what the fine-tune learned and of what all knew."""

    models: Opened
    learned: Evaluator
    known: Evaluator

    @classmethod
    def of(cls, text: str, models: Path, data: Path, rows: int) -> Bench:
        named = {
            "onto": models / "llama" / "1",
            "base": models / "llama" / "0",
            "finetuned": models / "llama-ft" / text,
        }
        opened = Opened.open({k: str(v) for k, v in named.items()}, Options(quiet=True), jointly=False)
        learned, known = (
            load_data(data / f"eval_lm_{t}.safetensors", None, opened.first.config) for t in (text, KNOWN)
        )
        return cls(opened, *(Evaluator(opened.network, {k: x[:rows] for k, x in t.items()}) for t in (learned, known)))

    def fine(self, aligned: bool) -> Fine:
        matches = replace(self.models, pairs=self.models.pairs[:1]).find() if aligned else []
        onto, base, tuned = ({n: w[n].float() for n in self.models.spec.parameters}
                             for w in Basis(self.models, [*matches, *matches]).weights)  # fmt: skip
        return Fine(onto, base, tuned)

    def regressed(self, fine: Fine) -> Weights:
        solved: dict[str, Tensor] = {}
        fine.solve(samples_of(fine.finetuned, self.models.network, None, silent), solved)
        return {**fine.by_vector, **solved}

    def distilled(self, fine: Fine, start: Weights, sources: tuple[Weights, ...], shares: tuple[float, ...]) -> Weights:
        inputs = samples_of(fine.finetuned, self.models.network, None, silent).all
        objective = TowardsMix(sources, shares, [inputs])
        return distilled(dict(start), self.models.network, objective, Schedule(steps=STEPS, rows=ROWS))


def row(bench: Bench, name: str, make: Callable[[], Weights]) -> str:
    start = time.process_time()
    weights = make()
    spent = time.process_time() - start
    before, there = (bench.learned.loss(w) for w in (bench.fine(False).onto, bench.fine(False).finetuned))
    learned, known = bench.learned.loss(weights), bench.known.loss(weights)
    line = f"| {name} | {learned:.3f} | {(before - learned) / (before - there):.0%} | {known:.3f} | {spent:.0f} |"
    typer.echo(line, err=True)
    return line


def table(bench: Bench) -> list[str]:
    raw, moved = bench.fine(False), bench.fine(True)
    kept: dict[str, Weights] = {}

    def regressed() -> Weights:
        kept["aligned"] = bench.regressed(moved)
        return kept["aligned"]

    parts = (moved.onto, moved.base, moved.finetuned)
    rows: dict[str, Callable[[], Weights]] = {
        "the other base, B": lambda: raw.onto,
        "the fine-tune, F": lambda: raw.finetuned,
        "its base, A": lambda: raw.base,
        "B + (F − A), not aligned": lambda: dict(raw.by_vector),
        "B + (F − A), aligned": lambda: dict(moved.by_vector),
        "regression, not aligned": lambda: bench.regressed(raw),
        "**regression, aligned** (the default)": regressed,
        "distilled to F, from B": lambda: bench.distilled(moved, moved.onto, (moved.finetuned,), (1.0,)),
        "distilled to B + (F − A), from B": lambda: bench.distilled(moved, moved.onto, parts, moved.shares),
        "**the same, from the regression** (`--method distil`)": lambda: bench.distilled(
            moved, kept["aligned"], parts, moved.shares
        ),
    }
    return [row(bench, name, make) for name, make in rows.items()]


def main(
    models: Annotated[Path, typer.Option(help="Folder with llama/0, llama/1 and llama-ft/.")],
    data: Annotated[Path, typer.Option(help="Folder with eval_lm_jargon, eval_lm_py and eval_lm_kjv.")],
    rows: int = 128,
    output: Path = TABLE,
) -> None:
    text = [
        "# Carrying a fine-tune to another base",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/transport.py --models … --data … --rows {rows}`: loss (nats) on",
        "held-out text of what the fine-tune was trained on, the share of the gain from B to the fine-tune, the loss",
        "on held-out text that both bases were trained on, and CPU seconds. No row has seen any data: all run on 512",
        f"sequences that the fine-tune writes. Distillation takes {STEPS} steps of {ROWS} of the same sequences.",
        "",
    ]
    for name in TEXTS:
        head = f"| {name} | loss | gain | loss on {KNOWN} | CPU s |"
        text += [head, "| --- " * 5 + "|", *table(Bench.of(name, models, data, rows)), ""]
    output.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
