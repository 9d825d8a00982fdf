"""Losses at the midpoint under every way to merge, of pairs aligned by their weights: python benchmarks/merging.py

Writes benchmarks/merging.md. What runs the models takes the first half of the held-out examples, and losses are of the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from revision import revision

from hf_align.jobs.opened import Basis, Opened
from hf_align.matching.match import Match
from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.fusion import fused
from hf_align.merging.methods import FROM_SAMPLES, FROM_WEIGHTS, INEXACT
from hf_align.merging.regmean import regression_mean
from hf_align.merging.samples import Samples
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator
from hf_align.running.generate import own_inputs
from hf_align.running.network import Network
from hf_align.settings.options import Options

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "examples" / "models"
TABLE = Path(__file__).with_suffix(".md")
PAIRS = {
    "ViT": ("vit/0", "vit/1", "eval_digits"),
    "GPT-2": ("gpt2/0", "gpt2/1", "eval_lm_kjv"),
    "Llama": ("llama/0", "llama/1", "eval_lm_kjv"),
    "Llama, 192 wide with 128": ("llama-wide/3", "llama/0", "eval_lm_kjv"),
}
OFF_DIAGONALS = (1.0, 0.5, 0.0)
TEMPERATURES = (0.01, 0.1)


@dataclass(frozen=True)
class Bench:
    """An aligned pair, and the two halves of its examples."""

    pair: Pair
    models: Aligned
    samples: Samples
    own: Samples
    evaluator: Evaluator
    unaligned: Aligned

    @classmethod
    def of(cls, first: str, second: str, data: str, rows: int) -> Bench:
        pair = open_pair(str(MODELS / first), str(MODELS / second))
        everything = load_data(ROOT / "examples" / "data" / f"{data}.safetensors", None, pair.config)
        half = len(next(iter(everything.values()))) // 2
        fit, held_out = ({k: t[start : start + min(rows, half)] for k, t in everything.items()} for start in (0, half))
        matches = Opened((pair,), Options(quiet=True)).find()
        models, plain = (_aligned(pair, m) for m in (matches, []))
        network = Network(pair.config)
        inputs = {k: t for k, t in fit.items() if k != "labels"}
        own = [own_inputs(Network(pair.config), w, rows, 64, i) for i, w in enumerate((models.a, models.b))]
        return cls(pair, models, Samples(network, (inputs, inputs)), Samples(network, own),
                   Evaluator(Network(pair.config), held_out), plain)  # fmt: skip

    def loss(self, mix: Mix, weight: float = 0.5) -> float:
        return self.evaluator.loss({n: mix(n, weight).float() for n in self.pair.spec.parameters})

    def rows(self) -> Iterator[tuple[str, float]]:
        """A way to merge, and the loss at the midpoint."""
        linear = FROM_WEIGHTS["linear"]
        yield "A", self.loss(linear(self.models), 0.0)
        yield "B", self.loss(linear(self.models), 1.0)
        yield "linear, not aligned", self.loss(linear(self.unaligned))
        yield "regmean, not aligned", self.loss(regression_mean(self.unaligned, self.samples))
        for name, by_weights in FROM_WEIGHTS.items():
            yield _label(name), self.loss(by_weights(self.models))
        for name, by_samples in FROM_SAMPLES.items():
            yield _label(name), self.loss(by_samples(self.models, self.samples))
        for name in ("fisher", "regmean"):
            yield f"{name}, no data", self.loss(FROM_SAMPLES[name](self.models, self.own))
        for share in OFF_DIAGONALS:
            yield f"regmean, {share:g} off the diagonal", self.loss(regression_mean(self.models, self.samples, share))
        for temperature in TEMPERATURES:
            yield _label(f"ot-fusion, {temperature:g}"), self.loss(fused(self.models, temperature))


def _aligned(pair: Pair, matches: list[Match]) -> Aligned:
    weights = Basis(Opened((pair,), Options()), matches).weights
    return Aligned(pair.spec, *({n: w[n] for n in pair.spec.parameters} for w in weights))


def _label(name: str) -> str:
    return f"{name} (inexact)" if name.partition(",")[0] in INEXACT else name


def table(found: dict[str, dict[str, float]]) -> list[str]:
    families = list(found)
    lines = [f"| merge | {' | '.join(families)} |", "| --- " * (len(families) + 1) + "|"]
    for row in found[families[0]]:
        values = [found[f][row] for f in families]
        lines.append(f"| {row} | {' | '.join(f'{v:.3f}' for v in values)} |")
    return lines


def main(rows: int = 48, output: Path = TABLE) -> None:
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    for family, names in PAIRS.items():
        found[family] = {}
        for row, loss in Bench.of(*names, rows).rows():
            found[family][row] = loss
            typer.echo(f"{family}: {row} {loss:.3f}", err=True)
    text = [
        "# Merging beyond the mean",
        "",
        f"`python benchmarks/merging.py --rows {rows}`: loss (nats) at the midpoint of the models of "
        "`examples/models`,",
        "aligned by their weights with an orthogonal residual. Statistics are of the first half of the held-out",
        f"examples (at most {rows}), losses of as many of the other half. `no data`: inputs that the models write, or",
        "noise for images. The regression mean keeps 0.9 of what is off the diagonal of its Gram matrices, and "
        "fusion by optimal transport",
        "has temperature 0.05, where nothing else is said. The wide Llama's partner is widened first, which leaves its",
        f"loss as it is. One pair each: differences of 0.01 mean nothing. Revision {revision()}.",
        "",
        *table(found),
        "",
    ]
    output.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
