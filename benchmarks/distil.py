"""Descent towards the ensemble from the aligned regression, from models alone, and from the mean that is not aligned.

    OMP_NUM_THREADS=1 python benchmarks/distil.py     # writes distil.md; hours on one core

All descents of a group have the same teacher, inputs and steps. Losses are of the second half of the held-out text.
What the method takes without data comes first. What was measured is kept, one JSON object a line, in `--results`: a run
that was stopped goes on there. Rows of another revision are measured again; the table is of one revision only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import typer
from revision import revision
from torch import Tensor

from hf_align.jobs.opened import Basis, Opened
from hf_align.merging.distil import WRITTEN, TowardsMix, distilled, nearest, written_by
from hf_align.merging.regression import mean_of, regression_of
from hf_align.merging.samples import MORE, Samples
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Batch
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

ROOT = Path(__file__).parent.parent
MODELS, TEXT = ROOT / "examples" / "models", ROOT / "examples" / "data" / "eval_lm_kjv.safetensors"
TABLE = Path(__file__).with_suffix(".md")
GROUPS = {"GPT-2": ("gpt2", 2), "Llama": ("llama", 2), "three Llamas": ("llama", 3)}
ALIGNED, AVERAGED = "regression, aligned", "mean, not aligned"
NONE = "none"
ASKED = (NONE, None), ("text", None), (NONE, ALIGNED), (NONE, "A alone"), (NONE, AVERAGED)
"""Data and starts of each group, in the order in which they are measured; no start is the one that is taken."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One start: its loss, that after the descent, and the seconds that both took.

    Attributes:
        taken: it is the nearest to the ensemble, where `--method distil` starts.
        parents: the losses of the models alone, and of their ensemble.
    """

    revision: str
    group: str
    parents: str
    start: str
    taken: bool
    data: str
    before: float
    after: float
    seconds: float

    def answers(self, data: str, start: str | None) -> bool:
        return self.data == data and (self.taken if start is None else self.start == start)


@dataclass(frozen=True)
class Group:
    """Models, and what they are run on."""

    opened: Opened
    raw: tuple[Weights, ...]
    aligned: tuple[Weights, ...]
    evaluator: Evaluator
    text: Batch

    @classmethod
    @cache
    def of(cls, name: str) -> Group:
        family, count = GROUPS[name]
        opened = Opened.open({f"model {i}": str(MODELS / family / str(i)) for i in range(count)}, Options(quiet=True))
        names, raw = opened.spec.parameters, Basis(opened).weights
        aligned = Basis(opened, opened.find()).weights
        data = load_data(TEXT, None, opened.first.config)
        half = len(data["input_ids"]) // 2
        text, held_out = ({k: t[at : at + half] for k, t in data.items()} for at in (0, half))
        evaluator = Evaluator(opened.network, held_out)
        both = (tuple({n: w[n].float() for n in names} for w in models) for models in (raw, aligned))
        return cls(opened, *both, evaluator, text)

    @property
    def shares(self) -> tuple[float, ...]:
        return (1 / len(self.raw),) * len(self.raw)

    def parents(self) -> str:
        each = ", ".join(f"{self.evaluator.loss(weights):.3f}" for weights in self.raw)
        return f"{each}; ensemble {self.evaluator.ensemble(self.raw, self.shares):.3f}"


@dataclass(frozen=True)
class Starts:
    """Where a group may start on some data, and its teacher there.

    Attributes:
        taken: the nearest to the ensemble.
        solving: seconds that the regression took.
    """

    weights: Mapping[str, Weights]
    taken: str
    objective: TowardsMix
    solving: float

    @classmethod
    @cache
    def of(cls, name: str, data: str) -> Starts:
        group = Group.of(name)
        given = None if data == NONE else group.text
        objective = TowardsMix(group.raw, group.shares, written_by(group.opened.network, group.aligned, given, WRITTEN))
        began = time.process_time()
        samples = Samples.of(group.aligned, group.opened.network, given, lambda _: None, MORE)
        regression = dict(regression_of(group.aligned, group.shares, samples, group.opened.spec))
        solving = time.process_time() - began
        alone = {f"{'ABC'[at]} alone": weights for at, weights in enumerate(group.raw)}
        taken = nearest({ALIGNED: regression, **alone}, group.opened.network, objective)
        averaged = dict(mean_of(group.raw, group.shares))
        return cls({ALIGNED: regression, **alone, AVERAGED: averaged}, taken, objective, solving)


def measured(name: str, data: str, start: str | None) -> Row:
    group, starts = Group.of(name), Starts.of(name, data)
    kind = start or starts.taken
    began, weights = time.process_time(), starts.weights[kind]
    found = distilled(weights, group.opened.network, starts.objective, Schedule.of_method("distil"))
    seconds = time.process_time() - began + (starts.solving if kind in (ALIGNED, starts.taken) else 0)
    before, after = (group.evaluator.loss(w) for w in (weights, {**weights, **found}))
    return Row(revision(), name, group.parents(), kind, kind == starts.taken, data, before, after, seconds)


def main(output: Path = TABLE, results: Path = ROOT / "out" / "distil.jsonl") -> None:
    told = revision()
    results.parent.mkdir(parents=True, exist_ok=True)
    kept = [Row(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
    found = [row for row in kept if row.revision == told]
    for data, start in ASKED:
        for name in GROUPS:
            if any(row.group == name and row.answers(data, start) for row in found):
                continue
            found.append(measured(name, data, start))
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found[-1])) + "\n")
            output.write_text(table(found), encoding="utf-8")
            typer.echo(f"{found[-1]}", err=True)
    output.write_text(table(found), encoding="utf-8")


def table(rows: list[Row]) -> str:
    schedule = Schedule.of_method("distil")
    text = [
        "# Descent towards the ensemble",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/distil.py`: loss (nats, second half of the held-out text) of a",
        "model that descends towards the mean of the log-probabilities of models of `examples/models`, from several",
        f"starts, with the same teacher, inputs and {schedule.steps} steps of {schedule.rows}. **Bold** is what the",
        "method `distil` takes: of the models and their aligned regression, the one nearest to the ensemble. Without",
        "data the models write their inputs. A text (the first half of the held-out one, without labels) is joined by",
        "what they write. Seconds are those of the start and of the descent on one core, without writing. One seed of",
        f"the descent each; revision {rows[0].revision}.",
        "",
        "The models alone, and their ensemble:",
        "",
        *(f"- {group}: {parents}" for group, parents in {row.group: row.parents for row in rows}.items()),
        "",
        "| models | start | data | at the start | after the descent | s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: list(GROUPS).index(row.group)):
        losses = f"{row.before:.3f} | {row.after:.3f}"
        start = f"**{row.start}**" if row.taken else row.start
        text.append(f"| {row.group} | {start} | {row.data} | {losses} | {row.seconds:.0f} |")
    return "\n".join([*text, ""])


if __name__ == "__main__":
    typer.run(main)
