"""Merging two fine-tunes of one base, with and without alignment: python benchmarks/finetunes.py

Writes benchmarks/finetunes.md. The models are a small Llama and its fine-tunes on the Jargon File and on Python source.
The scale of each method is chosen on one part of the held-out text of the two fine-tunes, and losses are of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from revision import revision
from torch import Tensor

from hf_align.jobs.opened import Basis, Opened
from hf_align.matching.find import Search, towards
from hf_align.mergekit.methods import merge_tensors
from hf_align.merging.aligned import Aligned
from hf_align.merging.curve import along, learn_curve
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Network
from hf_align.settings.options import Options

TABLE = Path(__file__).with_suffix(".md")
TEXTS = ("jargon", "py", "kjv")
SCALES = [round(0.1 * i, 1) for i in range(1, 13)]
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "task arithmetic": ("task_arithmetic", {}),
    **{f"TIES, density {d:g}": ("ties", {"density": d, "normalize": False}) for d in (0.2, 0.5, 0.8)},
    **{f"TIES, density {d:g}, normalised": ("ties", {"density": d, "normalize": True}) for d in (0.2, 0.5, 0.8)},
}
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Losses:
    """Of one model: the scale of its task vectors, and its losses on each text."""

    scale: float | None
    on: list[float]


@dataclass(frozen=True)
class Bench:
    """The fine-tunes `a` and `b` and their base, in one basis, with evaluators to choose by and to report with."""

    inputs: Opened
    models: Mapping[str, Weights]
    choose: list[Evaluator]
    judge: list[Evaluator]

    @classmethod
    def of(cls, named: Mapping[str, str], data: Path, match: str, rows: int) -> Bench:
        inputs = Opened.open(named, Options(match=match, quiet=True), jointly=False)
        matches = [m for pair in inputs.pairs for m in Opened((pair,), inputs.options).find()]
        names, config = list(inputs.spec.parameters), inputs.first.config
        network = Network(config)
        texts = [load_data(data / f"eval_lm_{t}.safetensors", None, config) for t in TEXTS]
        first, second = ([Evaluator(network, {k: x[start : start + rows] for k, x in t.items()}) for t in texts]
                         for start in (rows, 0))  # fmt: skip
        models = {m: {n: w[n].float() for n in names} for m, w in Basis(inputs, matches).by_name.items()}
        return cls(inputs, models, first[:2], second)

    def losses(self, weights: Weights, scale: float | None = None) -> Losses:
        return Losses(scale, [e.loss(weights) for e in self.judge])

    def mean(self) -> Losses:
        return self.losses({n: (t + self.models["b"][n]) / 2 for n, t in self.models["a"].items()})

    def curve(self) -> Losses:
        """Halfway along a curve that is learned on what both models write."""
        network, search = self.judge[0].network, Search()
        a, b = (dict(self.models[m]) for m in "ab")
        objective = towards((a, b), network, search, None, lambda _: None)
        mix = along(Aligned(self.inputs.spec, a, b), learn_curve((a, b), network, objective, search.schedule))
        return self.losses({n: mix(n, 0.5) for n in a})

    def cosine(self) -> float:
        """Of the two fine-tunes' task vectors."""
        base = self.models["base"]
        first, second = (torch.cat([(self.models[m][n] - base[n]).flatten() for n in base]) for m in "ab")
        return float(torch.nn.functional.cosine_similarity(first, second, dim=0))

    def best(self, method: str, parameters: Mapping[str, Any], scales: Sequence[float]) -> Losses:
        """At the scale that is best for the two fine-tunes' own texts."""
        base, change = self.models["base"], self._change(method, parameters)
        scaled = {s: {n: base[n] + s * change[n] for n in base} for s in scales}
        scale = min(scales, key=lambda s: sum(e.loss(scaled[s]) for e in self.choose))
        return self.losses(scaled[scale], scale)

    def _change(self, method: str, parameters: Mapping[str, Any]) -> Weights:
        each = {k: v if k == "normalize" else dict.fromkeys("ab", v) | {"base": 1.0} for k, v in parameters.items()}
        given = {**each, "weight": {"a": 1.0, "b": 1.0, "base": 0.0}}
        return {n: merge_tensors({m: self.models[m][n] for m in ("a", "b", "base")}, method, given, "base", n) - t
                for n, t in self.models["base"].items()}  # fmt: skip


def row(name: str, *found: Losses | None) -> str:
    cells = []
    for losses in found:
        scale = f"{losses.scale:g}" if losses and losses.scale else ""
        cells += [scale, *(f"{x:.3f}" for x in losses.on)] if losses else [""] * 4
    return f"| {name} | {' | '.join(cells)} |"


def main(
    models: Annotated[Path, typer.Option(help="Folder with llama/0 and llama-ft/.")],
    data: Annotated[Path, typer.Option(help="Folder with eval_lm_jargon, eval_lm_py and eval_lm_kjv.")],
    rows: int = 128,
    output: Path = TABLE,
) -> None:
    named = {k: str(models / v) for k, v in (("a", "llama-ft/jargon"), ("b", "llama-ft/py"), ("base", "llama/0"))}
    plain, aligned = (Bench.of(named, data, match, rows) for match in ("none", "weight"))
    labels = {"a": "fine-tune on jargon", "b": "fine-tune on Python", "base": "their base"}
    table = [row(label, plain.losses(plain.models[m]), None) for m, label in labels.items()]
    table.append(row("mean", plain.mean(), aligned.mean()))
    table.append(row("curve", plain.curve(), aligned.curve()))
    for name, (method, parameters) in RECIPES.items():
        table.append(row(name, *(bench.best(method, parameters, SCALES) for bench in (plain, aligned))))
        typer.echo(table[-1], err=True)
    table.append(row("task arithmetic", *(b.best("task_arithmetic", {}, [1.0]) for b in (plain, aligned))))
    other = {**named, "b": str(models / "llama/1")}
    apart, brought = (Bench.of(other, data, match, rows) for match in ("none", "weight"))
    text = [
        "# Fine-tunes of one base",
        "",
        f"`python benchmarks/finetunes.py --models … --data … --rows {rows}`: loss (nats) on held-out text of the",
        "Jargon File, of Python source, and of the King James Bible, which the base was trained on; first as the",
        "models are, then with the second fine-tune and the base moved into the basis of the first (`--base`, matched",
        "by their weights). Task vectors have the scale (0.1 to 1.2) that is best for the sum of the two fine-tunes'",
        "own losses on other held-out text; the last line has scale 1. *Curve* is the middle of `--method curve`, 150",
        f"steps on what both models write, without data. Revision {revision()}.",
        "",
        "| merge | scale | jargon | py | kjv | scale, aligned | jargon | py | kjv |",
        "| --- " * 9 + "|",
        *table,
        "",
        "Fine-tunes of one base share its basis: there is little to find, and the mean is as good without alignment.",
        "TIES gains from it at every density; task arithmetic does not, and suffers beyond its best scale. The curve",
        "has the lowest loss on both texts, with no data and no scale to choose, and keeps less of what the base knew",
        "than the mean.",
        f"The cosine of the two task vectors is {plain.cosine():.2f} as they are, {aligned.cosine():.2f} aligned.",
        "",
        "## Different seeds and different data",
        "",
        "The fine-tune on jargon, and a model that was trained from another seed on the King James Bible alone. Their",
        "mean comes closer to what both have learned, and stays far from what one of them has. Aligned, the curve ends",
        "0.3 and 0.4 above each of them on its own text.",
        "",
        "| merge | | jargon | py | kjv | aligned | jargon | py | kjv |",
        "| --- " * 9 + "|",
        row(labels["a"], apart.losses(apart.models["a"]), None),
        row("the other seed", apart.losses(apart.models["b"]), None),
        row("mean", apart.mean(), brought.mean()),
        row("curve", apart.curve(), brought.curve()),
        "",
    ]
    output.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
