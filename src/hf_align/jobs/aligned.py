"""What jobs on models that are opened, matched and witnessed have in common, and the job of `align`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.shards import Source as Entries
from hf_align.checkpoints.token_ids import renamed_tokens
from hf_align.jobs.job import Asked, Draft, Job
from hf_align.jobs.opened import Basis, Opened, not_seen
from hf_align.jobs.outcome import Report
from hf_align.jobs.read_beside import require_answers_alone
from hf_align.jobs.witnessing import moved_model, note, said_in
from hf_align.jobs.writing import as_written, draft_of, entries_of, record
from hf_align.matching.match import Match, of_others
from hf_align.publishing.provenance import ALIGNMENT, FOLDER
from hf_align.running.network import Batch, Weights
from hf_align.witness.witness import Moved

B = TypeVar("B", bound=Basis)


def save_matches(folder: Path, basis: Basis) -> None:
    """Leave what took the models into one basis beside their merge."""
    (folder / FOLDER).mkdir(exist_ok=True)
    for number, found in enumerate(basis.matches, start=1):
        name = ALIGNMENT if len(basis.matches) == 1 else f"alignment-{number}.safetensors"
        found.save(folder / FOLDER / name, basis.models.spec)


@dataclass(frozen=True, kw_only=True)
class OpenedJob(Job[B]):
    """A job on models that are opened before anything is written.

    Attributes:
        fit: examples that models are run on to match or to merge.
        held_out: examples to report on.
    """

    draft: Draft
    models: Opened
    fit: Batch | None = None
    held_out: Batch | None = None

    def moved(self, match: B) -> list[Moved]:
        return match.moved()

    def read_back(self, made: Weights) -> Weights:
        """A result with the rounding of its files, which all that is said of it is measured on."""
        return as_written(self.models.first.layout(self.models.first.a), self.options, made)

    def report(self, output: Path, match: B) -> Report:
        """Of any models, and of two that were matched."""
        first, options, matches = self.models.first, self.options, match.matches
        report = Report(str(output), first.spec.model_type, untied=first.untied,
                        pinned_by_unknown_ops=dict(first.spec.unknown_ops))  # fmt: skip
        report.notes += [f"{m.source.name} {change}" for m in self.models.models for change in m.changes]
        report.notes += [doubt for source in self.models.sources for doubt in source.doubts]
        for model in self.models.models[1:]:
            if model.respelled is None:
                report.notes += renamed_tokens([self.models.sources[0].folder, model.source.folder])
        report.notes += not_seen(first.spec) if matches else ()
        if len(matches) == 1:
            report.distance_before, report.distance_after = matches[0].before, matches[0].after
            report.notes += of_others(self.models.given or matches[0], matches[0])
        if options.changes_function:
            report.notes.append("--allow-inexact: B's function is NOT preserved")
        return report


@dataclass(frozen=True, kw_only=True)
class Align(OpenedJob[Basis]):
    """B in A's basis, its function unchanged, and the alignment that took it there."""

    @classmethod
    def open(cls, a: str, b: str, asked: Asked) -> Align:
        """Open both models."""
        options = asked.options
        models = Opened.open({"A": a, "B": b}, options, asked.say)
        pair = models.first
        require_answers_alone(pair.b, models.spec)
        fit, _ = models.examples(asked.data, reporting=False)
        if asked.data is not None and fit is None:
            asked.say(f"--data is not used: --match {options.match} compares weights alone")
        asked.clock.lap("open")
        return cls(asked=asked, sources=models.sources, record=record({"the command": "align"}, models, fit),
                   draft=draft_of(pair, pair.layout(pair.b), options), models=models, fit=fit)  # fmt: skip

    def match(self, claim: Claim) -> Basis:
        return self.models.match(claim, self.fit, self.asked.say)

    def moved(self, match: Basis) -> list[Moved]:
        pair, (found,) = self.models.first, match.matches
        like = pair.layout(pair.b)
        return [moved_model("B", pair.b, pair, self.models.spec, found.b, like, self.options, match.aligned[1])]

    def entries(self, claim: Claim, match: Basis) -> Entries:
        pair = self.models.first
        return entries_of(pair, pair.layout(pair.b), self.options, match.weights[1].__getitem__)

    def document(self, claim: Claim, match: Basis, report: Report) -> None:
        match.matches[0].save(claim.documents / ALIGNMENT, self.models.spec)
        note(claim.documents, report.witness)

    def again(self, output: Path) -> Report:
        made = Basis(self.models, [Match.load(output / ALIGNMENT, self.models.spec)])
        return replace(self.report(output, made), witness=said_in(output))
