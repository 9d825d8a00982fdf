"""A fine-tune that is an adapter, carried to another base as an adapter of that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hf_align.checkpoints.adapters import WEIGHTS, AdaptedCheckpoint, LowRank
from hf_align.checkpoints.checkpoint import Checkpoint, require_held
from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.hub import ADAPTER, Source
from hf_align.checkpoints.ondemand import Computed
from hf_align.checkpoints.own_files import own_json
from hf_align.checkpoints.plan import Shard, ShardPlan
from hf_align.checkpoints.shards import Source as Entries
from hf_align.checkpoints.shards import whole, write_with_bar
from hf_align.errors import HfAlignError
from hf_align.jobs.job import Asked, Draft, Say
from hf_align.jobs.opened import Basis, Opened
from hf_align.jobs.outcome import Report
from hf_align.jobs.transport import Transport, Tuned
from hf_align.jobs.witnessing import moved_model
from hf_align.merging.fits import spectrum_of
from hf_align.merging.lockstep import program_of
from hf_align.merging.methods import DISTIL, REGRESSION
from hf_align.merging.sites import sites
from hf_align.merging.transport import Carried
from hf_align.running.evaluate import Evaluator
from hf_align.running.generate import noise
from hf_align.running.network import Weights
from hf_align.runtime.devices import Devices
from hf_align.symmetry.action import Elements
from hf_align.symmetry.alignment import AlignedWeights, compose, inverse
from hf_align.tracing.trace import trace
from hf_align.witness.witness import Moved

_ENOUGH = 0.99
"""Of a change, what a rank should keep."""
_NOT_FOUND = "the adapter changes {}, which no regression finds; leave --as-adapter out"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Changes:
    """What an adapter changes in the other base.

    Attributes:
        adapter: as it was trained.
        parts: its two factors, or the name of a tensor that it has as a whole, by the weight's name in memory.
        copies: the names of tensors that are those of the base, by the weight's name in memory.
    """

    adapter: Checkpoint
    parts: Mapping[str, LowRank | str]
    copies: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, models: Opened) -> Changes:
        """Those of the last of some models.

        Raises:
            HfAlignError: it has no adapter, or one of which a change cannot be found by a regression.
        """
        model = models.models[-1]
        if not isinstance(model.checkpoint, AdaptedCheckpoint):
            raise HfAlignError(f"{model.ref} is no adapter, so it cannot be carried as one; leave --as-adapter out")
        in_memory = {on_disk: name for name, on_disk in model.names.alone().items()}
        parts = _in_memory(_parts(model.checkpoint), in_memory)
        copies = _in_memory(model.checkpoint.copies, in_memory)
        program = program_of(models.network, noise(trace(models.network.config)))
        fitted = [site for site in sites(program) if site.groups == 1 and site.parameter in parts]
        if other := sorted(parts.keys() - {name for site in fitted for name in (site.parameter, site.bias)}):
            raise HfAlignError(_NOT_FOUND.format(other[0]))
        return cls(model.checkpoint.adapter, parts, copies)

    @property
    def ranks(self) -> dict[str, int | None]:
        """That the change of each weight may have; None for any."""
        return {n: self.adapter.info(p.down).shape[0] if isinstance(p, LowRank) else None
                for n, p in self.parts.items()}  # fmt: skip

    @property
    def owners(self) -> dict[str, str]:
        """The weight that each tensor of the adapter changes."""
        return {tensor: name for name, part in self.parts.items()
                for tensor in ((part.down, part.up) if isinstance(part, LowRank) else (part,))}  # fmt: skip

    @property
    def plan(self) -> ShardPlan:
        """One file, with the tensors of the adapter as it was trained."""
        found = [(name, self.adapter.info(name)) for name in sorted([*self.owners, *self.copies.values()])]
        ordered = sorted(found, key=lambda each: -each[1].dtype.itemsize)
        return ShardPlan((Shard(WEIGHTS, tuple((n, tuple(i.shape), i.dtype) for n, i in ordered)),))

    def entries(self, before: Weights, after: Weights) -> Entries:
        """The adapter's tensors, for which one set of weights becomes another."""
        owners, copied = self.owners, {tensor: name for name, tensor in self.copies.items()}

        def read(tensor: str) -> Tensor:
            if tensor in copied:
                return before[copied[tensor]].to(self.adapter.info(tensor).dtype)
            return self._tensors(owners[tensor], before, after)[tensor]

        return whole(lambda tensor: require_held(tensor, read(tensor)))

    def read_back(self, before: Weights, after: Weights) -> Weights:
        """What one set of weights becomes with the adapter's tensors, in the dtypes that these are written in."""

        def read(name: str) -> Tensor:
            part = self.parts.get(name)
            if part is None:
                return after[name]
            found, weight = self._tensors(name, before, after), before[name].float()
            if isinstance(part, LowRank):
                return weight + part.rows(found, 0, len(weight)).reshape(weight.shape)
            return found[part].float()

        return Computed(after, read)

    def _tensors(self, name: str, before: Weights, after: Weights) -> dict[str, Tensor]:
        """Those of one weight, by name in the adapter."""
        part, found = self.parts[name], after[name].float()
        if isinstance(part, str):
            return {part: found.to(self.adapter.info(part).dtype)}
        old = before[name].float()
        return part.factors(found - old, self.adapter, float(old.norm()))


def _parts(checkpoint: AdaptedCheckpoint) -> Mapping[str, LowRank | str]:
    """What an adapter changes, by name on disk.

    Raises:
        HfAlignError: a change that is none, or one of two kinds.
    """
    for name, part in checkpoint.parts.items():
        if isinstance(part, str) and name in checkpoint.low_rank:
            raise HfAlignError(f"the adapter has another {name} and changes it by factors; leave --as-adapter out")
        if isinstance(part, LowRank) and not part.scale:
            raise HfAlignError(f"the adapter's change of {name} counts nothing: its lora_alpha is 0")
    return checkpoint.parts


def _in_memory(by_disk: Mapping[str, _T], names: Mapping[str, str]) -> dict[str, _T]:
    if other := sorted(by_disk.keys() - names.keys()):
        raise HfAlignError(_NOT_FOUND.format(other[0]))
    return {names[on_disk]: found for on_disk, found in by_disk.items()}


@dataclass(frozen=True)
class AdapterDraft(Draft):
    """An adapter that is going to be written.

    Attributes:
        base: what it is an adapter of.
    """

    base: Source | None = None

    def write(self, claim: Claim, entries: Entries, say: Say, *, quiet: bool) -> None:
        say(f"writing an adapter of {len(self.plan.shards[0].tensors)} tensors to {claim.folder}")
        write_with_bar(claim, self.plan, entries, quiet=quiet)
        if claim.processes.leads and self.base is not None:
            config = {**(own_json(self.like, ADAPTER) or {}), **self.changed}
            config |= {"base_model_name_or_path": self.base.own_name, "revision": self.base.commit}
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (claim.documents / ADAPTER).write_text(text, encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class TransportAdapter(Transport):
    """An adapter of A as an adapter of B: only what it changes is fitted, and no change has a higher rank.

    All that is compared is in the basis of B as it is stored, whose other weights stay as they are.
    """

    changes: Changes

    @classmethod
    def open(cls, tuned: Sequence[Tuned], onto: str, asked: Asked, *, keep: float) -> TransportAdapter:
        """Open all three models.

        Raises:
            HfAlignError: any bad input; an adapter that cannot be one of the other base.
        """
        if asked.options.method not in (REGRESSION, DISTIL):
            raise HfAlignError(f"--as-adapter fits factors, and --method {asked.options.method} fits none")
        if asked.options.dtype is not None:
            raise HfAlignError("--dtype is of a whole model; what --as-adapter writes has the dtype of the adapter")
        whole = Transport.open(tuned, onto, asked, keep=keep)
        changes, (first, *_, last) = Changes.of(whole.models), whole.models.sources
        assert last.adapter is not None
        draft = AdapterDraft(changes.plan, last.adapter.folder, {"inference_mode": True}, base=first)
        return cls(asked=asked, sources=whole.sources, record={**whole.record, "--as-adapter": "True"}, draft=draft,
                   chosen={**whole.chosen, "as adapter": True}, models=whole.models, fit=whole.fit, tuned=tuned,
                   keep=keep, held_out=whole.held_out, changes=changes)  # fmt: skip

    @property
    def ranks(self) -> Mapping[str, int | None] | None:
        return self.changes.ranks

    @property
    def _cut(self) -> dict[str, int]:
        """The weights whose changes have a rank."""
        return {name: rank for name, rank in self.changes.ranks.items() if rank is not None}

    def _elements(self, match: Basis) -> Elements:
        """What brings the base, and with it the fine-tune, to B as it is stored."""
        spec, (found, _) = self.models.spec, match.matches
        return compose(spec, inverse(spec, found.a), found.b)

    def moved(self, match: Basis) -> list[Moved]:
        if not match.matches:
            return []
        pair, spec, elements = self.models.first, self.models.spec, self._elements(match)
        called = zip(("the base", "the fine-tune"), self.models.models[1:], strict=True)
        return [moved_model(name, model, pair, spec, elements, pair.layout(pair.a), self.options)
                for name, model in called]  # fmt: skip

    def _carried(self, match: Basis) -> Carried:
        onto, base, finetuned = self.models.weights
        if match.matches:
            device, elements = Devices.choose(self.options.device).running, self._elements(match)
            base, finetuned = (AlignedWeights(w, self.models.spec, elements, device) for w in (base, finetuned))
        return self._among((onto, base, finetuned))

    def _with(self, solved: Mapping[str, Tensor], others: Weights) -> Weights:
        return Computed(self.models.spec.parameters, lambda n: solved[n] if n in solved else others[n])

    def read_back(self, made: Weights) -> Weights:
        return self.changes.read_back(self.models.weights[0], made)

    def entries(self, claim: Claim, match: Basis) -> Entries:
        return self.changes.entries(self.models.weights[0], self._made(claim, match))

    def report(self, output: Path, match: Basis) -> Report:
        report = super().report(output, match)
        report.notes.append(f"the result is an adapter of {self.models.sources[0].own_name}, with a change of "
                            f"{_called(self._cut)} where the fine-tune has one; all else stays")  # fmt: skip
        return report

    def document(self, claim: Claim, match: Basis, report: Report) -> None:
        if self._cut and self.options.method == REGRESSION:
            report.notes.append(self._cost(claim, match))
        super().document(claim, match, report)

    def _cost(self, claim: Claim, match: Basis) -> str:
        """One honest sentence on what the ranks leave out."""
        carried = self._carried(match)
        found = self._solved(claim, carried, self.ranks)
        cut = LeftOut.of([(found[spectrum_of(name)], rank) for name, rank in self._cut.items()])
        told = (f"{_called(self._cut)} keeps {1 - cut.share:.1%} of what the fits change in the results of these "
                f"weights (squared norm); 99% is kept from rank {cut.enough} on")  # fmt: skip
        if self.held_out is None:
            return told
        free = self._solved(claim, carried, dict.fromkeys(self.changes.ranks), "free")
        evaluator = Evaluator(self.models.network, self.held_out)
        losses = (evaluator.loss(self._with(weights, carried.onto)) for weights in (found, free))
        return f"{told}; the loss is {{:.3f}}, and with changes of any rank {{:.3f}}".format(*losses)


@dataclass(frozen=True)
class LeftOut:
    """What ranks leave out of changes, as the results go that they change.

    Attributes:
        share: of the squared norm.
        enough: the rank of all changes with which 99 % are kept.
    """

    share: float
    enough: int

    @classmethod
    def of(cls, spectra: Sequence[tuple[Tensor, int]]) -> LeftOut:
        """
        Args:
            spectra: of each change its singular values, the largest first, and its rank.
        """
        squares = torch.nn.utils.rnn.pad_sequence([values.double().square() for values, _ in spectra])
        total, kept = squares.sum(), squares.sum(1).cumsum(0)
        gone = sum(float(values.double()[rank:].square().sum()) for values, rank in spectra)
        if not total:
            return cls(0.0, 1)
        return cls(gone / float(total), 1 + int((kept < _ENOUGH * total).sum()))


def _called(ranks: Mapping[str, int]) -> str:
    return f"rank {' or '.join(map(str, sorted(set(ranks.values()))))}"
