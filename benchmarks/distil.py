"""Descent towards the ensemble from the aligned regression, from models alone, and from the mean that is not aligned.

    OMP_NUM_THREADS=1 python benchmarks/distil.py     # writes distil.md; hours on one core

All descents of a group have the same teacher, inputs and steps. Losses are of the second half of the held-out text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from torch import Tensor

from hf_align.jobs.descending import written_by
from hf_align.jobs.opened import Basis, Opened
from hf_align.merging.distil import TowardsMix, distilled, nearest
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

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One start: its loss, that after the descent, and the seconds that both took.

    Attributes:
        taken: it is the nearest to the ensemble, where `--method distil` starts.
    """

    group: str
    start: str
    taken: bool
    data: str
    before: float
    after: float
    seconds: float


@dataclass(frozen=True)
class Group:
    """Models, their teacher, and what they are run on."""

    name: str
    opened: Opened
    raw: tuple[Weights, ...]
    aligned: tuple[Weights, ...]
    evaluator: Evaluator
    text: Batch

    @classmethod
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
        return cls(name, opened, *both, evaluator, text)

    @property
    def shares(self) -> tuple[float, ...]:
        return (1 / len(self.raw),) * len(self.raw)

    def rows(self) -> Iterator[Row]:
        alone = {f"{'ABC'[at]} alone": weights for at, weights in enumerate(self.raw)}
        for data, label in ((None, "none"), (self.text, "text")):
            objective = TowardsMix(self.raw, self.shares, written_by(self.opened, self.aligned, data))
            began = time.process_time()
            samples = Samples.of(self.aligned, self.opened.network, data, lambda _: None, MORE)
            regression = dict(regression_of(self.aligned, self.shares, samples, self.opened.spec))
            solving = time.process_time() - began
            starts = {ALIGNED: regression, **alone, AVERAGED: dict(mean_of(self.raw, self.shares))}
            taken = nearest({ALIGNED: regression, **alone}, self.opened.network, objective)
            compared = (ALIGNED, "A alone", AVERAGED) if data is None else ()
            for kind in dict.fromkeys((taken, *compared)):
                began, start = time.process_time(), starts[kind]
                found = distilled(start, self.opened.network, objective, Schedule.of_method("distil"))
                seconds = time.process_time() - began + (solving if kind in (ALIGNED, taken) else 0)
                before, after = (self.evaluator.loss(weights) for weights in (start, {**start, **found}))
                yield Row(self.name, kind, kind == taken, label, before, after, seconds)

    def parents(self) -> str:
        each = ", ".join(f"{self.evaluator.loss(weights):.3f}" for weights in self.raw)
        return f"- {self.name}: {each}; ensemble {self.evaluator.ensemble(self.raw, self.shares):.3f}"


def main(output: Path = TABLE) -> None:
    found, parents = list[Row](), list[str]()
    for name in GROUPS:
        models = Group.of(name)
        parents.append(models.parents())
        for row in models.rows():
            found.append(row)
            output.write_text(table(parents, found), encoding="utf-8")
            typer.echo(f"{row}", err=True)


def table(parents: list[str], rows: list[Row]) -> str:
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
        "the descent each.",
        "",
        "The models alone, and their ensemble:",
        "",
        *parents,
        "",
        "| models | start | data | at the start | after the descent | s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        losses = f"{row.before:.3f} | {row.after:.3f}"
        start = f"**{row.start}**" if row.taken else row.start
        text.append(f"| {row.group} | {start} | {row.data} | {losses} | {row.seconds:.0f} |")
    return "\n".join([*text, ""])


if __name__ == "__main__":
    typer.run(main)
