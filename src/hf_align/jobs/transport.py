"""The job of `transport`: fine-tunes of one base or of several, carried to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.shards import Source as Entries
from hf_align.errors import HfAlignError
from hf_align.jobs.aligned import OpenedJob, save_matches
from hf_align.jobs.descending import distil_once
from hf_align.jobs.job import Asked
from hf_align.jobs.kept_weights import KeptWeights
from hf_align.jobs.opened import Basis, Opened
from hf_align.jobs.outcome import Report
from hf_align.jobs.writing import draft_of, entries_of, record, reported_on
from hf_align.matching.objectives import Objective
from hf_align.merging.distil import Limits
from hf_align.merging.fits import spectrum_of
from hf_align.merging.methods import DISTIL, REGRESSION
from hf_align.merging.regression import Regressed
from hf_align.merging.transport import LENGTH, Carried, Change, descent_towards, samples_of
from hf_align.running.data import with_labels
from hf_align.running.evaluate import Evaluator
from hf_align.running.generate import own_inputs, writes
from hf_align.running.network import Batch, Weights
from hf_align.runtime.progress import waiting
from hf_align.tracing.build import build_without_weights
from hf_align.witness.witness import Moved

_WRITTEN = 64
"""Sequences of B's that it is measured on what the result kept."""


@dataclass(frozen=True)
class Tuned:
    """A fine-tune and what it was tuned from, as the user called them.

    Attributes:
        strength: how much of the change is carried over.
    """

    finetuned: str
    base: str
    strength: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Transport(OpenedJob[Basis]):
    """B with what fine-tunes learned on their bases.

    Attributes:
        tuned: they; the models are B, the different bases, and the fine-tunes.
        keep: examples that B writes for each of the others.
    """

    tuned: Sequence[Tuned]
    keep: float

    @classmethod
    def open(cls, tuned: Sequence[Tuned], onto: str, asked: Asked, *, keep: float) -> Transport:
        """Open all models."""
        options, several = asked.options, len(tuned) > 1
        if several and asked.data is not None:
            raise HfAlignError("data is what one fine-tune was trained on; of several, each writes its own")
        named = {"onto": onto}
        named |= {f"base {i}" if i else "base": base for i, base in enumerate(_bases(tuned))}
        named |= {f"finetuned {i}" if i else "finetuned": each.finetuned for i, each in enumerate(tuned)}
        models = Opened.open(named, options, asked.say, jointly=False)
        pair = models.first
        fit, held_out = models.examples(asked.data)
        asked.clock.lap("open")
        chosen: dict[str, Any] = {"strength": " ".join(str(each.strength) for each in tuned)}
        chosen |= {"keep": keep} if options.method in (REGRESSION, DISTIL) else {}
        made_with = {"the command": "transport", **{k: str(v) for k, v in chosen.items()}, **reported_on(held_out)}
        made_with["their bases"] = " ".join(str(_bases(tuned).index(each.base)) for each in tuned)
        return cls(asked=asked, sources=models.sources, record=record(made_with, models, fit),
                   draft=draft_of(pair, pair.layout(pair.a), options), chosen=chosen, models=models, fit=fit,
                   tuned=tuned, keep=keep, held_out=held_out)  # fmt: skip

    def match(self, claim: Claim) -> Basis:
        """The bases are matched; a fine-tune moves as its base does."""
        for doubt in self._doubts:
            self.asked.say(doubt)
        bases = _bases(self.tuned)
        among = replace(self.models, pairs=self.models.pairs[: len(bases)], names=self.models.names[: len(bases) + 1])
        matches = among.match(claim, self.fit, self.asked.say).matches
        return Basis(self.models, [*matches, *(matches[bases.index(each.base)] for each in self.tuned if matches)])

    @cached_property
    def _doubts(self) -> list[str]:
        """A sentence for each fine-tune whose weights do not look as if they came from its base."""
        raw = self._among(self.models.weights)
        names = self._called[-len(self.tuned) :]
        return [f"the weights of {name} do not look as if they came from the base that is given; is it the one that it "
                "was tuned from?" for i, name in enumerate(names) if not raw.is_tuned(i)]  # fmt: skip

    @property
    def ranks(self) -> Mapping[str, int | None] | None:
        """That the changes of those weights may have that are fitted; None for all, of any."""
        return None

    @property
    def _called(self) -> list[str]:
        """What messages call the models."""
        if len(self.tuned) == 1:
            return ["the other base", "the base", "the fine-tune"]
        return [source.name for source in self.models.sources]

    def moved(self, match: Basis) -> list[Moved]:
        return match.moved(self._called)

    def entries(self, claim: Claim, match: Basis) -> Entries:
        pair = self.models.first
        return entries_of(pair, pair.layout(pair.a), self.options, self._made(claim, match).__getitem__)

    def _carried(self, match: Basis) -> Carried:
        return self._among(match.weights)

    def _among(self, weights: Sequence[Weights]) -> Carried:
        """What is carried, of the weights of all models."""
        bases, (onto, *others) = _bases(self.tuned), weights
        changes = [Change(others[bases.index(each.base)], others[len(bases) + i], each.strength)
                   for i, each in enumerate(self.tuned)]  # fmt: skip
        return Carried(onto, tuple(changes))

    def _made(self, claim: Claim, match: Basis) -> Weights:
        """The weights of the result, by name in memory."""
        carried, ranks = self._carried(match), self.ranks
        solved = self._solved(claim, carried, ranks) if self.options.method in (REGRESSION, DISTIL) else {}
        made = self._with(solved, carried.start(ranks))
        if self.options.method == DISTIL:
            limits = None if ranks is None else Limits(ranks, carried.onto)
            towards = partial(self._towards, carried)
            made = self._with(distil_once(claim, self.models, {"the regression": made}, towards, limits)[1], made)
        return made

    def _with(self, solved: Mapping[str, Tensor], others: Weights) -> Weights:
        """Weights of which some are replaced."""
        return Regressed(others, solved)

    def _towards(self, carried: Carried) -> Objective:
        """Of the descent."""
        return descent_towards(carried.placed(self.models.network), self.models.network, self.fit, self.keep)

    def _solved(
        self, claim: Claim, carried: Carried, ranks: Mapping[str, int | None] | None, called: str = "solved"
    ) -> Mapping[str, Tensor]:
        """The weights that are fitted; what a run with the same record has found is used again.

        Args:
            ranks: as `Carried.solve` takes them.
            called: what they are kept as.
        """
        found = KeptWeights(claim, (*self.models.spec.parameters, *map(spectrum_of, ranks or ())), called)
        with claim.processes.together():
            if claim.processes.leads and not found.is_whole:
                samples = samples_of(carried, self.models.network, self.fit, self.keep, self.asked.say)
                with waiting("regression", quiet=self.options.quiet):
                    carried.solve(samples, found, ranks)
                found.close()
        return found

    def document(self, claim: Claim, match: Basis, report: Report) -> None:
        save_matches(claim.documents, replace(match, matches=match.matches[: len(_bases(self.tuned))]))
        read = self.read_back(self._made(claim, match))
        if self.held_out is not None:
            report.notes.append(self._judged(self.held_out, match, read))
            self.asked.clock.lap("evaluate")
        if self.options.method in (REGRESSION, DISTIL) and (kept := self._kept(read)):
            report.notes.append(kept)
        report.notes += self._doubts
        super().document(claim, match, report)

    def _kept(self, made: Weights) -> str | None:
        """One honest sentence on what B knew before; None where models write nothing."""
        network, raw = self.models.network, self.models.weights
        if not writes(build_without_weights(network.config)):
            return None
        written = own_inputs(network, network.placed(raw[0]), _WRITTEN, LENGTH, 4)
        evaluator = Evaluator(network, with_labels(written))
        count, called = len(self.tuned), self._called
        loss, *each = map(evaluator.loss, (made, raw[0], *raw[-count:]))
        told = zip([called[0], *called[-count:]], each, strict=True)
        others = ", ".join(f"{name} {found:.3f}" for name, found in told)
        return f"on what the other base writes, the result has loss {loss:.3f}, {others}"

    def _judged(self, held_out: Batch, match: Basis, made: Weights) -> str:
        """One honest sentence."""
        evaluator, raw = Evaluator(self.models.network, held_out), self._among(self.models.weights)
        compared = (made, raw.onto, raw.changes[0].finetuned, raw.by_vector)
        loss, before, there, added = map(evaluator.loss, compared)
        losses = f"the result has loss {loss:.3f}, the other base {before:.3f}, the fine-tune {there:.3f}"
        plain = f"what the fine-tune changed, added without alignment: {added:.3f}"
        if there >= before:
            return f"the fine-tune is no better here than the other base: {losses}; {plain}"
        return f"{(before - loss) / (before - there):.0%} of the gain is carried over: {losses}; {plain}"


def _bases(tuned: Sequence[Tuned]) -> list[str]:
    """The different ones, in order."""
    return list(dict.fromkeys(each.base for each in tuned))
