"""The job of `merge`: models in one basis, mixed, and what that gained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.companions import TOKENIZERS
from hf_align.checkpoints.not_merged import not_merged
from hf_align.checkpoints.ondemand import Computed
from hf_align.checkpoints.shards import Source as Entries
from hf_align.jobs.aligned import OpenedJob, save_matches
from hf_align.jobs.comparing import beside_the_others, judged
from hf_align.jobs.descending import distil_once, nearest_once, once, towards_mix
from hf_align.jobs.job import Asked
from hf_align.jobs.kept_weights import KeptWeights
from hf_align.jobs.opened import Basis, Opened
from hf_align.jobs.outcome import Report
from hf_align.jobs.texts import texts
from hf_align.jobs.writing import draft_of, entries_of, record, reported_on
from hf_align.matching.descent import State
from hf_align.matching.find import searching, towards
from hf_align.matching.universe import Mean
from hf_align.merging.aligned import Aligned
from hf_align.merging.curve import along, bulging, learn_curve
from hf_align.merging.distil import ASKED, WRITTEN
from hf_align.merging.lockstep import program_of
from hf_align.merging.methods import CURVE, DISTIL, HOLDING, INEXACT, REGRESSION, mix_of
from hf_align.merging.regression import Regressed, mean_of, regress
from hf_align.merging.samples import MORE, Samples
from hf_align.publishing.card import document
from hf_align.publishing.documenting import certified, cosines
from hf_align.running.generate import noise
from hf_align.running.network import Batch, Weights
from hf_align.runtime.progress import waiting
from hf_align.runtime.saving import read_tensors, save_tensors
from hf_align.settings.choices import Effort
from hf_align.tracing.trace import trace
from hf_align.witness.witness import Moved

_OFFSETS = "offsets.safetensors"


@dataclass(frozen=True)
class Mixed(Basis):
    """Models in one basis, and their merge.

    Attributes:
        merge: makes it, once, when the witness has seen the models.
    """

    merge: Callable[[Basis], Weights] = field(kw_only=True)

    @cached_property
    def merged(self) -> Weights:
        return self.merge(self)


@dataclass(frozen=True, kw_only=True)
class Merge(OpenedJob[Mixed]):
    """Two models mixed by any method, or more by those that have a meaning for more.

    Attributes:
        certificate: of the symmetries that are used, as data.
        effort: that chose how they are matched and merged; None if the caller did.
    """

    certificate: dict[str, Any] | None
    effort: Effort | None = None

    @classmethod
    def open(cls, references: Sequence[str], asked: Asked, *, certify: bool, effort: Effort | None = None) -> Merge:
        """Open all models."""
        options, clock = asked.options, asked.clock
        roles = ["A", "B"]
        if len(references) > 2:
            options.require_for_many()
            roles = [f"model {number}" for number, _ in enumerate(references, start=1)]
        models = Opened.open(dict(zip(roles, references, strict=True)), options, asked.say)
        pair = models.first
        fit, held_out = models.examples(asked.data)
        if options.method in HOLDING:
            models.network.must_hold(f"--method {options.method} holds both models in memory")
        clock.lap("open")
        certificate = None
        if certify and options.match != "none":
            certificate = certified(pair.config, options.specs, asked.say)
            clock.lap("certify")
        made_with = {"the command": "merge", "--certify": str(certify), **reported_on(held_out)}
        made_with |= {} if effort is None else {"--effort": effort}
        return cls(asked=asked, sources=models.sources, record=record(made_with, models, fit),
                   draft=draft_of(pair, pair.layout(pair.a), options), models=models, fit=fit,
                   held_out=held_out, certificate=certificate, effort=effort)  # fmt: skip

    def require_graph(self) -> None:
        """See that the models have a graph, if they are merged along it.

        Raises:
            CannotRun: they have none.
        """
        if self.options.method in (REGRESSION, DISTIL):
            network = self.models.network
            program_of(network, noise(trace(network.config)))

    @property
    def is_pair(self) -> bool:
        return len(self.models.pairs) == 1

    def match(self, claim: Claim) -> Mixed:
        found = self.models.match(claim, self.fit, self.asked.say)
        return Mixed(found.models, found.matches, merge=partial(self._merged, claim))

    def moved(self, match: Mixed) -> list[Moved]:
        return match.moved(self.models.names if self.is_pair else ())

    def entries(self, claim: Claim, match: Mixed) -> Entries:
        pair, options, merged = self.models.first, self.options, match.merged
        if options.drop_cache:  # not before: matching reads every shard many times
            self.models.drop_when_read()
        return entries_of(pair, pair.layout(pair.a), options, merged.__getitem__)

    def report(self, output: Path, match: Mixed) -> Report:
        found = replace(super().report(output, match), certificate=self.certificate)
        are_respelled = all(model.respelled is not None for model in self.models.models[1:])
        found.notes += not_merged(
            [source.folder for source in self.models.sources], without=TOKENIZERS if are_respelled else ()
        )
        return found

    def document(self, claim: Claim, match: Mixed, report: Report) -> None:
        save_matches(claim.documents, match)
        method = self._method(claim, match)
        if method == REGRESSION:
            report.notes.append(self._regressed(claim, match).note)
        elif method == DISTIL:
            start, _ = self._distilled(claim, match)
            report.notes.append(f"distillation starts from {start}, which is nearest to the ensemble")
        elif method != self.options.method:
            report.notes.append("merged by the mean, which is nearer to the ensemble than the regression")
        if self.held_out is not None:
            report.notes.append(judged(match, self.held_out, report))
            report.notes += beside_the_others(
                match, method, self.read_back(match.merged), self.held_out, report.comparison
            )
            self.asked.clock.lap("evaluate")
        written = {} if self.held_out is None else self._texts(match, self.held_out)
        shown = self.asked.data is not None and self.is_pair
        agreement = cosines(self.models.first, *match.weights) if shown else {}
        strategy = {**self.strategy, "method": method}
        document(claim.documents, self.sources, self.asked.say, command=self.asked.command, strategy=strategy,
                 agreement=agreement, held_out=self.held_out is not None, **written, **report.facts)  # fmt: skip
        if self.options.drop_cache:
            self.models.drop()

    def _texts(self, match: Mixed, held_out: Batch) -> dict[str, Any]:
        """What the models and the merge write."""
        apart = dict(zip(self._called, self.models.weights, strict=True))
        return texts(self.models, {**apart, "the merge": self.read_back(match.merged)}, held_out)

    @property
    def _called(self) -> list[str]:
        """The names of the models, told apart by numbers where they have one name."""
        names = [source.name for source in self.models.sources]
        if len(set(names)) == len(names):
            return names
        return [f"{name} ({i})" for i, name in enumerate(names, start=1)]

    def _merged(self, claim: Claim, basis: Basis) -> Weights:
        """The merge that the options ask for, tensor by tensor."""
        weights, method = basis.weights, self._method(claim, basis)
        if method == REGRESSION:
            return self._regressed(claim, basis)
        if method == DISTIL:
            return self._distilled(claim, basis)[1]
        if not self.is_pair:
            return bulging(Mean(weights), self._bulge(claim, weights)) if method == CURVE else Mean(weights)
        models = Aligned(self.models.spec, *weights)
        if method in INEXACT:
            self.asked.say(
                f"--method {method} mixes units by maps that are not symmetries: B's function is not preserved"
            )
        if method == CURVE:
            mix = along(models, self._bulge(claim, weights))
        else:
            mix = mix_of(method, models, lambda: Samples.of(weights, self.models.network, self.fit, self.asked.say))
        return Computed(self.models.spec.parameters, lambda name: mix(name, self.options.weight))

    def _method(self, claim: Claim, basis: Basis) -> str:
        """That of the options. An effort promises no method: it takes the mean in the place of a regression that is
        further from what all models say together."""
        if self.effort is None or self.options.method != REGRESSION:
            return self.options.method
        found, sources = self._regressed(claim, basis), basis.weights
        towards = partial(towards_mix, self.models, sources, self.options.shares(len(sources)), self.fit, ASKED)
        return nearest_once(claim, self.models, {REGRESSION: found, "linear": found.mean}, towards)

    def _regressed(self, claim: Claim, basis: Basis) -> Regressed:
        """Weights that are solved for; what a run with the same record has found is used again."""
        models, shares = basis.weights, self.options.shares(len(basis.weights))
        mean, found = mean_of(models, shares), KeptWeights(claim, tuple(self.models.spec.parameters))
        with claim.processes.together():
            if claim.processes.leads and not found.is_whole:
                samples = Samples.of(models, self.models.network, self.fit, self.asked.say, MORE)
                with waiting("regression", quiet=self.options.quiet):
                    regress(models, shares, samples, mean, found, choosing=self.models.spec)
                found.close()
        return Regressed(mean, found)

    def _distilled(self, claim: Claim, basis: Basis) -> tuple[str, Weights]:
        """From the regression, or from a model that is nearer to it, down to what all models say together."""
        sources, shares = basis.weights, self.options.shares(len(basis.weights))
        starts = {"their regression": self._regressed(claim, basis), **dict(zip(self._called, sources, strict=True))}
        towards = partial(towards_mix, self.models, sources, shares, self.fit, WRITTEN)
        called, found = distil_once(claim, self.models, starts, towards)
        return called, Regressed(starts[called], found)

    def _bulge(self, claim: Claim, weights: Sequence[Weights]) -> dict[str, Tensor]:
        """What is learned of a curve, or of a simplex."""
        return read_tensors(once(claim, _OFFSETS, partial(self._offsets, weights)))

    def _offsets(self, weights: Sequence[Weights], state: State) -> Callable[[Path], None]:
        network, search = self.models.network, self.models.search()
        placed = tuple(map(network.placed, weights))
        objective = towards(placed, network, search, self.fit, self.asked.say)
        with searching(search, "learning the curve") as progress:
            offsets = learn_curve(placed, network, objective, search.schedule, state=state, progress=progress)
        return partial(save_tensors, offsets)
