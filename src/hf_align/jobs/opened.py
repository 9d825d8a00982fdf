"""Two or more models of one architecture, opened, and how they come into one basis: that of the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.companions import code_not_run, model_code
from hf_align.checkpoints.hub import Source
from hf_align.checkpoints.ondemand import Computed, Recalled
from hf_align.errors import HfAlignError
from hf_align.jobs.job import Say, silent
from hf_align.jobs.lacking import in_short
from hf_align.jobs.respelling import refitted
from hf_align.jobs.witnessing import moved_model
from hf_align.matching.balanced import Balanced
from hf_align.matching.choices import as_chosen, separated
from hf_align.matching.descent import State
from hf_align.matching.find import Search, find, site_order
from hf_align.matching.match import Match, of_others
from hf_align.merging.methods import RUNNING
from hf_align.merging.tensors import TENSORWISE
from hf_align.opening.heads import is_tied
from hf_align.opening.models import Model
from hf_align.opening.pairs import Pair, Respell, open_pair
from hf_align.running.data import load_data, require_fit
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Batch, Network, Weights
from hf_align.running.offload import network_for
from hf_align.running.trial import require_runs
from hf_align.runtime.devices import Devices
from hf_align.runtime.processes import ALONE, Processes
from hf_align.runtime.progress import waiting
from hf_align.settings.options import Options
from hf_align.symmetry.action import Elements
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.witness.witness import Moved


@dataclass(frozen=True)
class Opened:
    """Models of one architecture.

    Attributes:
        pairs: every other model beside the first.
        options: how they are matched, and where they run.
        names: the part that each plays, the first one first.
        jointly: look for all matches at once; else each model is matched with the first, and no other matters to it.
    """

    pairs: tuple[Pair, ...]
    options: Options
    names: Sequence[str] = ("A", "B")
    jointly: bool = True

    @classmethod
    def open(cls, named: Mapping[str, str], options: Options, say: Say = silent, *, jointly: bool = True) -> Opened:
        """Open all models, one of them beside itself, and see that they can be matched as is asked.

        Args:
            named: the part that a model plays -> folder or Hub reference.

        Raises:
            HfAlignError: as `open_models`; a choice that the architecture does not have, a device that is not there.
        """
        first, *others = named.values()
        respell = partial(refitted, options=options)
        pairs = tuple(open_models(first, other, options, say, respell) for other in others or [first])
        opened = cls(pairs, options, tuple(named), jointly)
        for ref, unused in {model.ref: model.names.unused for model in opened.models}.items():
            if unused:
                shown = unused[0] + (", …" if len(unused) > 1 else "")
                say(f"warning: {len(unused)} tensors of {ref} have no place in its architecture ({shown})")
        if len(pairs) > 1 or not jointly:
            for pair in pairs:
                pair.require_one_size()
        _ = opened.spec, opened.given, Devices.choose(options.device)
        if options.match == "learned":
            opened.network.must_hold("--match learned holds all models in memory")
        return opened

    @property
    def first(self) -> Pair:
        """The first two models."""
        return self.pairs[0]

    @property
    def models(self) -> tuple[Model, ...]:
        """All, the first one first."""
        return self.first.a, *(pair.b for pair in self.pairs)

    @property
    def sources(self) -> list[Source]:
        """Where they came from."""
        return [model.source for model in self.models]

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """Of all models, as they are."""
        return self.parameters([model.weights for model in self.models])

    def parameters(self, found: Sequence[Weights]) -> tuple[Weights, ...]:
        """The parameters of all models; where nothing depends on one of a model, it is that of another.

        Args:
            found: what there is of each model, by name in memory.
        """

        def of(own: Weights, idle: frozenset[str], others: Weights) -> Weights:
            return Computed(self.spec.parameters, lambda name: others[name] if name in idle else own[name])

        return tuple(of(own, model.idle, found[0] if i else found[-1])
                     for i, (own, model) in enumerate(zip(found, self.models, strict=True)))  # fmt: skip

    @cached_property
    def spec(self) -> SymmetrySpec:
        """The spec with the groups and spaces that the options choose.

        Raises:
            HfAlignError: a choice that this architecture does not have.
        """
        pair, options = self.first, self.options
        spec = as_chosen(pair.spec, options.residual, options.heads, options.spaces)
        return separated(spec, site_order(pair.config, pair.a.weights)) if options.residual == "separate" else spec

    @cached_property
    def network(self) -> Network:
        """What runs them."""
        device = Devices.choose(self.options.device).running
        return network_for(self.first.config, device, self.options.offload)

    @cached_property
    def given(self) -> Match | None:
        """The match that the options name."""
        return Match.load(self.options.alignment, self.spec) if self.options.alignment is not None else None

    def examples(self, data: Path | None, *, reporting: bool = True) -> tuple[Batch | None, Batch | None]:
        """As `examples`; the first model has run on some of both.

        Args:
            reporting: whether the second part is asked for.

        Raises:
            HfAlignError: the model does not run on it, or it has nothing to predict.
        """
        fit, held_out = examples(self.first, self.options, data)
        held_out = held_out if reporting else None
        told = None if held_out is None else Evaluator(self.network, held_out).data
        require_runs(self.network, self.weights[0], [part for part in (fit, told) if part is not None], data)
        return fit, held_out

    def search(self, state: State | None = None) -> Search:
        """How the options look for a match; `state` is where learned matching keeps how far it got."""
        options = self.options
        return Search(options.match, options.schedule, residual=options.residual, heads=options.heads, own=options.own,
                      state=state, quiet=options.quiet)  # fmt: skip

    def find(
        self, fit: Batch | None = None, say: Say = silent, *, state: State | None = None, processes: Processes = ALONE
    ) -> list[Match]:
        """The match of every model but the first with the first; none under --match none.

        Args:
            fit: examples to match on; without them the models' own inputs are used.
            state: where learned matching keeps how far it got.
            processes: that look for it together.
        """
        if self.options.match == "none":
            return []
        solving, raw = Devices.choose(self.options.device).solving, [m.weights for m in self.models]
        with waiting("matching", quiet=self.options.quiet):
            models = Balanced.of(self.spec, *raw, processes=processes, device=solving)
            if self.given is not None:
                here = models.measured(self.given, *raw)
                for doubt in of_others(self.given, here):
                    say(doubt)
                return [here]
            found, sweeps = find(models, self.network, self.search(state), fit, say)
            return [models.match(elements, sweeps, i) for i, elements in enumerate(found, start=1)]

    def match(self, claim: Claim, fit: Batch | None, say: Say) -> Basis:
        """As `find`; what a run with the same record has found before it was killed is used again."""
        together = [self.pairs] if self.jointly else [(pair,) for pair in self.pairs]
        matches: list[Match] = []
        for pairs in together:
            matches += replace(self, pairs=pairs)._match(claim, len(matches) + 1, fit, say)
        return Basis(self, matches)

    def _match(self, claim: Claim, number: int, fit: Batch | None, say: Say) -> list[Match]:
        names = [f"alignment-{n}.safetensors" for n, _ in enumerate(self.pairs, start=number)]
        with claim.processes.together():
            kept = [path for path in map(claim.kept, names) if path is not None]
        with claim.processes.together():  # all have looked before one is kept
            if len(kept) == len(names):
                return [Match.load(path, self.spec) for path in kept]
            state = State(claim.progress, made_of=f"{number} {claim.record!r}")
            found = [m.laid_out() for m in self.find(fit, say, state=state, processes=claim.processes)]
            if claim.processes.leads:
                for name, match in zip(names, found, strict=False):
                    claim.keep(name, partial(match.save, spec=self.spec))
                claim.progress.unlink(missing_ok=True)
        return found

    def drop_when_read(self) -> None:
        """From now on, take shards from the Hub off the disk as soon as they have been read."""
        for model in self.models:
            model.checkpoint.drop_when_read([n for link in model.names.links for n in link.sources])

    def drop(self) -> None:
        """Take shards from the Hub off the disk that are still there: what matching has left in memory is not read."""
        for model in self.models:
            model.checkpoint.drop()


@dataclass(frozen=True)
class Basis:
    """Models in the basis of the first; as they are, without matches.

    Attributes:
        matches: of every model but the first, with the first.
    """

    models: Opened
    matches: Sequence[Match] = ()

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """The parameters of all models, made as they are asked for."""
        return self.models.parameters(self.aligned) if self.matches else self.models.weights

    @cached_property
    def aligned(self) -> tuple[Recalled, ...]:
        """Of all models, what their own weights are moved to; none without a match."""
        device, spec = Devices.choose(self.models.options.device).running, self.models.spec
        return tuple(Recalled(AlignedWeights(model.weights, spec, elements, device))
                     for model, elements in zip(self.models.models, self._elements, strict=False))  # fmt: skip

    @property
    def of_first(self) -> Basis:
        """The first two models alone."""
        return Basis(replace(self.models, pairs=self.models.pairs[:1], names=self.models.names[:2]), self.matches[:1])

    @property
    def by_name(self) -> dict[str, Weights]:
        """The weights by the part that each model plays."""
        return dict(zip(self.models.names, self.weights, strict=False))  # a model that is alone is there twice

    @property
    def _elements(self) -> tuple[Elements, ...]:
        return (self.matches[0].a, *(match.b for match in self.matches)) if self.matches else ()

    def moved(self, called: Sequence[str] = ()) -> list[Moved]:
        """All models as they are mixed, the first one last; none without a match.

        Args:
            called: what messages call them; by default their names.
        """
        if not self.matches:
            return []
        models, pair = self.models.models, self.models.first
        names = called or [model.source.name for model in models]
        spec, like, options = self.models.spec, pair.layout(pair.a), self.models.options
        first, *others = zip(names, models, self._elements, self.aligned, strict=True)
        return [moved_model(name, model, pair, spec, elements, like, options, aligned)
                for name, model, elements, aligned in (*others, first)]  # fmt: skip


def open_models(a: str, b: str, options: Options, say: Say, respell: Respell) -> Pair:
    """Two models, and what must be said of their architecture before anything is done.

    Args:
        respell: what is done further to a model that the options bring into another vocabulary.

    Raises:
        HfAlignError: as `open_pair`; an op without a rule under --strict.
    """
    mixed = options.match == "none" and options.method in TENSORWISE
    pair = open_pair(a, b, untie=options.untie, moves=not mixed, specs=options.specs, widen=options.widths,
                     respell=respell if options.retokenize else None,
                     trust_remote_code=options.trust_remote_code)  # fmt: skip
    for model in (pair.a, pair.b):
        for change in model.changes:
            say(f"{model.ref} {change}")
        if not options.trust_remote_code and model_code(model.folder):
            say(f"warning: {code_not_run(model.ref, pair.config.model_type)} (--trust-remote-code runs it)")
    if pair.untied:
        say(f"the head is untied (tie_word_embeddings: false): {_why_untied(pair, options)}")
    if pair.spec.unknown_ops:
        ops = ", ".join(sorted(pair.spec.unknown_ops))
        if options.strict:
            raise HfAlignError(f"no rule for {ops}; without --strict what they touch is pinned")
        say(f"no rule for {ops}: what they touch is pinned")
    for said in not_seen(pair.spec):
        say(said)
    return pair


def not_seen(spec: SymmetrySpec) -> Iterator[str]:
    """What is said of weights that no traced call reads, and of code that no call was found to send another way."""
    if spec.unread:
        weights = in_short(spec.unread, "weights")
        yield f"no traced call reads {weights}: they stand still, and so does every space of their sizes"
    if spec.untried:
        lines = in_short(spec.untried, "lines")
        yield f"no argument that was tried sends {lines} another way: what another one makes of B there is not known"


def examples(pair: Pair, options: Options, data: Path | None) -> tuple[Batch | None, Batch | None]:
    """What to match and merge on, and what to report on: halves of the data, or all of it where neither runs a model.

    Raises:
        HfAlignError: the data cannot be read, or one example cannot be halved.
    """
    if data is None:
        return None, None
    read = load_data(data, pair.a.folder, pair.config, trust_remote_code=options.trust_remote_code)
    everything = require_fit(read, data, pair.config)
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


def _why_untied(pair: Pair, options: Options) -> str:
    loose = [model.ref for model in (pair.a, pair.b) if not is_tied(model.config)]
    if loose:
        return f"that of {loose[0]} is"
    if options.match == "none":
        return "it is merged apart from the embedding"
    return "tied to the embedding it pins the residual basis"
