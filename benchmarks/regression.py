"""Sequential regression beside the mean and RegMean, of models that are aligned and of models that are not.

    OMP_NUM_THREADS=1 python benchmarks/regression.py     # writes regression.md; a quarter of an hour on one core

Losses are of the second half of the held-out examples. Language models write their own inputs, the ViT is given its
training images without labels, and BERT the first half of the held-out text.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from revision import revision

from hf_align.jobs.opened import Basis, Opened
from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.methods import FROM_WEIGHTS
from hf_align.merging.regmean import regression_mean
from hf_align.merging.regression import Regressed, mean_of, regress, sequential_regression
from hf_align.merging.samples import MORE, MOST, Samples
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Batch, Network
from hf_align.settings.options import Options

ROOT = Path(__file__).parent.parent
MODELS, DATA = ROOT / "examples" / "models", ROOT / "examples" / "data"
TABLE = Path(__file__).with_suffix(".md")
FAMILIES = {"gpt2": "GPT-2", "llama": "Llama", "vit": "ViT", "bert": "BERT, text"}
HELD_OUT = {"vit": "eval_digits", "bert": "eval_mlm_kjv"}
BASES = {"weight": "aligned by weights", "none": "not aligned"}
SHOWN_NOT_ALIGNED = ("mean", "**regression**")


def regressed_alone(models: Aligned, samples: Samples) -> Mix:
    """Every weight fitted, and nothing chosen."""
    mean, found = mean_of((models.a, models.b), (0.5, 0.5)), dict[str, torch.Tensor]()
    regress((models.a, models.b), (0.5, 0.5), samples, mean, found)
    merged = Regressed(mean, found)
    return lambda name, _: merged[name]


def fewer(samples: Samples) -> Samples:
    """As many as RegMean takes."""
    return Samples(samples.network, [{k: t[:MOST] for k, t in x.items()} for x in samples.each])


METHODS: dict[str, Callable[[Aligned, Samples], Mix]] = {
    "mean": lambda models, _: FROM_WEIGHTS["linear"](models),
    "RegMean": lambda models, samples: regression_mean(models, fewer(samples)),
    "regression, units averaged": regressed_alone,
    "**regression**": sequential_regression,
}


@dataclass(frozen=True)
class Row:
    """What one merge lost over the mean of its parents, and the seconds that it took."""

    family: str
    method: str
    basis: str
    barrier: float
    seconds: float


def pairs(family: str) -> Iterator[Pair]:
    seeds = sorted(p for p in (MODELS / family).iterdir() if p.is_dir())
    return (open_pair(str(a), str(b)) for a, b in itertools.combinations(seeds, 2))


def inputs(family: str, pair: Pair, fit: Batch) -> Batch | None:
    """What models run on that do not write."""
    if family == "vit":
        return load_data(DATA / "train_digits.safetensors", None, pair.config)
    return fit if family == "bert" else None


def rows(family: str, pair: Pair) -> Iterator[Row]:
    data = load_data(DATA / f"{HELD_OUT.get(family, 'eval_lm_kjv')}.safetensors", None, pair.config)
    half = len(next(iter(data.values()))) // 2
    fit, held_out = ({k: t[at : at + half] for k, t in data.items()} for at in (0, half))
    network = Network(pair.config)
    evaluator = Evaluator(network, held_out)
    samples, writing = None, 0.0
    for match, basis in BASES.items():
        opened = Opened((pair,), Options(match=match, quiet=True))
        weights = Basis(opened, opened.find()).weights
        models = Aligned(opened.spec, *({n: w[n] for n in pair.spec.parameters} for w in weights))
        parents = sum(evaluator.loss(w) for w in (models.a, models.b)) / 2
        if samples is None:
            start = time.process_time()
            samples = Samples.of((models.a, models.b), network, inputs(family, pair, fit), lambda _: None, MORE)
            writing = time.process_time() - start
        for method, merge in METHODS.items():
            if match == "none" and method not in SHOWN_NOT_ALIGNED:
                continue
            start = time.process_time()
            mix = merge(models, samples)
            merged = {n: mix(n, 0.5).float() for n in pair.spec.parameters}
            seconds = time.process_time() - start + (writing if method != "mean" else 0)
            yield Row(family, method, basis, evaluator.loss(merged) - parents, seconds)


def table(found: list[Row], families: list[str]) -> list[str]:
    """The mean over all pairs, and the seconds of one."""
    lines = [
        "| | " + " | ".join(f"{FAMILIES[f]} | s" for f in families) + " |",
        "| --- " * (2 * len(families) + 1) + "|",
    ]
    for basis in BASES.values():
        for method in METHODS:
            cells = []
            for family in families:
                same = [r for r in found if (r.family, r.method, r.basis) == (family, method, basis)]
                if not same:
                    continue
                cells.append(f"{sum(r.barrier for r in same) / len(same):.3f}")
                cells.append(f"{sum(r.seconds for r in same) / len(same):.0f}")
            if cells:
                lines.append(f"| {method}, {basis} | {' | '.join(cells)} |")
    return lines


def main(family: list[str] | None = None, output: Path = TABLE) -> None:
    torch.manual_seed(0)
    families = family or list(FAMILIES)
    found = []
    for name in families:
        for pair in pairs(name):
            for row in rows(name, pair):
                found.append(row)
                typer.echo(f"{row.family}: {row.method}, {row.basis} {row.barrier:.3f} {row.seconds:.0f} s", err=True)
    text = [
        "# Sequential regression",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/regression.py`: by how much the merge of two models of `examples/models`",
        "loses more than they do in the mean (nats, second half of the held-out examples), the mean over all pairs of",
        "seeds, and the seconds of one core that one merge takes, with what the models write. No gradients, no labels.",
        f"GPT-2 and Llama have no data: each model writes {MORE} sequences (RegMean takes {MOST}). The ViT is given",
        f"{MORE} of its training images, BERT the first half of the held-out text. *Units averaged*: every weight is",
        f"fitted, and nothing is chosen out of the two. Revision {revision()}.",
        "",
        *table(found, families),
        "",
    ]
    output.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
