"""What keeps the straight line between two models above half of the reference's barrier.

    OMP_NUM_THREADS=1 python benchmarks/line.py    # writes line.md; half an hour

All on pair 0–1 and the second half of the held-out examples: rises of the loss at the midpoint over the mean of both
models' losses. Rows are kept in a file, so that a run that was stopped goes on.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from barriers import REFERENCE, examples, keep, opened
from torch import Generator, Tensor, nn
from transformers import PretrainedConfig

from hf_align.matching.balanced import Balanced
from hf_align.matching.features import compare
from hf_align.matching.find import Search, own
from hf_align.matching.learned import learn
from hf_align.matching.objectives import TowardsSources
from hf_align.matching.weights import match_weights
from hf_align.merging.aligned import Aligned
from hf_align.merging.methods import FROM_SAMPLES, FROM_WEIGHTS
from hf_align.merging.samples import MOST, Samples
from hf_align.opening.pairs import Pair
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Batch, Network, batches
from hf_align.settings.schedule import Schedule
from hf_align.symmetry.action import Elements
from hf_align.symmetry.elements import Monomial
from hf_align.symmetry.spec import SymmetrySpec

TABLE = Path(__file__).with_suffix(".md")
PAIR = "0–1"
MLP, ATTENTION = ("mlp",), ("attn", "self_attn")
BESIDE = {"nothing": (), "attention": ATTENTION, "MLPs": MLP, "both": (*MLP, *ATTENTION)}
"""What of both models stands side by side: the modules of GPT-2 and Llama by the last part of their names."""
READS_UNITS = ("mlp.c_proj.weight", "mlp.down_proj.weight")
TWO = tuple(BESIDE)[1:]
MEANS = ("circuits", "fisher", "regmean")
SEQUENCES = 512
SCHEDULE = Schedule(steps=400, rows=32, lambda_sampling="midpoint")
TRAINED = Schedule(steps=100, rows=32, lambda_sampling="midpoint")
RATE = 1e-3
FAMILIES = ("gpt2", "llama")

Weights = Mapping[str, Tensor]


class Beside(nn.Module):
    """(f(x) + g(x)) / 2, of two modules of one kind."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.sides = nn.ModuleList([module, copy.deepcopy(module)])

    def forward(self, *arguments: Any, **more: Any) -> Any:
        one, other = (side(*arguments, **more) for side in self.sides)
        if isinstance(one, Tensor):
            return (one + other) / 2
        return ((one[0] + other[0]) / 2, *one[1:])


class BesideNetwork(Network):
    """An architecture in which some modules stand side by side, with the weights of two models."""

    def __init__(self, config: PretrainedConfig, kinds: tuple[str, ...]) -> None:
        super().__init__(copy.deepcopy(config))
        self.config.use_cache = False  # two modules would write into one cache
        self.kinds = kinds

    @functools.cached_property
    def _module(self) -> nn.Module:
        model = super()._module
        for path, module in list(model.named_modules()):
            if path.rpartition(".")[2] in self.kinds:
                model.set_submodule(path, Beside(module))
        return model

    def sides(self, name: str) -> tuple[str, ...]:
        """The names of a weight here: one for each side, or the one that it has."""
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part in self.kinds), None)
        if at is None:
            return (name,)
        return tuple(".".join((*parts[: at + 1], "sides", str(side), *parts[at + 1 :])) for side in (0, 1))

    def both(self, weights: Weights) -> dict[str, Tensor]:
        """One model on both sides: it computes what it does."""
        return {side: t for name, t in weights.items() for side in self.sides(name)}

    def one(self, weights: Weights, where: int) -> dict[str, Tensor]:
        """One model on one side, such that the mean of two such models has both side by side."""
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            names = self.sides(name)
            found |= {side: (2 * tensor if i == where else 0 * tensor) if len(names) > 1 else tensor
                      for i, side in enumerate(names)}  # fmt: skip
        return found

    def spec(self, spec: SymmetrySpec) -> SymmetrySpec:
        """Both sides move as the one module did."""
        return replace(spec, parameters={s: axes for n, axes in spec.parameters.items() for s in self.sides(n)})


@dataclass(frozen=True)
class Bench:
    """A pair that was matched by its weights, what each model wrote, and what merges are judged by.

    Attributes:
        written: by each model itself.
        data: examples of the table.
        ends: the mean of both models' losses.
    """

    pair: Pair
    models: Balanced
    start: Elements
    written: tuple[Batch, ...]
    data: Batch
    ends: float

    def rise(self, network: Network, weights: Weights) -> float:
        """How far a loss is above the mean of both models'."""
        return Evaluator(network, self.data).loss(weights) - self.ends

    def objective(self, network: BesideNetwork) -> TowardsSources:
        """Distillation towards both models, as everywhere."""
        sources = tuple(network.placed(network.both(m)) for m in self.models.models)
        return TowardsSources(sources, self.written)

    def mean(self, network: BesideNetwork, elements: Elements) -> dict[str, Tensor]:
        """The weights halfway, modules of both models side by side."""
        a, b = (network.one(m, i) for i, m in enumerate((self.models.a, self.models.moved(elements))))
        return {n: (a[n] + b[n]) / 2 for n in a}

    def halfway(self, kinds: tuple[str, ...], elements: Elements) -> float:
        """How far the loss rises halfway, in some basis."""
        network = BesideNetwork(self.pair.config, kinds)
        return self.rise(network, self.mean(network, elements))

    def learned_from(self, start: Elements, kinds: tuple[str, ...] = ()) -> Elements:
        """The basis that learned matching finds where some modules stand side by side, and others are averaged."""
        network = BesideNetwork(self.pair.config, kinds)
        weights = tuple(network.one({n: m[n] for n in self.pair.spec.parameters}, i)
                        for i, m in enumerate(self.models.models))  # fmt: skip
        models = replace(self.models, spec=network.spec(self.pair.spec), models=weights)
        (elements,) = learn(models, [start], network, self.objective(network), SCHEDULE)
        return elements


@functools.cache
def bench(family: str) -> Bench:
    pair = opened(family, PAIR)
    models = Balanced.of(pair.spec, pair.a.weights, pair.b.weights)
    start, _ = match_weights(models)
    network = Network(pair.config)
    sources = tuple(network.placed(m) for m in models.models)
    written = tuple(own(network, Search(schedule=SCHEDULE), sources, SEQUENCES, lambda _: None))
    data = examples(family, pair, "reported")
    ends = statistics.mean(Evaluator(network, data).loss(w) for w in sources)
    return Bench(pair, models, start, written, data, ends)


@functools.cache
def learned(family: str, kinds: tuple[str, ...] = ()) -> Elements:
    """The basis that is learned from the match by weights; several trials start in it."""
    found = bench(family)
    return found.learned_from(found.start, kinds)


def _at_random(found: Bench) -> Elements:
    """Units of MLPs in any order."""
    rng = Generator().manual_seed(0)
    orders = {s: torch.randperm(e.order.shape[-1], generator=rng) for s, e in _units(found)}
    anyhow = {s: Monomial(orders[s], torch.ones_like(e.scale)) for s, e in _units(found)}
    return {**found.start, **anyhow}


def _units(found: Bench) -> Iterator[tuple[str, Monomial]]:
    """The spaces of the MLPs' units, with what moves them at the start."""
    for name, element in found.start.items():
        if isinstance(element, Monomial) and any(n.endswith(READS_UNITS) for n in found.pair.spec.uses(name)):
            yield name, element


def beside(family: str, what: str, afterwards: bool) -> float:
    """Modules side by side, in the basis for their mean or in one that was learned for this."""
    kinds = BESIDE[what]
    return bench(family).halfway(kinds, learned(family) if afterwards else learned(family, kinds))


def paired_at_random(family: str) -> float:
    """Units of MLPs in any order, and the basis learned around them."""
    found = bench(family)
    return found.halfway((), found.learned_from(_at_random(found)))


def trained(family: str) -> float:
    """The mean in the learned basis, all of whose weights are then trained towards both models."""
    found = bench(family)
    network = BesideNetwork(found.pair.config, ())
    weights = {n: t.float().requires_grad_() for n, t in found.mean(network, learned(family)).items()}
    objective, rng = found.objective(network), Generator().manual_seed(0)
    adam = torch.optim.Adam(weights.values(), betas=(0.9, 0.95))
    for step in range(TRAINED.steps):
        adam.param_groups[0]["lr"] = RATE * TRAINED.pace(step)
        adam.zero_grad()
        objective.loss(network, weights, TRAINED.rows, rng).backward()
        adam.step()
    return found.rise(network, {n: t.detach() for n, t in weights.items()})


def merged(family: str, method: str) -> float:
    """Another way to merge than the mean, in the learned basis."""
    found = bench(family)
    network = Network(found.pair.config)
    models = Aligned(
        found.pair.spec, *(network.placed(w) for w in (found.models.a, found.models.moved(learned(family))))
    )
    mix = FROM_WEIGHTS[method](models) if method in FROM_WEIGHTS else FROM_SAMPLES[method](
        models, Samples(network, [{k: t[:MOST] for k, t in w.items()} for w in found.written])
    )  # fmt: skip
    return found.rise(network, {n: mix(n, 0.5) for n in found.pair.spec.parameters})


def correlations(family: str, best: bool) -> float:
    """Of the activations of units with those of their partners, or with the likest unit: the median of all layers."""
    found = bench(family)
    network = Network(found.pair.config)
    a, b = (network.placed(w) for w in (found.models.a, found.models.moved(learned(family))))
    inputs = {k: torch.cat([w[k][:MOST] for w in found.written]) for k in found.written[0]}
    moments = compare(network, a, b, batches(inputs))
    values = [m.correlation for site, m in moments.items() if site.weight.endswith(READS_UNITS)]
    return float(torch.cat([c.amax(1) if best else c.diagonal() for c in values]).median())


RISES: dict[str, Callable[[str], float]] = {
    "mean": functools.partial(beside, what="nothing", afterwards=True),
    **{f"{what} side by side afterwards": functools.partial(beside, what=what, afterwards=True) for what in TWO},
    **{f"{what} side by side, learned so": functools.partial(beside, what=what, afterwards=False) for what in TWO},
    "units paired at random": paired_at_random,
    **{method: functools.partial(merged, method=method) for method in MEANS},
    "all weights trained": trained,
}
CORRELATIONS: dict[str, Callable[[str], float]] = {
    "correlation of paired units": functools.partial(correlations, best=False),
    "correlation with the likest unit": functools.partial(correlations, best=True),
}
TRIALS = RISES | CORRELATIONS

_FINDINGS = (
    "**In the MLPs.** With the attention of both models side by side learned matching gains next to nothing; with "
    "their MLPs side by side it ends at 0.091 and 0.194, below half the reference. So what is in the way is the mean "
    "of the MLPs. Their units have no counterparts: paired ones correlate by 0.18 and 0.05 (medians), and the likest "
    "of all units only by 0.32 and 0.20.",
    "**Pairs** of units are no way out: at random they end at 0.254 and 0.440, for 0.183 and 0.355 by weights.",
    "**Afterwards** nothing gains 0.01: the basis was learned for the mean of weights. Of blocks side by side only "
    "both together come near it (0.180 and 0.367); circuits, Fisher information and regression are worse.",
    "**All weights.** Trained from there, each by itself, towards the same end, they come to 0.122 and 0.204, about "
    "half the reference. That is no proof that no basis leads as far; none that was found does. A curve does "
    "(`curves.md`): its middle is trained.",
)
_PREAMBLE = (
    "`OMP_NUM_THREADS=1 python benchmarks/line.py`, the pair 0–1 of `examples/models`: how far the loss halfway is "
    "above the mean of both models' losses (nats), on the second half of the held-out examples. Learned matching, "
    "400 steps of 32 from weight matching, the middle of the line alone, on 512 sequences that each model writes. "
    "*Side by side*: the outputs of both models' modules are averaged, in place of their weights; put so "
    "*afterwards* in the basis that was learned for the mean of weights, or the basis *learned so*. *Units paired at "
    "random*: those of the MLPs, before the basis is learned. *Circuits*, *fisher* and *regmean* merge in the "
    "learned basis; *all weights trained* is that mean after 100 steps of Adam, 32 sequences each, at a rate of "
    "0.001."
)


def table(rows: Mapping[tuple[str, str], float]) -> list[str]:
    def line(name: str, values: Iterable[float]) -> str:
        return f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |"

    rises, alike = ([line(t, (rows[f, t] for f in FAMILIES)) for t in trials] for trials in (RISES, CORRELATIONS))
    half = line("half of the reference's barrier", (REFERENCE["learned, 150 steps, data"][f] / 2 for f in FAMILIES))
    return ["| | GPT-2 | Llama |", "| --- | --- | --- |", *rises, half, *alike]


def main(
    output: Path = TABLE,
    family: Annotated[list[str] | None, typer.Option(help="Some families only; nothing is written.")] = None,
    results: Annotated[Path, typer.Option(help="Rows so far.")] = Path("out/line.jsonl"),
) -> None:
    torch.set_num_threads(1)
    kept = results.read_text().splitlines() if results.exists() else []
    rows = {(r["family"], r["trial"]): r["value"] for r in map(json.loads, kept)}
    for name, trial in itertools.product(family or FAMILIES, TRIALS):
        if (name, trial) not in rows:
            rows[name, trial] = TRIALS[trial](name)
            keep(results, {"family": name, "trial": trial, "value": rows[name, trial]})
        typer.echo(f"{name} {trial}: {rows[name, trial]:.3f}", err=True)
    if not family:
        findings = [line for finding in _FINDINGS for line in ("", textwrap.fill(finding, 118))]
        text = ["# What is in the way on the line", "", textwrap.fill(_PREAMBLE, 118), "", *table(rows), *findings, ""]
        output.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
