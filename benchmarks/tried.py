"""What else the literature has beside sequential regression, on one pair: python benchmarks/tried.py

Writes tried.md. Losses are of the second half of the held-out examples; inputs are those of `regression.py`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
import typer
from regression import DATA, FAMILIES, HELD_OUT, MODELS, inputs
from revision import revision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_align.jobs.opened import Basis, Opened
from hf_align.merging.regression import mean_of, regression_of
from hf_align.merging.samples import MORE, Samples
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Batch, Network, Weights, batches
from hf_align.settings.options import Options

TABLE = Path(__file__).with_suffix(".md")
HALF = (0.5, 0.5)
WIDTHS = (1.125, 1.25, 1.5, 2.0)
RIDGE = 1e-3
ABOUT = f"""# What else was tried

    OMP_NUM_THREADS=1 python benchmarks/tried.py

By how much a merge of models 0 and 1 of `examples/models` loses more than they do in the mean (nats, second half of
the held-out examples), and CPU seconds on one thread. The models are aligned by their weights; inputs are those of
[regression.md](regression.md). No labels.

- *REPAIR* (Jordan et al., arXiv 2211.08403), norm after norm: each channel behind it gets the mean and the deviation
  that it has in the two models, in the mean of both.
- *One temperature* (as in arXiv 2410.12766): logits times one number, chosen on what the merge was fitted on.
- *RegMean++* (arXiv 2508.03121): each linear map is RegMean's, with the merged model's own activations.
- *Wider MLPs* (PLeaS, arXiv 2407.02447; `--widen`): units are chosen out of both as before, but more of them than one
  model has ({", ".join(map(str, WIDTHS))} times). The result has another config, and more parameters.

What it shows: models of one text read much the same, so RegMean++ is close to the mean. REPAIR helps the mean of some
pairs, and does little or harm behind a regression. A temperature is worth less than 0.01. Wider MLPs help where units
had to be left out: a quarter more takes a fifth off the barrier of GPT-2 and of Llama.
"""


@dataclass(frozen=True)
class Bench:
    """One pair of models in one basis, and what they are run on."""

    family: str
    pair: Pair
    models: tuple[Weights, Weights]
    samples: Samples
    held_out: Batch

    @classmethod
    def of(cls, family: str) -> Bench:
        pair = open_pair(*folders(family))
        data = load_data(DATA / f"{HELD_OUT.get(family, 'eval_lm_kjv')}.safetensors", None, pair.config)
        half = len(next(iter(data.values()))) // 2
        fit, held_out = ({k: t[at : at + half] for k, t in data.items()} for at in (0, half))
        models = aligned(pair)
        samples = Samples.of(models, Network(pair.config), inputs(family, pair, fit), lambda _: None, MORE)
        return cls(family, pair, models, samples, held_out)

    @cached_property
    def parents(self) -> float:
        return sum(self.evaluator.loss(weights) for weights in self.models) / 2

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.samples.network, self.held_out)

    @cached_property
    def mean(self) -> dict[str, Tensor]:
        mean = mean_of(self.models, HALF)
        return {name: mean[name] for name in self.pair.spec.parameters}

    @cached_property
    def regressed(self) -> dict[str, Tensor]:
        found = regression_of(self.models, HALF, self.samples, self.pair.spec)
        return {name: found[name].float() for name in self.pair.spec.parameters}

    def over(self, weights: Weights) -> float:
        return self.evaluator.loss(weights) - self.parents

    def loaded(self, weights: Mapping[str, Tensor]) -> PreTrainedModel:
        """A model with these weights."""
        architecture = getattr(transformers, self.pair.a.config.architectures[0])
        model: PreTrainedModel = architecture(copy.deepcopy(self.pair.config)).eval()
        model.load_state_dict(dict(weights), strict=False)
        return model

    def rows(self) -> Iterator[tuple[str, Callable[[], float]]]:
        """Each way, and what computes how much it loses."""
        yield "mean", lambda: self.over(self.mean)
        yield "mean, then REPAIR", lambda: self.over(repaired(self, self.mean))
        if self.family != "vit":
            yield "RegMean++", lambda: self.over(regression_means(self))
        yield "**regression**", lambda: self.over(self.regressed)
        yield "regression, then REPAIR", lambda: self.over(repaired(self, self.regressed))
        if self.family in ("gpt2", "llama"):
            yield "regression, then one temperature", lambda: self.over_at(temperature(self))
        for ratio in WIDTHS:
            yield f"regression, MLPs {ratio:g} times as wide", lambda ratio=ratio: wider(self, ratio)

    def over_at(self, scale: float) -> float:
        """With logits times a scale."""
        return nll(self.samples.network, self.regressed, self.held_out, [scale])[0] - self.parents


def folders(family: str) -> list[str]:
    return [str(MODELS / family / str(seed)) for seed in (0, 1)]


def aligned(pair: Pair) -> tuple[Weights, Weights]:
    """Both models in one basis, by their weights."""
    opened = Opened((pair,), Options(quiet=True))
    a, b = ({n: w[n].float() for n in pair.spec.parameters} for w in Basis(opened, opened.find()).weights)
    return a, b


def repaired(bench: Bench, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with every norm's gain and bias such that what it gives has the mean and deviation of the two models'."""
    found = dict(start)
    both = [bench.loaded(weights) for weights in bench.models]
    for name in (
        n for n, m in both[0].named_modules() if getattr(m, "weight", None) is not None and m.weight.ndim == 1
    ):
        (mean_a, std_a), (mean_b, std_b) = (statistics(model, name, bench.samples.all) for model in both)
        mean, std = statistics(bench.loaded(found), name, bench.samples.all)
        scale = (std_a + std_b) / 2 / std.clamp_min(1e-6)
        found[f"{name}.weight"] = found[f"{name}.weight"] * scale
        if f"{name}.bias" in found:
            found[f"{name}.bias"] = found[f"{name}.bias"] * scale + (mean_a + mean_b) / 2 - mean * scale
    return found


def statistics(model: PreTrainedModel, module: str, data: Batch) -> tuple[Tensor, Tensor]:
    """The mean and the deviation of each channel behind a module."""
    given = torch.cat([out.flatten(0, -2) for _, out in calls(model, module, data)])
    return given.mean(0), given.std(0)


@torch.no_grad()
def calls(model: PreTrainedModel, module: str, data: Batch) -> list[tuple[Tensor, Tensor]]:
    """What a module is given and what it gives, a batch each."""
    found: list[tuple[Tensor, Tensor]] = []
    hook = model.get_submodule(module).register_forward_hook(lambda _, args, out: found.append((args[0], out)))
    for batch in batches(data):
        model(**batch)
    hook.remove()
    return found


def regression_means(bench: Bench) -> dict[str, Tensor]:
    """(Σ Gᵢ)⁻¹ Σ Gᵢ Wᵢ for each linear map in its turn, Gᵢ = X̂ᵀX̂ of the merged model on the inputs of model i."""
    found = dict(bench.mean)
    maps = [(n, isinstance(m, nn.Linear)) for n, m in bench.loaded(found).named_modules()
            if isinstance(m, nn.Linear | Conv1D) and f"{n}.weight" in found]  # fmt: skip
    for name, turned in maps:
        merged = bench.loaded(found)
        left, right = torch.zeros(()), torch.zeros(())
        for data, weights in zip(bench.samples.each, bench.models, strict=True):
            x = torch.cat([given.flatten(0, -2) for given, _ in calls(merged, name, data)])
            gram = x.mT @ x
            gram.diagonal().add_(RIDGE * gram.diagonal().mean())
            weight = weights[f"{name}.weight"]
            left, right = left + gram, right + gram @ (weight.mT if turned else weight)
        solved = torch.linalg.solve(left, right)
        found[f"{name}.weight"] = solved.mT if turned else solved
    return found


def temperature(bench: Bench) -> float:
    """The scale of the logits that what the models have written is likeliest with."""
    scales = [0.8 + 0.02 * step for step in range(26)]
    losses = nll(bench.samples.network, bench.regressed, bench.samples.all, scales)
    return min(zip(losses, scales, strict=True))[1]


@torch.no_grad()
def nll(network: Network, weights: Weights, data: Batch, scales: list[float]) -> list[float]:
    """Nats per token with logits times each scale."""
    placed, total, count = network.placed(weights), [0.0] * len(scales), 0
    for batch in batches({"input_ids": data["input_ids"]}):
        logits, labels = network(placed, batch).logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten().long()
        for at, scale in enumerate(scales):
            total[at] += float(cross_entropy(scale * logits, labels, reduction="sum"))
        count += len(labels)
    return [each / count for each in total]


def wider(bench: Bench, ratio: float) -> float:
    """What `--widen` writes: both with units that nothing reads, so that as many more can be chosen."""
    config = bench.pair.config
    field = "n_inner" if hasattr(config, "n_inner") else "intermediate_size"
    size = int(ratio * (getattr(config, field) or 4 * config.hidden_size))
    pair = open_pair(*folders(bench.family), widen={field: size})
    network = Network(pair.config)
    found = regression_of(aligned(pair), HALF, Samples(network, bench.samples.each), pair.spec)
    return Evaluator(network, bench.held_out).loss(found) - bench.parents


def main(output: Path = TABLE) -> None:
    torch.manual_seed(0)
    cells: dict[str, dict[str, str]] = {}
    for family in FAMILIES:
        bench = Bench.of(family)
        for name, compute in bench.rows():
            began = time.process_time()
            lost = compute()
            cells.setdefault(name, {})[family] = f"{lost:.3f} | {time.process_time() - began:.0f}"
            typer.echo(f"{family}: {name} {cells[name][family]} s", err=True)
    lines = [
        ABOUT,
        "| | " + " | ".join(f"{called} | s" for called in FAMILIES.values()) + " |",
        "| --- " * (2 * len(FAMILIES) + 1) + "|",
        *(f"| {name} | {' | '.join(row.get(family, ' | ') for family in FAMILIES)} |" for name, row in cells.items()),
        "",
        f"Revision {revision()}.",
        "",
    ]
    output.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
