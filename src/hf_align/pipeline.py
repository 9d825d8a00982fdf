"""The whole merge, readable in one screen: open, match, plan, write, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from huggingface_hub.utils import tqdm
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_align import plain
from hf_align.checkpoints.shards import Claim, claimed
from hf_align.devices import Devices
from hf_align.errors import HfAlignError
from hf_align.matching.activations import correlations
from hf_align.matching.balanced import Balanced
from hf_align.matching.choices import BASELINES, BY_SITE, as_chosen, separated
from hf_align.matching.descent import State
from hf_align.matching.find import Search, find, searching, site_order, towards
from hf_align.matching.match import Match
from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.curve import along, learn_curve
from hf_align.merging.methods import CURVE, FROM_SAMPLES, FROM_WEIGHTS, INEXACT, RUNNING
from hf_align.merging.samples import Samples
from hf_align.models import Pair, open_pair
from hf_align.ondemand import Computed
from hf_align.options import Options
from hf_align.outcome import Report
from hf_align.processes import ALONE, Processes
from hf_align.progress import waiting
from hf_align.publishing.card import document
from hf_align.publishing.documenting import certified, cosines
from hf_align.publishing.provenance import FOLDER
from hf_align.running.data import load_data
from hf_align.running.evaluate import Comparison, Evaluator, lambdas
from hf_align.running.network import Batch, Network
from hf_align.running.offload import network_for
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.writing import Draft, record, reported, write

Say = Callable[[str], None]
_ALIGNMENT, _BENDS = "alignment.safetensors", "bends.safetensors"
_FEATURE_ROWS = 64
"""Examples on which features are compared."""


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
        data: examples; with them the report says whether alignment helped. What runs the models, be it to match or to
            merge, takes the first half of them, and the report the other.
        say: told what is going on, a line at a time.
        certify: prove the symmetries that are used on a small copy, and put the proof into the model card.
        command: what the card says that the merge was made with.

    Raises:
        HfAlignError: any bad input, before anything is written.
    """
    if options.match == "none" and data is None:
        report = plain.merge(a, b, output, options, say, command=command)
        if report is not None:
            return report
    clock = _Clock()
    certificate = None
    pair = open_models(a, b, options, say)
    fit, held_out = examples(pair, options, data)
    clock.lap("open")
    if certify and options.match != "none":
        certificate = certified(pair.config, options.specs, say)
        clock.lap("certify")
    draft = Draft.build(pair, pair.layout(pair.a), options.dtype, options.max_shard_size)
    made_with = options.result | reported(held_out, certify=certify)
    with claimed(output, record(pair, made_with, fit), overwrite=options.overwrite) as claim:
        if claim.is_complete:
            say(f"{output} is already complete")
            return Report.again(output)
        claim.require_room(draft.plan)
        match = _match_once(claim, pair, options, fit, say)
        clock.lap("match")
        if options.drop_cache:  # not before: matching reads every shard many times
            pair.drop_when_read()
        mix = merger(pair, options, match, fit, say, claim)
        write(claim, draft, lambda name: mix(name, options.weight), say, quiet=options.quiet)
        clock.lap("write")
        report = _report(output, pair, options, match)
        report.certificate = certificate
        if claim.processes.leads:
            if match is not None:
                (output / FOLDER).mkdir(exist_ok=True)
                match.save(output / FOLDER / _ALIGNMENT, search_spec(pair, options))
            if held_out is not None:
                _judge(report, pair, options, match, mix, held_out)
                clock.lap("evaluate")
            agreement = cosines(pair, *aligned_weights(pair, options, match)) if data is not None else {}
            document(output, (pair.a.source, pair.b.source), say, command=command, strategy=options.strategy,
                     agreement=agreement, **report.facts)  # fmt: skip
    report.seconds = clock.laps
    return report


def align(
    a: str, b: str, output: Path, options: Options, data: Path | None = None, say: Say = lambda _: None
) -> Report:
    """Write B in A's basis, its function unchanged, and the alignment that took it there."""
    clock = _Clock()
    pair = open_models(a, b, options, say)
    fit, _ = examples(pair, options, data)
    clock.lap("open")
    draft = Draft.build(pair, pair.layout(pair.b), options.dtype, options.max_shard_size)
    with claimed(output, record(pair, options.result, fit), overwrite=options.overwrite) as claim:
        if claim.is_complete:
            say(f"{output} is already complete")
            return _report(output, pair, options, Match.load(output / _ALIGNMENT, search_spec(pair, options)))
        claim.require_room(draft.plan)
        match = _match_once(claim, pair, options, fit, say)
        if match is None:
            raise HfAlignError("align needs a matching; --match none leaves B as it is")
        clock.lap("match")
        weights = AlignedWeights(
            pair.b.weights, search_spec(pair, options), match.b, Devices.choose(options.device).running
        )
        write(claim, draft, weights.__getitem__, say, quiet=options.quiet)
        if claim.processes.leads:
            match.save(output / _ALIGNMENT, search_spec(pair, options))
    clock.lap("write")
    report = _report(output, pair, options, match)
    report.seconds = clock.laps
    return report


def evaluate(a: str, b: str, data: Path, options: Options, points: int = 21, say: Say = lambda _: None) -> Comparison:
    """Losses along the line between A and B, as they are and aligned."""
    pair = open_models(a, b, options, say)
    fit, held_out = examples(pair, options, data)
    assert held_out is not None
    return compare(pair, options, find_match(pair, options, fit, say), held_out, points)


def examples(pair: Pair, options: Options, data: Path | None) -> tuple[Batch | None, Batch | None]:
    """What to match and merge on, and what to report on: halves of the data, or all of it where neither runs a model.

    Raises:
        HfAlignError: the data cannot be read, or one example cannot be halved.
    """
    if data is None:
        return None, None
    everything = load_data(data, pair.a.folder, pair.config)
    running = [f"--match {options.match}"] if options.match in ("activation", "learned") else []
    running += [f"--method {options.method}"] if options.method in RUNNING else []
    if not running:
        return None, everything
    if not everything.keys() & {"labels", "input_ids"}:  # nothing to report on
        return everything, None
    half = len(next(iter(everything.values()))) // 2
    if not half:
        raise HfAlignError(f"{data} holds one example; {running[0]} needs some to run on, others to report")
    return {k: t[:half] for k, t in everything.items()}, {k: t[half:] for k, t in everything.items()}


def compare(pair: Pair, options: Options, match: Match | None, held_out: Batch, points: int = 21) -> Comparison:
    """As `evaluate`, for models that are open and matched."""
    network = _network(pair, options)
    evaluator = Evaluator(network, held_out)
    ends = (pair.a.weights, pair.b.weights, *aligned_weights(pair, options, match))
    raw_a, raw_b, moved_a, moved_b = (network.placed(Computed(pair.spec.parameters, w.__getitem__)) for w in ends)
    with tqdm(total=2 * points, desc="evaluating", unit="loss", disable=options.quiet) as bar:
        naive = evaluator.path(raw_a, raw_b, lambdas(points), bar.update)
        aligned = evaluator.path(moved_a, moved_b, lambdas(points), bar.update)
    rows = {k: t[:_FEATURE_ROWS] for k, t in evaluator.data.items()}
    before, after = (correlations(evaluator.network, *ends, rows) for ends in ((raw_a, raw_b), (moved_a, moved_b)))
    return Comparison(naive, aligned, {name: (before[name], after[name]) for name in before})


def merger(pair: Pair, options: Options, match: Match | None, fit: Batch | None, say: Say, claim: Claim) -> Mix:
    """The merge that the options ask for, tensor by tensor.

    Args:
        fit: examples to run the models on, for methods that do; without them the models' own inputs are used.
        claim: where a method that takes long keeps how far it got.
    """
    models = Aligned(search_spec(pair, options), *aligned_weights(pair, options, match))
    if options.method in INEXACT:
        say(f"--method {options.method} mixes units by maps that are no symmetries: B's function is not kept")
    if options.method == CURVE:
        return along(models, _curve_once(claim, pair, options, models, fit, say))
    if options.method in FROM_WEIGHTS:
        return FROM_WEIGHTS[options.method](models)
    network = _network(pair, options)
    return FROM_SAMPLES[options.method](models, Samples.of(models, network, fit, say))


def against_the_mean(pair: Pair, options: Options, match: Match | None, mix: Mix, held_out: Batch) -> str:
    """One honest sentence on a method that is not the mean."""
    evaluator, names = Evaluator(_network(pair, options), held_out), pair.spec.parameters
    a, b = aligned_weights(pair, options, match)
    found = evaluator.loss(Computed(names, lambda n: mix(n, options.weight).float()))
    mean = evaluator.loss(Computed(names, lambda n: torch.lerp(a[n].float(), b[n].float(), options.weight)))
    if found < mean:
        return f"{options.method} merges to a loss of {found:.3f}, the plain mean to {mean:.3f}"
    return f"{options.method} does NOT help here: loss {found:.3f}, of the plain mean {mean:.3f}; prefer linear"


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
    state: State | None = None,
    processes: Processes = ALONE,
) -> Match | None:
    """The alignment that the options ask for; None for none.

    Args:
        fit: examples to match on; without them the models' own inputs are used.
        state: where learned matching keeps how far it got.
        processes: that look for it together.
    """
    if options.match == "none":
        return None
    spec = search_spec(pair, options)
    if options.alignment is not None:
        return Match.load(options.alignment, spec)
    devices = Devices.choose(options.device)
    with waiting("matching", quiet=options.quiet):
        models = Balanced.of(spec, pair.a.weights, pair.b.weights, processes=processes, device=devices.solving)
        (elements,), sweeps = find(models, _network(pair, options), search_of(options, state), fit, say)
        return models.match(elements, sweeps)


def _network(pair: Pair, options: Options) -> Network:
    return network_for(pair.config, Devices.choose(options.device).running, options.offload)


def search_of(options: Options, state: State | None) -> Search:
    """How the options look for a match; `state` is where learned matching keeps how far it got."""
    return Search(options.match, options.schedule, residual=options.residual, heads=options.heads, own=options.own,
                  state=state, quiet=options.quiet)  # fmt: skip


def search_spec(pair: Pair, options: Options) -> SymmetrySpec:
    """The spec with the groups and spaces that the options choose.

    Raises:
        HfAlignError: a choice that changes B's function, without `baseline`.
    """
    if (chosen := {options.residual, options.heads} & BASELINES) and not options.baseline:
        raise HfAlignError(f"{chosen.pop()} changes B's function; it is there to compare with, under --baseline")
    if options.residual in BY_SITE and options.match != "activation":
        raise HfAlignError(f"--residual {options.residual} chooses among features; it needs --match activation")
    spec = as_chosen(pair.spec, options.residual, options.heads, options.spaces)
    return separated(spec, site_order(pair.config, pair.a.weights)) if options.residual == "separate" else spec


def aligned_weights(
    pair: Pair, options: Options, match: Match | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Both models' weights in the common basis, tensor by tensor."""
    if match is None:
        return pair.a.weights, pair.b.weights
    spec = search_spec(pair, options)
    device = Devices.choose(options.device).running
    a, b = pair.a.weights, pair.b.weights
    return AlignedWeights(a, spec, match.a, device), AlignedWeights(b, spec, match.b, device)


def open_models(a: str, b: str, options: Options, say: Say) -> Pair:
    """Two models, and what must be said of their architecture before anything is done.

    Raises:
        HfAlignError: as `open_pair`; an op without a rule under --strict.
    """
    pair = open_pair(a, b, untie=options.untie, specs=options.specs, trust_remote_code=options.trust_remote_code)
    for model in (pair.a, pair.b):
        if model.widened is not None:
            say(model.widened)
    if pair.untied:
        say("the head is untied (tie_word_embeddings: false): tied to the embedding it pins the residual basis")
    if pair.spec.unknown_ops:
        ops = ", ".join(sorted(pair.spec.unknown_ops))
        if options.strict:
            raise HfAlignError(f"no rule for {ops}; without --strict what they touch is pinned")
        say(f"no rule for {ops}: what they touch is pinned")
    return pair


def _match_once(claim: Claim, pair: Pair, options: Options, fit: Batch | None, say: Say) -> Match | None:
    """The alignment; that of a run with the same inputs and options that was killed while it wrote is used again."""
    if options.match == "none":
        return None
    spec, name, processes = search_spec(pair, options), _ALIGNMENT, claim.processes
    with processes.together():
        kept = claim.kept(name)
    with processes.together():  # all have looked before one is kept
        if kept is not None:
            return Match.load(kept, spec)
        state = State(claim.progress, made_of=repr(claim.record))
        match = find_match(pair, options, fit, say, state=state, processes=processes)
        if match is not None and processes.leads:
            claim.keep(name, partial(match.save, spec=spec))
    return match


def _curve_once(
    claim: Claim, pair: Pair, options: Options, models: Aligned, fit: Batch | None, say: Say
) -> Mapping[str, Tensor]:
    """How far the weights leave the line; what a run with the same inputs and options has learned is used again."""
    with claim.processes.together():
        if claim.processes.leads and claim.kept(_BENDS) is None:
            state = State(claim.progress, made_of=f"curve {claim.record!r}")
            claim.keep(_BENDS, partial(save_file, _bends(pair, options, models, fit, say, state)))
    path = claim.kept(_BENDS)
    assert path is not None
    return load_file(path)


def _bends(
    pair: Pair, options: Options, models: Aligned, fit: Batch | None, say: Say, state: State
) -> dict[str, Tensor]:
    network = _network(pair, options)
    network.must_hold("--method curve holds both models in memory")
    a, b = (network.placed(Computed(pair.spec.parameters, w.__getitem__)) for w in (models.a, models.b))
    search = search_of(options, None)
    unlabelled = None if fit is None else {k: t for k, t in fit.items() if k != "labels"}
    objective = towards((a, b), network, search, unlabelled, say)
    with searching(search, "learning the curve") as progress:
        return learn_curve(a, b, network, objective, search.schedule, state=state, progress=progress)


def _judge(report: Report, pair: Pair, options: Options, match: Match | None, mix: Mix, held_out: Batch) -> None:
    """Add to the report whether alignment, and the method, helped."""
    comparison = compare(pair, options, match, held_out)
    report.comparison = comparison.as_json()
    report.notes.append(verdict(comparison))
    if options.method != "linear":
        report.notes.append(against_the_mean(pair, options, match, mix, held_out))


def _report(output: Path, pair: Pair, options: Options, match: Match | None) -> Report:
    report = Report(str(output), pair.spec.model_type, untied=pair.untied,
                    pinned_by_unknown_ops=dict(pair.spec.unknown_ops))  # fmt: skip
    report.notes += [m.widened for m in (pair.a, pair.b) if m.widened is not None]
    if match is not None:
        report.distance_before, report.distance_after = match.before, match.after
    if options.baseline and {options.residual, options.heads} & BASELINES:
        report.notes.append("a baseline: B's function is NOT preserved")
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
