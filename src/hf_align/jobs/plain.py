"""Merging two checkpoints as they are: without alignment no basis need be known, so no model is traced.

Only where their configs differ must the modelling code say first whether that matters; whether the tensors are those of
the architecture, another process asks it while they are written.
Entry belongs to entry wherever both store the same tensors, also where it would fuse or rename them. Methods that look
at one entry at a time are computed in slices that fit into a processor's cache, in several threads, from the files of
the inputs into their place in the file of the output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_align.checkpoints.adapters import AdaptedCheckpoint, adapted
from hf_align.checkpoints.checkpoint import Checkpoint, is_finite, require_finite
from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.companions import stored_as
from hf_align.checkpoints.hub import Source as ModelSource
from hf_align.checkpoints.hub import resolve
from hf_align.checkpoints.not_merged import not_merged
from hf_align.checkpoints.own_files import own_json
from hf_align.checkpoints.plan import ShardPlan
from hf_align.checkpoints.shards import Source
from hf_align.checkpoints.token_ids import renamed_tokens, same_vocabulary
from hf_align.errors import CheckpointError
from hf_align.jobs.job import Asked, Draft, Job, run
from hf_align.jobs.lacking import NOTED, asked_of_code
from hf_align.jobs.outcome import Report
from hf_align.merging.tensors import ELEMENTWISE, TENSORWISE
from hf_align.settings.options import Options

SLICE = 2**19
"""Entries at a time: two inputs and an output in bfloat16 are 3 MiB."""
_TIED = "tie_word_embeddings"
"""The field of a config that says whether the head is the table of embeddings."""


@dataclass(frozen=True)
class Same:
    """Two checkpoints that store the same tensors of one architecture."""

    sources: tuple[ModelSource, ModelSource]
    a: Checkpoint
    b: Checkpoint
    config: dict[str, Any]

    @classmethod
    def open(cls, a: str, b: str, *, trust_remote_code: bool = False) -> Same | None:
        """Open both; None if they are not alike, so that only the modelling code can tell whether they fit.

        Args:
            a, b: folders or Hub references.

        Raises:
            HfAlignError: a reference that leads nowhere, damaged files, different vocabularies, configs that compute
                differently.
        """
        sources = resolve(a), resolve(b)
        folders = [source.folder for source in sources]
        configs = [own_json(folder, "config.json") for folder in folders]
        if configs[0] is None or configs[1] is None or _kind(configs[0]) != _kind(configs[1]):
            return None
        if not same_vocabulary(folders) or configs[0].get(_TIED) != configs[1].get(_TIED):
            return None
        first, second = (Checkpoint.open(source.folder, source.shards) for source in sources)
        try:
            first, second = (adapted(c, source) for c, source in zip((first, second), sources, strict=True))
        except CheckpointError:  # the modelling code may know what an adapter's names stand for
            return None
        if _layout(first) != _layout(second):
            return None
        for ref, model, config in zip((a, b), (first, second), configs, strict=True):
            if isinstance(model, AdaptedCheckpoint) and config is not None and config.get(_TIED) is not False:
                _require_parts_alone(ref, model, trust_remote_code)
        if _described(configs[0], folders[0]) != _described(configs[1], folders[1]) and not _same_weights(
            (a, b), folders, (first, second), trust_remote_code
        ):
            return None
        return cls(sources, first, second, configs[0])

    def agrees_outside_floats(self) -> bool:
        """Whether masks, tables and counters are the same; if not, only the modelling code knows which are read."""
        whole = (n for n in self.a if not self.a.info(n).dtype.is_floating_point)
        return all(torch.equal(self.a[n], self.b[n]) for n in whole)

    def dtype(self, name: str, chosen: torch.dtype | None) -> torch.dtype:
        """Of a tensor that is written: that of A, unless another is chosen for the floating point ones."""
        found = self.a.info(name).dtype
        return chosen if chosen is not None and found.is_floating_point else found

    def plan(self, options: Options) -> ShardPlan:
        """Which tensor goes into which file."""
        tensors = [(n, self.a.info(n).shape, self.dtype(n, options.torch_dtype)) for n in sorted(self.a)]
        return ShardPlan.build(tensors, options.max_shard_size)

    def record(self, options: Options) -> dict[str, str]:
        """What the result depends on, by name."""
        inputs = zip("AB", (self.a, self.b), self.sources, strict=True)
        parts = {k: v for role, model, s in inputs for k, v in model.record(f"{role}: {s.reference}").items()}
        return {"the command": "merge", **options.result, **parts}

    def source(self, options: Options) -> Source:
        """The entries of the merge."""
        mix, weight, sliced = TENSORWISE[options.method], options.weight, options.method in ELEMENTWISE
        mixing = _Mixing(self, lambda a, b: mix(a, b, weight), options.torch_dtype, sliced=sliced)
        return Source(mixing.entries, SLICE, torch.get_num_threads()) if sliced else Source(mixing.entries)


@dataclass(frozen=True, kw_only=True)
class Plain(Job[None]):
    """A merge whose alignment is the identity: it needs no basis.

    Attributes:
        said: what its modelling code says of the tensors, which is asked while they are written.
    """

    same: Same
    said: list[str] = field(default_factory=list)

    def match(self, claim: Claim) -> None:
        """There is nothing to match."""

    def entries(self, claim: Claim, match: None) -> Source:
        same = self.same
        if self.options.drop_cache:
            same.a.drop_when_read(list(same.a))
            same.b.drop_when_read([n for n in same.b if same.b.info(n).dtype.is_floating_point])
        return same.source(self.options)

    def write(self, claim: Claim, match: None) -> None:
        if not claim.processes.leads:
            return super().write(claim, match)
        stored, trusted = self.same.a, self.options.trust_remote_code
        with asked_of_code(stored.folder, stored, trust_remote_code=trusted) as said:
            super().write(claim, match)
            self.said.extend(said())

    def report(self, output: Path, match: None) -> Report:
        folders = [source.folder for source in self.sources]
        named = renamed_tokens(folders) + not_merged(folders) + self.said
        named += [doubt for source in self.sources for doubt in source.doubts]
        return Report(str(output), str(self.same.config.get("model_type")), notes=named)


def merge(a: str, b: str, output: Path, asked: Asked) -> Report | None:
    """Write the merge of two checkpoints as they are.

    Floating point tensors are mixed, in float32 (float64 stays); all others are A's.

    Args:
        a, b: folders or Hub references.

    Returns:
        None, and nothing is written, if the two do not store the same tensors, or the method needs to know what they
        are.

    Raises:
        HfAlignError: any bad input.
    """
    options = asked.options
    same = Same.open(a, b, trust_remote_code=options.trust_remote_code) if options.method in TENSORWISE else None
    if same is None or not same.agrees_outside_floats():
        return None
    asked.clock.lap("open")
    draft = Draft(same.plan(options), same.a.folder, stored_as(same.a.folder, options.torch_dtype))
    return run(Plain(asked=asked, sources=same.sources, record=same.record(options), draft=draft, same=same), output)


@dataclass(frozen=True)
class _Mixing:
    """The entries of a merge, in the dtype in which they are written; memory for inputs is used again and again."""

    same: Same
    mix: Callable[[Tensor, Tensor], Tensor]
    chosen: torch.dtype | None
    sliced: bool
    of_thread: threading.local = field(default_factory=threading.local)

    def entries(self, name: str, start: int, stop: int) -> Tensor:
        same = self.same
        if not same.a.info(name).dtype.is_floating_point:
            return self._shaped(name, same.a.entries(name, start, stop))
        memory = self._memory() if self.sliced else (None, None)
        a, b = (self._shaped(name, model.entries(name, start, stop, into)) for model, into in
                zip((same.a, same.b), memory, strict=True))  # fmt: skip
        dtype = same.dtype(name, self.chosen)
        mixed = self.mix(*_computable(a, b, dtype, self.sliced)).to(dtype)
        return mixed if is_finite(mixed) else self._with_limits(name, mixed, a, b)

    def _shaped(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self.sliced else tensor.view(self.same.a.info(name).shape)

    def _memory(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self.of_thread, "memory"):
            size = SLICE * torch.float64.itemsize
            self.of_thread.memory = tuple(torch.empty(size, dtype=torch.uint8) for _ in range(2))
        return self.of_thread.memory

    def _with_limits(self, name: str, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """What is infinite in both models is a limit that nothing reaches, and stays. Only what is written is looked
        at: any other entry of an input that is not finite makes one there."""
        limits = a.isinf() & (a == b)
        mixed = a.to(mixed.dtype).where(limits, mixed)
        if is_finite(mixed[~limits]):
            return mixed
        for model, tensor in zip((self.same.a, self.same.b), (a, b), strict=True):
            require_finite(name, tensor, model.info(name).shard)
        raise CheckpointError(f"{name} has entries that {mixed.dtype} cannot hold; choose another --dtype")


def _computable(a: Tensor, b: Tensor, dtype: torch.dtype, elementwise: bool) -> tuple[Tensor, Tensor]:
    """Both in the dtype to compute in.

    An elementwise method on low precision computes in float32 and rounds once, which torch does entry by entry where
    all three dtypes are one; copies in float32 of the whole slice would come to the same.
    """
    if elementwise and a.dtype == b.dtype == dtype:
        return a, b
    common = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(common), b.to(common)


def _layout(checkpoint: Checkpoint) -> dict[str, tuple[tuple[int, ...], bool]]:
    """The shape of every tensor, and whether it has floating point numbers."""
    infos = {name: checkpoint.info(name) for name in checkpoint}
    return {name: (info.shape, info.dtype.is_floating_point) for name, info in infos.items()}


def _described(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a config says of the architecture, and the modelling code beside it."""
    code = {file.name: file.read_bytes() for file in folder.glob("*.py") if file.is_file()}
    return {key: value for key, value in config.items() if key not in NOTED}, code


def _same_weights(
    refs: tuple[str, str], folders: list[Path], stored: tuple[Checkpoint, Checkpoint], trust_remote_code: bool
) -> bool:
    """Whether two configs ask for the same weights, as both models store them; one that does not describes others.

    Raises:
        IncompatibleModels: the models compute differently.
        HfAlignError: there is no modelling code that would tell.
    """
    from hf_align.opening.agreement import require_same_function
    from hf_align.tracing.budget import Budget, within
    from hf_align.tracing.build import build_without_weights, inventory, read_config

    a, b = (read_config(folder, trust_remote_code=trust_remote_code) for folder in folders)
    asked = []
    for ref, config, checkpoint in zip(refs, (a, b), stored, strict=True):
        with within(Budget.of_stored(len(checkpoint), checkpoint.entries_in_all), ref):
            asked.append(inventory(build_without_weights(config)).shapes)
    require_same_function(refs, a, b)
    return asked[0] == asked[1]


def _require_parts_alone(ref: str, model: AdaptedCheckpoint, trust_remote_code: bool) -> None:
    """As `require_parts_alone`; only the modelling code knows what is tied."""
    from hf_align.checkpoints.naming import match_names
    from hf_align.opening.models import require_parts_alone
    from hf_align.tracing.budget import Budget, within
    from hf_align.tracing.build import build_without_weights, inventory, read_config

    with within(Budget.of_stored(len(model), model.entries_in_all), ref):
        built = build_without_weights(read_config(model.folder, trust_remote_code=trust_remote_code))
    ties = inventory(built).ties
    require_parts_alone(ref, model, match_names(built, model, ties, {}), ties)


def _kind(config: dict[str, Any]) -> tuple[Any, Any]:
    return config.get("model_type"), config.get("architectures")
