"""The whole merge, readable in one screen: open, match, plan, write, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_align.documenting import certified, cosines, document
from hf_align.errors import HfAlignError
from hf_align.evaluate import Comparison, Evaluator, lambdas, load_data
from hf_align.matching.balanced import Balanced
from hf_align.matching.find import Search, find
from hf_align.matching.learned import Schedule, State
from hf_align.matching.match import Match
from hf_align.matching.weights import with_permuted_residual
from hf_align.merging import METHODS
from hf_align.models import Pair, open_pair
from hf_align.network import Batch, Network
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.writing import Output, write

Say = Callable[[str], None]
_NO_STRATEGY = ("max_shard_size", "device", "strict", "trust_remote_code", "overwrite", "drop_cache", "quiet")


@dataclass(frozen=True)
class Options:
    """What to do with a pair; the defaults are the command line's.

    Attributes:
        residual: the group to search for the residual stream, "orthogonal" wherever the spec allows it.
        match: "weight", "activation", "learned", or "none" for plain averaging.
        schedule: of learned matching.
        own: sequences that each model writes itself, where matching needs inputs and there is no data.
        device: where models run; an accelerator if there is one.
        weight: of B, from 0 to 1.
        dtype: of the output; that of A by default.
        specs: a folder of reviewed overrides of the derived symmetries.
        drop_cache: take shards from the Hub off the disk as soon as they have been read.
        quiet: no progress bars.
    """

    match: str = "weight"
    residual: str = "orthogonal"
    schedule: Schedule = field(default_factory=Schedule)
    own: int = 512
    device: str | None = None
    untie: bool | None = None
    method: str = "linear"
    weight: float = 0.5
    dtype: torch.dtype | None = None
    max_shard_size: str = "5GB"
    alignment: Path | None = None
    specs: Path | None = None
    strict: bool = False
    trust_remote_code: bool = False
    overwrite: bool = False
    drop_cache: bool = False
    quiet: bool = False


@dataclass
class Report:
    """What happened, for people and for --json."""

    output: str
    model_type: str
    seconds: dict[str, float] = field(default_factory=dict)
    distance_before: float | None = None
    distance_after: float | None = None
    untied: bool = False
    pinned_by_unknown_ops: dict[str, str] = field(default_factory=dict)
    certificate: dict[str, Any] | None = None
    comparison: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def merge(
    a: str,
    b: str,
    output: Path,
    options: Options,
    data: Path | None = None,
    say: Say = lambda _: None,
    *,
    certify: bool = False,
    command: str = "",
) -> Report:
    """Align B with A and write their merge as a checkpoint that `from_pretrained` loads.

    Args:
        a, b: folders or Hub references.
        data: examples; with them the report says whether alignment helped. Matching that runs the models takes the
            first half of them, and the report the other.
        say: told what is going on, a line at a time.
        certify: prove the symmetries that are used on a small copy, and put the proof into the model card.
        command: what the card says that the merge was made with.

    Raises:
        HfAlignError: any bad input, before anything is written.
    """
    clock = _Clock()
    certificate = None
    pair = _open(a, b, options, say)
    fit, held_out = examples(pair, options, data)
    clock.lap("open")
    if certify and options.match != "none":
        certificate = certified(pair.config, options.specs, say)
        clock.lap("certify")
    match = find_match(pair, options, fit, say, state=output)
    clock.lap("match")
    weights_a, weights_b = aligned_weights(pair, options, match)
    mix = METHODS[options.method]
    report = _report(output, pair, match)
    report.certificate = certificate

    def produce(name: str) -> Tensor:
        return mix(weights_a[name], weights_b[name], options.weight)

    write(output, pair, pair.a, produce, _output(options), say)
    if match is not None:
        (output / "hf-align").mkdir(exist_ok=True)
        match.save(output / "hf-align" / "alignment.safetensors", search_spec(pair.spec, options))
    clock.lap("write")
    if held_out is not None:
        comparison = compare(pair, options, match, held_out)
        report.comparison = comparison.as_json()
        report.notes.append(verdict(comparison))
        clock.lap("evaluate")
    facts = {k: v for k, v in report.as_json().items() if k not in ("output", "seconds", "pinned_by_unknown_ops")}
    agreement = cosines(pair, weights_a, weights_b) if held_out is not None else {}
    document(output, pair, say, command=command, strategy=_strategy(options), agreement=agreement, **facts)
    report.seconds = clock.laps
    return report


def align(
    a: str, b: str, output: Path, options: Options, data: Path | None = None, say: Say = lambda _: None
) -> Report:
    """Write B in A's basis, its function unchanged, and the alignment that took it there."""
    clock = _Clock()
    pair = _open(a, b, options, say)
    clock.lap("open")
    fit, _ = examples(pair, options, data)
    match = find_match(pair, options, fit, say, state=output)
    if match is None:
        raise HfAlignError("align needs a matching; --match none leaves B as it is")
    clock.lap("match")
    weights = AlignedWeights(pair.b.weights, pair.spec, match.b)
    write(output, pair, pair.b, weights.__getitem__, _output(options), say)
    match.save(output / "alignment.safetensors", search_spec(pair.spec, options))
    clock.lap("write")
    report = _report(output, pair, match)
    report.seconds = clock.laps
    return report


def evaluate(a: str, b: str, data: Path, options: Options, points: int = 21, say: Say = lambda _: None) -> Comparison:
    """Losses along the line between A and B, as they are and aligned."""
    pair = _open(a, b, options, say)
    fit, held_out = examples(pair, options, data)
    assert held_out is not None
    return compare(pair, options, find_match(pair, options, fit, say), held_out, points)


def examples(pair: Pair, options: Options, data: Path | None) -> tuple[Batch | None, Batch | None]:
    """What to match on, and what to report on: halves of the data, or all of it where matching runs no model.

    Raises:
        HfAlignError: the data cannot be read, or one example cannot be halved.
    """
    if data is None:
        return None, None
    everything = load_data(data, pair.a.folder, pair.config)
    if options.match not in ("activation", "learned"):
        return None, everything
    half = len(next(iter(everything.values()))) // 2
    if not half:
        raise HfAlignError(
            f"{data} holds one example; --match {options.match} needs some to match on, others to report"
        )
    return {k: t[:half] for k, t in everything.items()}, {k: t[half:] for k, t in everything.items()}


def compare(pair: Pair, options: Options, match: Match | None, held_out: Batch, points: int = 21) -> Comparison:
    """As `evaluate`, for models that are open and matched."""
    evaluator = Evaluator(pair.config, held_out, device_of(options))
    names = list(pair.spec.parameters)
    raw_a, raw_b = ({n: m.weights[n] for n in names} for m in (pair.a, pair.b))
    moved_a, moved_b = ({n: w[n] for n in names} for w in aligned_weights(pair, options, match))
    with tqdm(total=2 * points, desc="evaluating", unit="loss", disable=options.quiet) as bar:
        naive = evaluator.path(raw_a, raw_b, lambdas(points), bar.update)
        return Comparison(naive, evaluator.path(moved_a, moved_b, lambdas(points), bar.update))


def verdict(comparison: Comparison) -> str:
    """One honest sentence."""
    naive, aligned = comparison.naive.barrier, comparison.aligned.barrier
    if comparison.helps:
        return f"alignment lowers the barrier from {naive:.3f} to {aligned:.3f}"
    return f"alignment does NOT help here: barrier {aligned:.3f} aligned, {naive:.3f} without; prefer --match none"


def find_match(
    pair: Pair,
    options: Options,
    fit: Batch | None = None,
    say: Say = lambda _: None,
    *,
    state: Path | None = None,
) -> Match | None:
    """The alignment that the options ask for; None for none.

    Args:
        fit: examples to match on; without them the models' own inputs are used.
        state: the output folder, in which learned matching keeps how far it got.
    """
    if options.match == "none":
        return None
    spec = search_spec(pair.spec, options)
    if options.alignment is not None:
        return Match.load(options.alignment, spec)
    models = Balanced.of(spec, pair.a.weights, pair.b.weights)
    search = Search(
        options.match,
        options.schedule,
        own=options.own,
        state=None if state is None else State(state / ".hf-align" / "learned.pt", _made_of(pair, options)),
        quiet=options.quiet,
    )
    return models.match(*find(models, Network(pair.config, device_of(options)), search, fit, say))


def device_of(options: Options) -> str:
    """Where models run: as asked, else the accelerator, else the CPU."""
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _made_of(pair: Pair, options: Options) -> str:
    """What a resumed search must share with the one that was killed."""
    return f"{pair.a.checkpoint.identity} {pair.b.checkpoint.identity} {options!r}"


def search_spec(spec: SymmetrySpec, options: Options) -> SymmetrySpec:
    """The spec with the groups that the options allow."""
    return with_permuted_residual(spec) if options.residual == "permutation" else spec


def aligned_weights(
    pair: Pair, options: Options, match: Match | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Both models' weights in the common basis, tensor by tensor."""
    if match is None:
        return pair.a.weights, pair.b.weights
    spec = search_spec(pair.spec, options)
    return AlignedWeights(pair.a.weights, spec, match.a), AlignedWeights(pair.b.weights, spec, match.b)


def _open(a: str, b: str, options: Options, say: Say) -> Pair:
    pair = open_pair(a, b, untie=options.untie, specs=options.specs, trust_remote_code=options.trust_remote_code,
                     drop_cache=options.drop_cache)  # fmt: skip
    if pair.untied:
        say("the head is untied (tie_word_embeddings: false): tied to the embedding it pins the residual basis")
    if pair.spec.unknown_ops:
        ops = ", ".join(sorted(pair.spec.unknown_ops))
        if options.strict:
            raise HfAlignError(f"no rule for {ops}; without --strict what they touch is pinned")
        say(f"no rule for {ops}: what they touch is pinned")
    return pair


def _strategy(options: Options) -> dict[str, Any]:
    """The options that the weights depend on, without paths."""
    chosen = {k: v for k, v in asdict(options).items() if k not in _NO_STRATEGY and v is not None}
    schedule, own = chosen.pop("schedule"), chosen.pop("own")
    chosen |= schedule if options.match == "learned" else {}
    chosen |= {"own": own} if options.match in ("activation", "learned") else {}
    return {k: v.name if isinstance(v, Path) else v if isinstance(v, str | bool | float) else str(v)
            for k, v in chosen.items()}  # fmt: skip


def _output(options: Options) -> Output:
    return Output(options.dtype, options.max_shard_size, options.overwrite, options.quiet, made_with=repr(options))


def _report(output: Path, pair: Pair, match: Match | None) -> Report:
    report = Report(str(output), pair.spec.model_type, untied=pair.untied,
                    pinned_by_unknown_ops=dict(pair.spec.unknown_ops))  # fmt: skip
    if match is not None:
        report.distance_before, report.distance_after = match.before, match.after
    return report


class _Clock:
    """Wall seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 3)
        self._last = now
