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
from revision import revision
from torch import Tensor

from hf_align.jobs.job import silent
from hf_align.jobs.opened import Basis, Opened
from hf_align.merging.distil import distilled
from hf_align.merging.transport import Carried, Change, descent_towards, samples_of
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator
from hf_align.settings.choices import KEEP
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

TABLE = Path(__file__).with_suffix(".md")
TEXTS, KNOWN = ("jargon", "py"), "kjv"
LEARNED = 400
"""Steps of learned matching, whose cost is what a descent may cost."""
FOUND = """\
Regression carries more than four fifths without a gradient and forgets less than the fine-tunes did on their own base.
Alignment adds 5 to 7 points to it, and takes off a third of what it forgets. The descents, which cost as much as
learned matching, carry 96 % and more from every start: from the regression a point more than from B, and a little more
is forgotten. What keeps B's knowledge is its own text, not the start: with `--keep 0`, which is distilling the
fine-tune into B, more is forgotten than the fine-tune forgot."""
"""What the tables show."""
DESCENT = Schedule.of_transport("distil")
Weights = Mapping[str, Tensor]
Row = tuple[str, Callable[[], Weights]]


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

    @property
    def bases(self) -> Opened:
        return replace(self.models, pairs=self.models.pairs[:1], names=self.models.names[:2])

    def carried(self, aligned: bool) -> Carried:
        matches = self.bases.find() if aligned else []
        onto, base, tuned = ({n: w[n].float() for n in self.models.spec.parameters}
                             for w in Basis(self.models, [*matches, *matches]).weights)  # fmt: skip
        return Carried(onto, (Change(base, tuned),))

    def regressed(self, carried: Carried, keep: float = KEEP) -> Weights:
        solved: dict[str, Tensor] = {}
        carried.solve(samples_of(carried, self.models.network, None, keep, silent), solved)
        return {**carried.by_vector, **solved}

    def distilled(self, carried: Carried, start: Weights, keep: float = KEEP) -> Weights:
        objective = descent_towards(carried, self.models.network, None, keep)
        return distilled(dict(start), self.models.network, objective, DESCENT)

    def learned_matching(self) -> float:
        """CPU seconds of learned matching of the bases."""
        options = replace(self.models.options, match="learned", schedule=Schedule(steps=LEARNED))
        start = time.process_time()
        replace(self.bases, options=options).find()
        return time.process_time() - start


@dataclass(frozen=True)
class Between:
    """Where a result lies between what it was made of: losses on what was learned, and on what was known."""

    before: float
    there: float
    base_knew: float

    def line(self, name: str, learned: float, known: float, seconds: float) -> str:
        gain = (self.before - learned) / (self.before - self.there)
        return f"| {name} | {learned:.3f} | {gain:.0%} | {known:.3f} | {known - self.base_knew:+.3f} | {seconds:.0f} |"


def rows_of(bench: Bench) -> list[Row]:
    raw, moved = bench.carried(False), bench.carried(True)
    made: dict[str, Weights] = {}

    def regressed(carried: Carried, called: str) -> Weights:
        made[called] = bench.regressed(carried)
        return made[called]

    return [
        ("the other base, B", lambda: raw.onto),
        ("the fine-tune, F", lambda: raw.changes[0].finetuned),
        ("its base, A", lambda: raw.changes[0].base),
        ("B + (F − A), not aligned", lambda: dict(raw.by_vector)),
        ("B + (F − A), aligned", lambda: dict(moved.by_vector)),
        ("regression, not aligned", lambda: regressed(raw, "raw")),
        ("**regression, aligned** (the default)", lambda: regressed(moved, "aligned")),
        ("the same with `--keep 0`", lambda: bench.regressed(moved, 0.0)),
        ("trained from B", lambda: bench.distilled(raw, raw.onto)),
        ("the same with `--keep 0`", lambda: bench.distilled(raw, raw.onto, 0.0)),
        ("trained from the regression, not aligned", lambda: bench.distilled(raw, made["raw"])),
        ("**from the regression, aligned** (`--method distil`)", lambda: bench.distilled(moved, made["aligned"])),
    ]


def table(bench: Bench) -> list[str]:
    rows = rows_of(bench)
    before, there, base = (make() for _, make in rows[:3])
    between = Between(bench.learned.loss(before), bench.learned.loss(there), bench.known.loss(base))
    lines = []
    for name, make in rows:
        start = time.process_time()
        weights = make()
        spent = time.process_time() - start
        lines.append(between.line(name, bench.learned.loss(weights), bench.known.loss(weights), spent))
        typer.echo(lines[-1], err=True)
    return lines


def main(
    models: Annotated[Path, typer.Option(help="Folder with llama/0, llama/1 and llama-ft/.")],
    data: Annotated[Path, typer.Option(help="Folder with eval_lm_jargon, eval_lm_py and eval_lm_kjv.")],
    rows: int = 128,
    output: Path = TABLE,
) -> None:
    benches = {name: Bench.of(name, models, data, rows) for name in TEXTS}
    cost = benches[TEXTS[0]].learned_matching()
    text = [
        "# Carrying a fine-tune to another base",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/transport.py --models … --data … --rows {rows}`: loss (nats) on",
        "held-out text of what the fine-tune was trained on, the share of the gain from B to the fine-tune, the loss",
        "on held-out text that both bases were trained on and how much more that is than A's, and CPU seconds. No row",
        f"has seen any data. Regressions run on 512 sequences that the fine-tune writes and {round(512 * KEEP)} that B",
        f"writes; trained is for {DESCENT.steps} steps of {DESCENT.rows} of 4096 and {round(4096 * KEEP)} such",
        f"sequences, those that B writes in the same share. {LEARNED} steps of learned matching between the bases take",
        f"{cost:.0f} CPU seconds. Revision {revision()}.",
        "",
    ]
    for name, bench in benches.items():
        head = f"| {name} | loss | gain | loss on {KNOWN} | over A's | CPU s |"
        text += [head, "| --- " * 6 + "|", *table(bench), ""]
    text += [FOUND, ""]
    output.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
