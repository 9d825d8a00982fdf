"""Loss barriers of every pair of seeds under every strategy.

    OMP_NUM_THREADS=1 python benchmarks/barriers.py            # all, writes barriers.md; a quarter of an hour
    OMP_NUM_THREADS=1 python benchmarks/barriers.py --family vit --only weight

Options of the strategies were chosen on the first half of the held-out examples; the table reports on the second. Exits
with status 1 if a limit is not met. Rows are kept in a file, so that a run that was stopped goes on.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from revision import revision
from torch import Tensor

from hf_align.matching.balanced import Balanced
from hf_align.matching.choices import separated, with_heads, with_residual
from hf_align.matching.find import Search, find, site_order
from hf_align.matching.match import Match
from hf_align.matching.universe import Mean
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator, lambdas
from hf_align.running.network import Batch, Network
from hf_align.settings.schedule import Schedule
from hf_align.symmetry.alignment import AlignedWeights, squared_distance
from hf_align.symmetry.spec import SymmetrySpec

ROOT = Path(__file__).parent.parent
MODELS, DATA = ROOT / "examples" / "models", ROOT / "examples" / "data"
HELD_OUT = {"bert": "eval_mlm_kjv", "gpt2": "eval_lm_kjv", "llama": "eval_lm_kjv", "vit": "eval_digits"}
TRAINING = {
    "bert": "kjv_sample.txt",
    "gpt2": "kjv_sample.txt",
    "llama": "kjv_sample.txt",
    "vit": "train_digits.safetensors",
}
TABLE = Path(__file__).with_suffix(".md")


_PREAMBLE = (
    "`OMP_NUM_THREADS=1 python benchmarks/barriers.py` on the models of `examples/models`: the second half of the "
    "held-out examples, 11 mixing weights. The barrier is the largest rise over the line between the endpoint losses "
    "(nats). Mean ± standard error over pairs of seeds and over seeds of the search. Distance is that of the weights "
    "in the gauge in which they are averaged (*ignore-heads* and *separate* are baselines of Verma & Elbayad, which "
    "change B: their loss B is not that of B); seconds are CPU time of matching, on one thread. *Data* is text that "
    "the models were trained on (masked for BERT), or labelled training images; models that write also write 512 "
    "sequences each then, but for *text alone*; with *no data* that is all (BERT does not write: random tokens). The "
    "residual stream of BERT, which is normalised after every block, moves by permutations at most: for it "
    "*orthogonal* is *permuted*."
)
_REFERENCE_PREAMBLE = (
    "A scratch implementation, written by hand for three families, was tuned and measured on the same examples: the "
    "first 128 sequences or all 500 images, the pair 0–1. The same strategies there; our options were chosen on them "
    "too. The reference had data for its 400 steps (500 for the ViT) of 16 examples; ours are of 32, for text without."
)
_FINDINGS = (
    "**Heads.** Paired by the best fit of their weights (the default) or by what they compute, the circuits W_QᵀW_K "
    "and W_OW_V: alike in GPT-2, BERT and Llama; in the ViT worse on the half that options are chosen on (1.895 "
    "against 1.655), better on the other. Hence the default.",
    "**BERT.** Verma & Elbayad found that an identity residual beats learned permutations for independently trained "
    "encoders that normalise after every block. Not so for this pair: by weights, by activations and learned (0.844 "
    "against 1.145), permutations beat the identity. The default stays the largest group that the architecture "
    "allows.",
    "**Tables.** In weight matching the tables of the residual stream (vocabulary, positions, patches, labels) count "
    "by the geometric mean of what their entries and what their rows would have them count; with entries alone the "
    "barriers on the half that options are chosen on were 0.462 (GPT-2), 1.114, 1.089, 1.096 (Llama) and 1.761 (ViT), "
    "against 0.457, 1.000, 1.013, 0.989 and 1.655.",
    "**Steps.** Learned matching turns all planes by about the same angle in each step (`steepest.py`). Against Adam, "
    "which has a rate for each coordinate, on the half that options are chosen on, 100 steps of 16, no data: 0.210 "
    "against 0.235 for GPT-2 (0.228 at twice the rate; 0.227 with only the residual stream turned so) and 0.425 "
    "against 0.451 for Llama (0.441).",
    "**Half the reference**, the aim of learned matching (0.118 for GPT-2, 0.222 for Llama, zero for the ViT), is "
    "reached for the ViT, where the loss is taken on the whole path (around the middle alone, a midpoint far below "
    "both models is bought with a rise towards B), and not for the others. What more compute gives them, on the half "
    "that options are chosen on: 0.210 and 0.425 after 100 steps of 16, 0.170 and 0.337 after 400 of 32, eight times "
    "as much. On the other half (table) 800 steps and four times the sequences gain 0.017 and 0.033 more, and from "
    "there eight times as many steps and four times the sequences only 0.010 and, for the pair 0–1, 0.018: more of "
    "the same does not lead to half the reference. Trials, not run by this script: a trained factor for each merged "
    "weight gains 0.01 to 0.02, for each row and column 0.02 to 0.03, which bounds what a free scale between the "
    "gains of norms and their readers could give. The other gauges are sums, which average to themselves, or shift a "
    "bias.",
    "**Where it is lost**: in the mean of the MLPs, whose units have no counterparts (`line.md`: blocks side by "
    "side, other pairs, other means, all weights trained). Nor is it the pairs (trials for Llama on the half that "
    "options are chosen on, not run by a script): by what the merged unit computes they end where those by weights "
    "do, at 0.341, and of the 40 swaps in each layer that the gradient favours most none lowers the loss by more "
    "than 0.0001. Along a curve half the reference is reached (`curves.md`).",
    "**Stretching** (trials, not run by this script). Where the group is general linear (queries with keys, values "
    "with outputs) elements stretch as well as turn, and a good part of the gain is theirs: GPT-2, 400 steps of 32, "
    "on the half that options are chosen on, 0.170 with condition numbers up to 4,000; 0.194 where stretching is "
    "drawn back, so that they stay below 60, and 0.219 where they stay at 1; three times as fast 0.196, at 10⁷. So a "
    "long run stretches about as far as one of 400 steps: one of 6400 that went on was not finite after 1555, and for "
    "800 steps it makes no difference (0.155 against 0.154). In bfloat16 nothing is lost at 4,000: B aligned 2.5548 "
    "against 2.5547, the midpoint 2.7269 as in float32.",
    "**Path.** Mixing weights from (0.4, 0.6), the default, serve the middle. On a short text and on few images, 400 "
    "steps of 32 bend the path instead: BERT 1.045 and the ViT 0.185, after 0.844 and 0.101 with 150 steps of 16. On "
    "the whole path (`--lambda-sampling uniform`) the ViT has no barrier left, BERT 0.897.",
    "**Text.** What the models write serves better than a text: 0.213 without one against 0.228 with the text alone "
    "for GPT-2, 0.413 against 0.460 for Llama. So where there is a text they write beside it: 0.210 and 0.412. "
    "(Those rows are of one run, on a busier machine than the others: their seconds compare with each other.)",
    "**What did not help**, on the half that options are chosen on, and not run by this script. Learned, GPT-2: "
    "neurons assigned anew by their activations between rounds (0.234 against 0.229), larger rates of Adam (0.214 "
    "against 0.219), the labels of the text in place of what the models themselves predict (0.36 against 0.25), "
    "mixing weights from (0.2, 0.8) or (0, 1) (0.220, 0.236 against 0.210) or the middle alone (0.215 against 0.215), "
    "the geometric mean of what both models predict as the target for both (0.212 against 0.215, for a quarter more "
    "time). Learned, Llama: straight-through permutations beside the rotations (0.458 against 0.442), steps of 0.12 "
    "(0.428 against 0.425), heads and units assigned anew by their weights after 100 of 400 steps (loss at the "
    "midpoint 2.689 against 2.670). BERT on random tokens (1.87 against 1.12). By weights: unit norms for all weights "
    "(Llama 1.29 to 1.35), the residual stream kept as the vocabularies have it (Llama 1.08 to 1.12, ViT 2.11), "
    "tables doubled (Llama 0.98 to 1.01, ViT 1.94).",
    "**Permutations in place of rotations.** Where the architecture would allow the residual stream to rotate, and it "
    "is only to be permuted, the permutation nearest to the rotation that weight matching finds is where descent "
    "starts: on the half that options are chosen on GPT-2 1.403 against 1.479 from the tables, Llama 1.735, 1.695, "
    "1.757 against 1.803, 1.702, 1.715, ViT 2.095 against 4.225. The fit does not say which start is good: of 21 for "
    "GPT-2 (random orders, noisy tables, the rotation) that from the tables fits best, and their barriers lie between "
    "1.398 and 1.578. For BERT, whose stream may not rotate, rotations all the same are a worse start (1.941 against "
    "1.803).",
)


@dataclass(frozen=True)
class Strategy:
    """A row of the table: how to search, in which group of the residual stream, on what."""

    search: Search | None
    residual: str = "orthogonal"
    heads: str = "two-stage"
    training: bool = False
    seeds: tuple[int, ...] = (0,)
    families: tuple[str, ...] = tuple(HELD_OUT)
    first_pair_alone: bool = False


SHORT, LONG, LONGER = Schedule(steps=150), Schedule(steps=400, rows=32), Schedule(steps=800, rows=32)
LONGEST = Schedule(steps=6400, rows=32)
STRATEGIES = {
    "naive": Strategy(None),
    **{
        f"activation, {residual} residual, {heads} heads": Strategy(
            Search("activation", residual=residual),
            residual=residual,
            heads=heads,
            training=True,
            families=("gpt2", "vit") if heads == "ignore-heads" else tuple(HELD_OUT),
        )
        for residual in ("identity", "first", "last", "all", "separate", "orthogonal")
        for heads in ("two-stage", *(("monotonic", "ignore-heads") if residual in ("all", "orthogonal") else ()))
    },
    "weight, identity residual": Strategy(Search("weight"), residual="identity"),
    "weight, permuted residual": Strategy(Search("weight"), residual="permutation"),
    "weight, orthogonal residual": Strategy(Search("weight")),
    "weight, orthogonal residual, heads by circuits": Strategy(Search("weight", heads="circuits"), heads="circuits"),
    "learned, permutations only": Strategy(
        Search("learned", Schedule(steps=150, order_rate=1e-3)), residual="permutation", training=True, seeds=(0, 1)
    ),
    "learned, 150 steps, identity residual, data": Strategy(
        Search("learned", SHORT), residual="identity", training=True, seeds=(0, 1), families=("bert",)
    ),
    "learned, 150 steps, data": Strategy(Search("learned", SHORT), training=True, seeds=(0, 1)),
    "learned, 150 steps, text alone": Strategy(
        Search("learned", SHORT, own=0), training=True, seeds=(0, 1), families=("gpt2", "llama")
    ),
    "learned, 150 steps, no data": Strategy(Search("learned", SHORT), seeds=(0, 1), families=("bert", "gpt2", "llama")),
    "learned, 400 steps of 32, data": Strategy(
        Search("learned", LONG), training=True, seeds=(0, 1), families=("bert", "vit")
    ),
    "learned, 400 steps of 32, whole path, data": Strategy(
        Search("learned", replace(LONG, lambda_sampling="uniform")),
        training=True,
        seeds=(0, 1),
        families=("bert", "vit"),
    ),
    "learned, 400 steps of 32, no data": Strategy(Search("learned", LONG), seeds=(0, 1), families=("gpt2", "llama")),
    "learned, 800 steps of 32, 2048 sequences, no data": Strategy(
        Search("learned", LONGER, own=2048), seeds=(0, 1), families=("gpt2", "llama")
    ),
    "learned, 6400 steps of 32, 8192 sequences, no data": Strategy(
        Search("learned", LONGEST, own=8192), families=("gpt2", "llama"), first_pair_alone=True
    ),
}
REFERENCE: dict[str, dict[str, float]] = {
    "naive": {"vit": 2.67, "gpt2": 1.78, "llama": 2.25},
    "activation, all residual, two-stage heads": {"vit": 2.42, "gpt2": 1.60, "llama": 1.83},
    "activation, orthogonal residual, two-stage heads": {"vit": 1.15, "gpt2": 0.60, "llama": 1.28},
    "weight, permuted residual": {"vit": 4.92, "gpt2": 1.47, "llama": 1.81},
    "weight, orthogonal residual": {"vit": 1.76, "gpt2": 0.47, "llama": 1.08},
    "learned, permutations only": {"vit": 1.18, "gpt2": 1.23, "llama": 1.63},
    "learned, 150 steps, data": {"vit": 0.175, "gpt2": 0.237, "llama": 0.445},
    "learned, 150 steps, no data": {"gpt2": 0.226, "llama": 0.443},
    "learned, 400 steps of 32, data": {"vit": 0.153},
    "learned, 400 steps of 32, whole path, data": {"vit": 0.153},
    "learned, 400 steps of 32, no data": {"gpt2": 0.199, "llama": 0.379},
}
"""Barriers of a scratch implementation, written by hand for these families, tuned on the same examples."""
REFERENCE_EXAMPLES = 128
LIMITS = {("gpt2", "weight, orthogonal residual"): 0.50, ("llama", "weight, orthogonal residual"): 1.15}


@dataclass(frozen=True)
class Row:
    """One pair, one strategy, one seed."""

    family: str
    strategy: str
    pair: str
    seed: int
    loss_a: float
    loss_b: float
    midpoint: float
    barrier: float
    distance: float
    seconds: float
    losses: list[float] = field(default_factory=list)
    examples: str = "reported"

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        return self.family, self.strategy, self.pair, self.seed, self.examples


def examples(family: str, pair: Pair, which: str) -> Batch:
    """Held-out examples: the half that options are "chosen" on, the half that is "reported", or the "reference"'s."""
    data = load_data(DATA / f"{HELD_OUT[family]}.safetensors", pair.a.folder, pair.config)
    half = len(next(iter(data.values()))) // 2
    first = None if "pixel_values" in data else REFERENCE_EXAMPLES
    part = {"chosen": slice(half), "reported": slice(half, None), "reference": slice(first)}[which]
    return {k: t[part] for k, t in data.items()}


def labels(family: str) -> list[str]:
    """All pairs of models of a family, as they are called in the tables."""
    return [f"{a.name}–{b.name}" for a, b in itertools.combinations(sorted((MODELS / family).iterdir()), 2)]


@functools.cache
def opened(family: str, label: str) -> Pair:
    first, second = (str(MODELS / family / name) for name in label.split("–"))
    return open_pair(first, second)


def measure(family: str, name: str, label: str, seed: int, which: str, points: int) -> Row:
    """Match one pair by one strategy, and walk along the line between its models."""
    strategy, pair = STRATEGIES[name], opened(family, label)
    spec = _spec(pair, strategy)
    match, seconds = matched(family, name, label, seed)
    a, b = aligned(pair, spec, match)
    evaluator = Evaluator(Network(pair.config), examples(family, pair, which))
    path = evaluator.path(a, b, lambdas(points))
    # Over B as it was: a baseline may have ruined it, and would then rise over nothing.
    as_it_was = evaluator.loss({n: pair.b.weights[n] for n in pair.spec.parameters})
    honest = replace(path, losses=(*path.losses[:-1], as_it_was))
    barrier = max(honest.barrier, path.losses[-1] - as_it_was)
    return Row(family, name, label, seed, path.losses[0], path.losses[-1], path.losses[points // 2], barrier,
               math.sqrt(sum(squared_distance(a, b, n) for n in a)), seconds, list(path.losses), which)  # fmt: skip


def aligned(pair: Pair, spec: SymmetrySpec, match: Match | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both models' weights, as they are or in the basis in which they are averaged."""
    raw = (pair.a.weights, pair.b.weights)
    ends = raw if match is None else tuple(
        AlignedWeights(w, spec, e) for w, e in zip(raw, (match.a, match.b), strict=True)
    )  # fmt: skip
    a, b = ({n: w[n] for n in pair.spec.parameters} for w in ends)
    return a, b


@functools.lru_cache(maxsize=1)
def matched(family: str, name: str, label: str, seed: int) -> tuple[Match | None, float]:
    """The match of one pair, and how long it took; kept for the other examples that it is measured on."""
    began = time.process_time()
    match = _match(family, opened(family, label), STRATEGIES[name], seed)
    return match, time.process_time() - began


def _match(family: str, pair: Pair, strategy: Strategy, seed: int) -> Match | None:
    if strategy.search is None:
        return None
    spec = _spec(pair, strategy)
    models = Balanced.of(spec, pair.a.weights, pair.b.weights)
    search = _seeded(strategy.search, seed)
    data = training(family, pair) if strategy.training else None
    (elements,), sweeps = find(models, Network(pair.config), search, data)
    return models.match(elements, sweeps)


def _spec(pair: Pair, strategy: Strategy) -> SymmetrySpec:
    spec = with_heads(with_residual(pair.spec, strategy.residual), strategy.heads)
    return separated(spec, site_order(pair.config, pair.a.weights)) if strategy.residual == "separate" else spec


def _seeded(search: Search, seed: int) -> Search:
    return replace(search, schedule=replace(search.schedule, seed=seed))


def training(family: str, pair: Pair) -> Batch:
    return load_data(DATA / TRAINING[family], pair.a.folder, pair.config)


def three_models(family: str, points: dict[str, Search | None]) -> Iterator[tuple[str, float]]:
    """The loss at the mean of three models."""
    folders = sorted((MODELS / family).iterdir())[:3]
    pair = open_pair(str(folders[0]), str(folders[1]))
    third = open_pair(str(folders[0]), str(folders[2])).b
    raw = [m.weights for m in (pair.a, pair.b, third)]
    evaluator = Evaluator(Network(pair.config), examples(family, pair, "reported"))
    for name, search in points.items():
        if search is None:
            merged: dict[str, Tensor] = {n: sum(w[n] for w in raw) / 3 for n in pair.spec.parameters}  # type: ignore[misc]
        else:
            models = Balanced.of(pair.spec, *raw)
            found, _ = find(models, Network(pair.config), search, None)
            merged = dict(Mean([models.moved(e, i) for i, e in enumerate([{}, *found])]))
        yield name, evaluator.loss({n: t.float() for n, t in merged.items()})


def two_widths(searches: dict[str, Search | None], points: int) -> Iterator[tuple[str, float]]:
    """The barrier between a Llama of width 192 and one of width 128, widened first."""
    pair = open_pair(str(MODELS / "llama-wide" / "3"), str(MODELS / "llama" / "0"))
    evaluator = Evaluator(Network(pair.config), examples("llama", pair, "reported"))
    for name, search in searches.items():
        raw = (pair.a.weights, pair.b.weights)
        if search is not None:
            models = Balanced.of(pair.spec, *raw)
            (elements,), _ = find(models, Network(pair.config), search, None)
            raw = (models.a, models.moved(elements))
        a, b = ({n: w[n].float() for n in pair.spec.parameters} for w in raw)
        yield name, evaluator.path(a, b, lambdas(points)).barrier


def table(rows: list[Row]) -> list[str]:
    lines = ["| family | strategy | pairs, seeds | loss A | loss B | midpoint | barrier | distance | s |",
             "| --- " * 9 + "|"]  # fmt: skip
    order = list(STRATEGIES)
    key = lambda r: (r.family, order.index(r.strategy))  # noqa: E731
    for (family, place), group in itertools.groupby(sorted(rows, key=key), key=key):
        members = list(group)
        losses = summary(members, ("loss_a", "loss_b", "midpoint", "barrier"))
        distances, seconds = (statistics.mean(getattr(r, c) for r in members) for c in ("distance", "seconds"))
        lines.append(f"| {family} | {order[place]} | {losses} | {distances:.1f} | {seconds:.1f} |")
    return lines


def summary(members: Sequence[object], columns: tuple[str, ...]) -> str:
    """How many pairs and seeds, and what each column comes to, as cells of a table."""
    runs = ", ".join(str(len({getattr(r, c) for r in members})) for c in ("pair", "seed"))
    return " | ".join([runs, *(mean_and_error([getattr(r, c) for r in members]) for c in columns)])


def against_reference(rows: list[Row]) -> list[str]:
    lines = ["| strategy | family | barrier | reference |", "| --- " * 4 + "|"]
    found = {(r.strategy, r.family): r.barrier for r in rows}
    for name, values in REFERENCE.items():
        lines += [f"| {name} | {f} | {found[name, f]:.3f} | {v} |" for f, v in values.items() if (name, f) in found]
    return lines


def mean_and_error(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def render(rows: list[Row], three: list[tuple[str, float]], widths: list[tuple[str, float]]) -> str:
    """barriers.md."""
    return "\n".join(
        [
            "# Loss barriers",
            "",
            textwrap.fill(f"{_PREAMBLE} Revision {revision()}.", 118),
            "",
            *table([r for r in rows if r.examples == "reported"]),
            "",
            "## What it shows",
            "",
            *(line for finding in _FINDINGS for line in (textwrap.fill(finding, 118), "")),
            "## On the examples of the reference",
            "",
            textwrap.fill(_REFERENCE_PREAMBLE, 118),
            "",
            *against_reference([r for r in rows if r.examples == "reference"]),
            "",
            "## Three models",
            "",
            "The loss at the mean of the three Llama models, each of which has about 2.33.",
            "",
            *_listed("loss", three),
            "## Two widths",
            "",
            "Barrier between a Llama of width 192 and one of width 128, which is widened first and computes the same.",
            "",
            *_listed("barrier", widths),
        ]
    )


def _listed(what: str, values: list[tuple[str, float]]) -> list[str]:
    return [f"| strategy | {what} |", "| --- | --- |", *(f"| {name} | {value:.3f} |" for name, value in values), ""]


def main(
    points: int = 11,
    output: Path = TABLE,
    family: Annotated[list[str] | None, typer.Option(help="Some families only; nothing is written.")] = None,
    only: Annotated[str, typer.Option(help="Strategies that begin so; nothing is written.")] = "",
    choosing: Annotated[bool, typer.Option(help="On the half that options are chosen on; nothing is written.")] = False,
    results: Annotated[Path, typer.Option(help="Rows so far.")] = Path("out/barriers.jsonl"),
) -> None:
    torch.set_num_threads(1)
    writes = not (family or only or choosing)
    done = {r.key: r for r in map(_row, results.read_text().splitlines())} if results.exists() and not choosing else {}
    rows = []
    for key in _keys(family or list(HELD_OUT), only, "chosen" if choosing else "reported"):
        row = done.get(key)
        if row is None:
            row = measure(*key, points=points)
            if not choosing:
                keep(results, asdict(row))
        rows.append(row)
        typer.echo(f"{' '.join(map(str, key))}: {row.barrier:.3f}, {row.seconds:.1f} s", err=True)
    if writes:
        searches = {"naive": None, "weight": Search("weight"), "learned, no data": Search("learned", SHORT)}
        three, widths = list(three_models("llama", searches)), list(two_widths(searches, points))
        output.write_text(render(rows, three, widths), encoding="utf-8")
    sys.exit(_report_failures(rows))


def keep(results: Path, row: Mapping[str, object]) -> None:
    """Add a row to those that a run which was stopped goes on from."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _row(line: str) -> Row:
    return Row(**json.loads(line))


def _keys(families: list[str], only: str, which: str) -> Iterator[tuple[str, str, str, int, str]]:
    """What to measure: every strategy on every pair with every seed, and what the reference has on its examples."""
    for family in families:
        pairs = labels(family)
        names = [n for n, s in STRATEGIES.items() if n.startswith(only) and family in s.families]
        for label, name in itertools.product(pairs, names):
            if STRATEGIES[name].first_pair_alone and label != pairs[0]:
                continue
            for seed in STRATEGIES[name].seeds:
                yield family, name, label, seed, which
                if which == "reported" and (label, seed) == (pairs[0], 0) and family in REFERENCE.get(name, {}):
                    yield family, name, label, seed, "reference"


def _report_failures(rows: list[Row]) -> int:
    naive = {(r.family, r.pair, r.examples): r.barrier for r in rows if r.strategy == "naive"}
    failures = [r for r in rows if r.barrier > LIMITS.get((r.family, r.strategy), float("inf"))]
    exact = [r for r in rows if "orthogonal" in r.strategy and "ignore-heads" not in r.strategy]
    failures += [r for r in exact if r.barrier > naive.get((r.family, r.pair, r.examples), r.barrier)]
    for row in failures:
        typer.echo(f"limit not met: {row}", err=True)
    return int(bool(failures))


if __name__ == "__main__":
    typer.run(main)
