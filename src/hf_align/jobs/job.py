"""The one way to write a model: claim, match, witness, weights, documents, complete."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hf_align.checkpoints.claim import Claim, claimed
from hf_align.checkpoints.companions import write_companions
from hf_align.checkpoints.hub import Source
from hf_align.checkpoints.plan import ShardPlan
from hf_align.checkpoints.shards import Source as Entries
from hf_align.checkpoints.shards import write_with_bar
from hf_align.jobs.outcome import Report
from hf_align.publishing.card import document
from hf_align.settings.options import Options

if TYPE_CHECKING:
    from hf_align.witness.witness import Moved

Say = Callable[[str], None]
M = TypeVar("M")
"""What a job finds when it matches."""


def silent(_: str) -> None:
    """Says nothing."""


class Clock:
    """Wall seconds between laps, the first one from when it was made."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 3)
        self._last = now


@dataclass(frozen=True)
class Draft:
    """What is going to be written, known from headers alone.

    Attributes:
        plan: which tensor goes into which file.
        like: the folder whose config, tokenizer and code go with the weights.
        changed: entries of the config that become others.
        where: what is said of the tensors besides their number.
    """

    plan: ShardPlan
    like: Path
    changed: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def write(self, claim: Claim, entries: Entries, say: Say, *, quiet: bool) -> None:
        """Write every tensor, and what goes with the weights.

        Raises:
            OutputError, CheckpointError: as `write_shards`.
        """
        say(f"writing {sum(len(s.tensors) for s in self.plan.shards)} tensors{self.where} to {claim.folder}")
        write_with_bar(claim, self.plan, entries, quiet=quiet)
        if claim.processes.leads:
            write_companions(claim.documents, self.like, self.changed, say)


@dataclass(frozen=True)
class Asked:
    """What a caller wants, of any job.

    Attributes:
        data: examples; what runs the models, be it to match or to merge, takes the first half of them.
        say: told what is going on, a line at a time.
        command: what the card says that the model was made with.
        clock: runs from now on.
    """

    options: Options
    data: Path | None = None
    say: Say = silent
    command: str = ""
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True, kw_only=True)
class Job(ABC, Generic[M]):
    """What a command writes, and of what. Whatever can be wrong with it is found when it is made, before it is run.

    Attributes:
        sources: the models that go in, in order.
        record: what the result depends on, in order: a run goes on only with what one of the same record wrote.
        draft: what is written; None where another program decides that.
        least: bytes that are written at least, where there is no draft.
        chosen: what the card says besides the options of how the models were merged.
    """

    asked: Asked
    sources: Sequence[Source]
    record: Mapping[str, str]
    draft: Draft | None = None
    least: int = 0
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> Options:
        return self.asked.options

    @property
    def strategy(self) -> Mapping[str, Any]:
        """How the models are merged, for the card; only the second of two models has a weight of its own."""
        asked = {k: v for k, v in self.options.strategy.items() if k != "weight" or len(self.sources) == 2}
        return {**asked, **self.chosen}

    @property
    def reads(self) -> list[Path]:
        """Files and folders that are read, and never written to."""
        data = [] if self.asked.data is None else [self.asked.data]
        return [*(path for source in self.sources for path in source.reads), *self.options.reads, *data]

    @abstractmethod
    def match(self, claim: Claim) -> M:
        """What takes the models into one basis, kept for the run that goes on if this one is killed; None for none."""

    def moved(self, match: M) -> list[Moved]:
        """Models that the witness sees, as they were and as they will be."""
        return []

    def entries(self, claim: Claim, match: M) -> Entries:
        """The weights, for all jobs with a draft."""
        raise NotImplementedError

    def write(self, claim: Claim, match: M) -> None:
        """Write the weights, and what goes with them."""
        assert self.draft is not None
        self.draft.write(claim, self.entries(claim, match), self.asked.say, quiet=self.options.quiet)

    @abstractmethod
    def report(self, output: Path, match: M) -> Report:
        """What there is to say of the result, but for the witness and for what is measured on data."""

    def document(self, claim: Claim, match: M, report: Report) -> None:
        """Write all that is said of the result beside it, in the process that leads."""
        document(claim.documents, self.sources, self.asked.say, command=self.asked.command, strategy=self.strategy,
                 held_out=self.asked.data is not None, **report.facts)  # fmt: skip

    def again(self, output: Path) -> Report:
        """What was said of the result by the run that completed it."""
        return Report.again(output)


def run(job: Job[M], output: Path) -> Report:
    """Write a model; an interrupted run resumes where it stopped, and one that was completed is left as it is.

    Raises:
        HfAlignError: the output is not the job's to write to, or what is found while it is computed.
    """
    clock, seen = job.asked.clock, None
    with claimed(output, job.record, reads=job.reads, overwrite=job.options.overwrite) as claim:
        if claim.is_complete:
            return job.again(output)
        if job.draft is not None:
            claim.require_room(job.draft.plan)
        claim.require_bytes(job.least - sum(claim.ours.values()))
        if (match := job.match(claim)) is not None:
            clock.lap("match")
            from hf_align.jobs.witnessing import witnessed_once  # loads modelling code: a plain merge has no match

            seen = witnessed_once(claim, job.moved(match), job.options)
            clock.lap("witness")
        job.write(claim, match)
        clock.lap("write")
        report = job.report(output, match)
        report.witness = seen
        if claim.processes.leads:
            job.document(claim, match, report)
    report.seconds = clock.laps
    return report
