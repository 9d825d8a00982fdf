"""The job of `transport`: a fine-tune of one base, carried to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.ondemand import Computed
from hf_align.checkpoints.shards import Source as Entries
from hf_align.jobs.aligned import OpenedJob, save_matches
from hf_align.jobs.descending import distil_once, placed, written_by
from hf_align.jobs.job import Asked
from hf_align.jobs.kept_weights import KeptWeights
from hf_align.jobs.opened import Basis, Opened, examples
from hf_align.jobs.outcome import Report
from hf_align.jobs.writing import draft_of, entries_of, record, reported_on
from hf_align.matching.objectives import Objective
from hf_align.merging.methods import DISTIL, REGRESSION
from hf_align.merging.transport import LENGTH, Fine, Texts, samples_of
from hf_align.running.data import with_labels
from hf_align.running.evaluate import Evaluator
from hf_align.running.generate import own_inputs, writes
from hf_align.running.network import Batch, Weights
from hf_align.runtime.progress import waiting
from hf_align.tracing.build import build_without_weights
from hf_align.witness.witness import Moved

_WRITTEN = 64
"""Sequences of B's that it is measured on what the result kept."""


@dataclass(frozen=True, kw_only=True)
class Transport(OpenedJob[Basis]):
    """B with what the fine-tune learned on A.

    Attributes:
        strength: how much of the change is carried over.
        keep: examples that B writes for each of the others.
        held_out: examples to report on.
    """

    strength: float
    keep: float
    held_out: Batch | None

    @classmethod
    def open(cls, finetuned: str, base: str, onto: str, asked: Asked, *, strength: float, keep: float) -> Transport:
        """Open all three models.

        Raises:
            HfAlignError: any bad input.
        """
        options = asked.options
        models = Opened.open({"onto": onto, "base": base, "finetuned": finetuned}, options, asked.say, jointly=False)
        pair = models.first
        fit, held_out = examples(pair, options, asked.data)
        if held_out is not None:
            with_labels(held_out)
        asked.clock.lap("open")
        chosen = {"strength": strength, "keep": keep}
        made_with = {"the command": "transport", **{k: str(v) for k, v in chosen.items()}, **reported_on(held_out)}
        return cls(asked=asked, sources=models.sources, record=record(made_with, models, fit),
                   draft=draft_of(pair, pair.layout(pair.a), options), chosen=chosen,
                   models=models, fit=fit, strength=strength, keep=keep, held_out=held_out)  # fmt: skip

    def match(self, claim: Claim) -> Basis:
        """The bases are matched; the fine-tune moves as its base does."""
        bases = replace(self.models, pairs=self.models.pairs[:1], names=self.models.names[:2])
        matches = bases.match(claim, self.fit, self.asked.say).matches
        return Basis(self.models, [*matches, *matches])

    @property
    def ranks(self) -> Mapping[str, int | None] | None:
        """That the changes of those weights may have that are fitted; None for all, of any."""
        return None

    def moved(self, match: Basis) -> list[Moved]:
        return match.moved(("the other base", "the base", "the fine-tune")) if match.matches else []

    def entries(self, claim: Claim, match: Basis) -> Entries:
        pair = self.models.first
        return entries_of(pair, pair.layout(pair.a), self.options, self._made(claim, match).__getitem__, self.asked.say)

    def _fine(self, match: Basis) -> Fine:
        onto, base, finetuned = match.weights
        return Fine(onto, base, finetuned, self.strength)

    def _made(self, claim: Claim, match: Basis) -> Weights:
        """The weights of the result, by name in memory."""
        fine = self._fine(match)
        solved = {} if self.options.method not in (REGRESSION, DISTIL) else self._solved(claim, fine)
        made = _with(fine.by_vector, solved)
        if self.options.method == DISTIL:
            towards = partial(self._towards, fine)
            made = _with(made, distil_once(claim, self.models, {"the regression": made}, towards)[1])
        return Computed(self.models.spec.parameters, made.__getitem__)

    def _towards(self, fine: Fine) -> Objective:
        """Of the descent."""
        onto, base, finetuned = (placed(self.models, weights) for weights in fine.models)
        held = Fine(onto, base, finetuned, fine.strength)
        learned = written_by(self.models, (fine.finetuned,), self.fit)
        return Texts.of(held, self.models.network, tuple(learned), self.keep).objective(held, self.keep)

    def _solved(self, claim: Claim, fine: Fine) -> Mapping[str, Tensor]:
        """The weights that are fitted; what a run with the same record has found is used again."""
        found = KeptWeights(claim, tuple(self.models.spec.parameters))
        with claim.processes.together():
            if claim.processes.leads and not found.is_whole:
                samples = samples_of(fine, self.models.network, self.fit, self.keep, self.asked.say)
                with waiting("regression", quiet=self.options.quiet):
                    fine.solve(samples, found, self.ranks)
                found.close()
        return found

    def document(self, claim: Claim, match: Basis, report: Report) -> None:
        save_matches(claim.documents, replace(match, matches=match.matches[:1]))
        if self.held_out is not None:
            report.notes.append(self._judged(self.held_out, match, self._made(claim, match)))
            self.asked.clock.lap("evaluate")
        if self.options.method in (REGRESSION, DISTIL) and (kept := self._kept(self._made(claim, match))):
            report.notes.append(kept)
        super().document(claim, match, report)

    def _kept(self, made: Weights) -> str | None:
        """One honest sentence on what B knew before; None where models write nothing."""
        network, names = self.models.network, self.models.spec.parameters
        onto, _, finetuned = Basis(self.models).weights
        if not writes(build_without_weights(network.config)):
            return None
        written = own_inputs(network, placed(self.models, onto), _WRITTEN, LENGTH, 4)
        evaluator = Evaluator(network, with_labels(written))
        loss, before, there = (evaluator.loss(Computed(names, w.__getitem__)) for w in (made, onto, finetuned))
        return (f"on what the other base writes, the result has loss {loss:.3f}, the other base {before:.3f}, "
                f"the fine-tune {there:.3f}")  # fmt: skip

    def _judged(self, held_out: Batch, match: Basis, made: Weights) -> str:
        """One honest sentence."""
        evaluator, names = Evaluator(self.models.network, held_out), self.models.spec.parameters
        raw = self._fine(Basis(self.models))
        loss, before, there, added = (
            evaluator.loss(Computed(names, weights.__getitem__))
            for weights in (made, raw.onto, raw.finetuned, raw.by_vector)
        )
        losses = f"the result has loss {loss:.3f}, the other base {before:.3f}, the fine-tune {there:.3f}"
        plain = f"what the fine-tune changed, added without alignment: {added:.3f}"
        if there >= before:
            return f"the fine-tune is no better here than the other base: {losses}; {plain}"
        return f"{(before - loss) / (before - there):.0%} of the gain is carried over: {losses}; {plain}"


def _with(weights: Weights, others: Mapping[str, Tensor]) -> Weights:
    """Weights of which some are others, in the same dtypes."""
    return Computed(weights, lambda n: others[n].to(weights[n]) if n in others else weights[n])
