"""More than two models into one: all in the basis of the first, and their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hf_align.checkpoints.shards import Claim, claimed
from hf_align.devices import Devices
from hf_align.errors import HfAlignError
from hf_align.matching.balanced import Balanced
from hf_align.matching.descent import State
from hf_align.matching.find import find
from hf_align.matching.match import Match
from hf_align.matching.universe import Mean
from hf_align.models import Model, Pair
from hf_align.ondemand import Computed
from hf_align.options import Options
from hf_align.outcome import Report
from hf_align.pipeline import examples, open_models, search_of, search_spec
from hf_align.publishing.card import document
from hf_align.publishing.documenting import certified
from hf_align.publishing.provenance import FOLDER
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Batch
from hf_align.running.offload import network_for
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.writing import Draft, record, reported, write

Say = Callable[[str], None]


@dataclass(frozen=True)
class Several:
    """Models that share an architecture, each opened beside the first."""

    pairs: tuple[Pair, ...]

    @classmethod
    def open(cls, references: Sequence[str], options: Options, say: Say) -> Several:
        """Open all models.

        Raises:
            HfAlignError: as `open_pair`; options that are for two models.
        """
        if options.method != "linear":
            raise HfAlignError(f"--method {options.method} merges two models; more are merged by their mean")
        if options.weight != 0.5:
            raise HfAlignError("--weight is of the second of two models; more have equal shares")
        if options.alignment is not None:
            raise HfAlignError("--alignment is of two models; more are matched anew")
        pairs = tuple(open_models(references[0], other, options, say) for other in references[1:])
        for pair in pairs:
            pair.require_one_size()
        return cls(pairs)

    @property
    def models(self) -> Iterator[Model]:
        """All, the first one first."""
        yield self.pairs[0].a
        yield from (pair.b for pair in self.pairs)

    def record(self, options: Options, examples: Batch | None) -> dict[str, str]:
        """What the result depends on, by name."""
        return {k: v for pair in self.pairs for k, v in record(pair, options.result, examples).items()}


def merge(
    references: Sequence[str],
    output: Path,
    options: Options,
    data: Path | None = None,
    say: Say = lambda _: None,
    *,
    certify: bool = False,
    command: str = "",
) -> Report:
    """Align all models with the first, through a basis that favours none of them, and write their mean.

    Args:
        references: folders or Hub references of three or more models.
        data: examples; with them the report says whether alignment helped. Matching that runs the models takes the
            first half of them, and the report the other.
        say: told what is going on, a line at a time.
        certify: prove the symmetries that are used on a small copy, and put the proof into the model card.
        command: what the card says that the merge was made with.

    Raises:
        HfAlignError: any bad input, before anything is written.
    """
    several = Several.open(references, options, say)
    first = several.pairs[0]
    fit, held_out = examples(first, options, data)
    spec = search_spec(first, options)
    certificate = certified(first.config, options.specs, say) if certify and options.match != "none" else None
    draft = Draft.build(first, first.a, options.dtype, options.max_shard_size)
    made_with = several.record(options, fit) | reported(held_out, certify=certify)
    with claimed(output, made_with, overwrite=options.overwrite) as claim:
        if claim.is_complete:
            say(f"{output} is already complete")
            return Report.again(output)
        claim.require_room(draft.plan)
        matches = _matches(several, spec, claim, options, fit, say)
        aligned = list(_aligned(several, spec, matches, options))
        write(claim, draft, Mean(aligned).__getitem__, say, quiet=options.quiet)
        report = Report(str(output), spec.model_type, untied=first.untied, certificate=certificate)
        if claim.processes.leads:
            _save(matches, output / FOLDER, spec)
            if held_out is not None:
                report.notes.append(_verdict(several, aligned, options, held_out))
            document(output, [m.source for m in several.models], say, command=command, strategy=options.strategy,
                     agreement={}, **report.facts)  # fmt: skip
    return report


def _matches(
    several: Several, spec: SymmetrySpec, claim: Claim, options: Options, fit: Batch | None, say: Say
) -> list[Match]:
    """The match of every model but the first with the first; none under --match none."""
    if options.match == "none":
        return []
    devices = Devices.choose(options.device)
    models = Balanced.of(spec, *(m.weights for m in several.models), processes=claim.processes,
                         device=devices.solving)  # fmt: skip
    search = search_of(options, State(claim.progress, made_of=repr(claim.record)))
    found, sweeps = find(
        models, network_for(several.pairs[0].config, devices.running, options.offload), search, fit, say
    )
    return [models.match(elements, sweeps, i) for i, elements in enumerate(found, start=1)]


def _aligned(
    several: Several, spec: SymmetrySpec, matches: list[Match], options: Options
) -> Iterator[Mapping[str, Tensor]]:
    raw = [m.weights for m in several.models]
    if not matches:
        yield from raw
        return
    device = Devices.choose(options.device).running
    yield AlignedWeights(raw[0], spec, matches[0].a, device)
    for weights, match in zip(raw[1:], matches, strict=True):
        yield AlignedWeights(weights, spec, match.b, device)


def _save(matches: list[Match], folder: Path, spec: SymmetrySpec) -> None:
    folder.mkdir(exist_ok=True)
    for number, match in enumerate(matches, start=1):
        match.save(folder / f"alignment-{number}.safetensors", spec)


def _verdict(several: Several, aligned: Sequence[Mapping[str, Tensor]], options: Options, held_out: Batch) -> str:
    """One honest sentence."""
    first = several.pairs[0]
    network = network_for(first.config, Devices.choose(options.device).running, options.offload)
    evaluator = Evaluator(network, held_out)

    def loss(models: Sequence[Mapping[str, Tensor]]) -> float:
        mean = Mean(models)
        return evaluator.loss(Computed(first.spec.parameters, mean.__getitem__))

    apart = [loss([m.weights]) for m in several.models]
    naive, found = loss([m.weights for m in several.models]), loss(aligned)
    losses = f"the models have losses {min(apart):.3f} to {max(apart):.3f}, their plain mean {naive:.3f}"
    if found < naive:
        return f"aligned, the mean of {len(apart)} models has loss {found:.3f}; {losses}"
    return f"alignment does NOT help here: loss {found:.3f} aligned; {losses}; prefer --match none"
