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
from hf_align.matching.match import Match
from hf_align.matching.weights import match_weights, with_permuted_residual
from hf_align.merging import METHODS
from hf_align.models import Pair, open_pair
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.writing import Output, write

Say = Callable[[str], None]
_NO_STRATEGY = ("max_shard_size", "strict", "trust_remote_code", "overwrite", "drop_cache", "quiet")


@dataclass(frozen=True)
class Options:
    """What to do with a pair; the defaults are the command line's.

    Attributes:
        residual: the group to search for the residual stream, "orthogonal" wherever the spec allows it.
        match: "weight", or "none" for plain averaging.
        weight: of B, from 0 to 1.
        dtype: of the output; that of A by default.
        specs: a folder of reviewed overrides of the derived symmetries.
        drop_cache: take shards from the Hub off the disk as soon as they have been read.
        quiet: no progress bars.
    """

    match: str = "weight"
    residual: str = "orthogonal"
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
        data: held-out examples; with them the report says whether alignment helped.
        say: told what is going on, a line at a time.
        certify: prove the symmetries that are used on a small copy, and put the proof into the model card.
        command: what the card says that the merge was made with.

    Raises:
        HfAlignError: any bad input, before anything is written.
    """
    clock = _Clock()
    certificate = None
    pair = _open(a, b, options, say)
    clock.lap("open")
    if certify and options.match != "none":
        certificate = certified(pair.config, say)
        clock.lap("certify")
    match = find_match(pair, options, say)
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
    if data is not None:
        comparison = compare(pair, options, match, data)
        report.comparison = comparison.as_json()
        report.notes.append(verdict(comparison))
        clock.lap("evaluate")
    facts = {k: v for k, v in report.as_json().items() if k not in ("output", "seconds", "pinned_by_unknown_ops")}
    agreement = cosines(pair, weights_a, weights_b) if data is not None else {}
    document(output, pair, say, command=command, strategy=_strategy(options), agreement=agreement, **facts)
    report.seconds = clock.laps
    return report


def align(a: str, b: str, output: Path, options: Options, say: Say = lambda _: None) -> Report:
    """Write B in A's basis, its function unchanged, and the alignment that took it there."""
    clock = _Clock()
    pair = _open(a, b, options, say)
    clock.lap("open")
    match = find_match(pair, options, say)
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
    return compare(pair, options, find_match(pair, options, say), data, points)


def compare(pair: Pair, options: Options, match: Match | None, data: Path, points: int = 21) -> Comparison:
    """As `evaluate`, for models that are open and matched."""
    evaluator = Evaluator(pair.config, load_data(data, pair.a.folder, pair.config))
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


def find_match(pair: Pair, options: Options, say: Say = lambda _: None) -> Match | None:
    """The alignment that the options ask for; None for none."""
    if options.match == "none":
        return None
    spec = search_spec(pair.spec, options)
    if options.alignment is not None:
        return Match.load(options.alignment, spec)
    return match_weights(spec, pair.a.weights, pair.b.weights,
                         progress=lambda sweep, value: say(f"sweep {sweep}: agreement {value:.6g}"))  # fmt: skip


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
