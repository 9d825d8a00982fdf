"""Merging two checkpoints as they are: without alignment no basis need be known, so no model is built or traced.

Only where their configs differ must the modelling code say whether that matters. Entry belongs to entry wherever both
store the same tensors, also where it would fuse or rename them. Methods that look at one entry at a time are computed
by numpy, for to load torch takes longer than to mix most models: in slices, in several threads, from the files of the
inputs into their place in the file of the output.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.companions import require_same_vocabulary
from hf_align.checkpoints.dtypes import F64, Dtype, Raw
from hf_align.checkpoints.floats import is_finite, require_finite, rounded, widened
from hf_align.checkpoints.hub import Source as ModelSource
from hf_align.checkpoints.hub import resolve
from hf_align.checkpoints.own_files import own_json
from hf_align.checkpoints.plan import ShardPlan
from hf_align.checkpoints.shards import Block, Source
from hf_align.checkpoints.stored import Stored
from hf_align.errors import CheckpointError
from hf_align.jobs.job import Asked, Draft, Job, run
from hf_align.merging.lerp import lerp
from hf_align.merging.tensors import ELEMENTWISE, TENSORWISE
from hf_align.options import Options
from hf_align.outcome import Report

SLICE = 2**19
"""Entries that are read and written at a time: two inputs and an output in bfloat16 are 3 MiB."""
_COMPUTED = 2**16
"""Entries that are computed at a time: what lies between stays in a processor's cache."""
_NOTED = ("transformers_version", "dtype", "torch_dtype", "_name_or_path")
"""What is noted in a config when a model is saved, whatever it is."""
_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Same:
    """Two checkpoints that store the same tensors of one architecture."""

    sources: tuple[ModelSource, ModelSource]
    a: Stored
    b: Stored
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
        require_same_vocabulary((a, b), folders)
        if configs[0].get(_TIED) != configs[1].get(_TIED):
            return None
        first, second = (Stored.open(source.folder, source.shards) for source in sources)
        try:
            first, second = (_adapted(s, source) for s, source in zip((first, second), sources, strict=True))
        except CheckpointError:  # the modelling code may know what an adapter's names stand for
            return None
        if _layout(first) != _layout(second):
            return None
        if _described(configs[0], folders[0]) != _described(configs[1], folders[1]):
            _require_same_function((a, b), folders, (first, second), trust_remote_code)
        return cls(sources, first, second, configs[0])

    def agrees_outside_floats(self) -> bool:
        """Whether masks, tables and counters are the same; if not, only the modelling code knows which are read."""
        whole = (n for n in self.a if not self.a.info(n).dtype.is_floating_point)
        return all(np.array_equal(_integers(self.a, n), _integers(self.b, n)) for n in whole)

    def dtype(self, name: str, options: Options) -> Dtype:
        """Of a tensor that is written: that of A, unless another is chosen for the floating point ones."""
        found = self.a.info(name).dtype
        return options.stored_dtype if options.stored_dtype is not None and found.is_floating_point else found

    def plan(self, options: Options) -> ShardPlan:
        """Which tensor goes into which file."""
        tensors = [(n, self.a.info(n).shape, self.dtype(n, options)) for n in sorted(self.a)]
        return ShardPlan.build(tensors, options.max_shard_size)

    def record(self, options: Options) -> dict[str, str]:
        """What the result depends on, by name."""
        inputs = zip("AB", (self.a, self.b), self.sources, strict=True)
        parts = {k: v for role, model, s in inputs for k, v in model.record(f"{role}: {s.reference}").items()}
        return {"the command": "merge", **options.result, **parts}

    def source(self, options: Options) -> Source:
        """The entries of the merge."""
        if options.method in ELEMENTWISE:
            return Source(_Mixing(self, options).entries, SLICE, threads())
        return Source(lambda name, start, stop: _mixed_whole(self, options, name))


@dataclass(frozen=True, kw_only=True)
class Plain(Job[None]):
    """A merge whose alignment is the identity: it needs no basis."""

    same: Same

    def match(self, claim: Claim) -> None:
        """There is nothing to match."""

    def entries(self, claim: Claim, match: None) -> Source:
        same = self.same
        if self.options.drop_cache:
            same.a.drop_when_read(list(same.a))
            same.b.drop_when_read([n for n in same.b if same.b.info(n).dtype.is_floating_point])
        return same.source(self.options)

    def report(self, output: Path, match: None) -> Report:
        return Report(str(output), str(self.same.config.get("model_type")))


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
    draft = Draft(same.plan(options), same.a.folder)
    job = Plain(asked=asked, sources=same.sources, record=same.record(options), draft=draft,
                same=same)  # fmt: skip
    return run(job, output)


class _Mixing:
    """The entries of a merge, in the dtype in which they are written; memory for inputs is used again and again."""

    def __init__(self, same: Same, options: Options) -> None:
        self._same = same
        self._options = options
        self._of_thread = threading.local()

    def entries(self, name: str, start: int, stop: int) -> Block:
        same, shape = self._same, (stop - start,)
        if not same.a.info(name).dtype.is_floating_point:
            return Block(same.a.info(name).dtype, shape, same.a.raw(name, start, stop))
        a, b = (model.raw(name, start, stop, into) for model, into in
                zip((same.a, same.b), self._memory(), strict=True))  # fmt: skip
        dtype = same.dtype(name, self._options)
        mixed = _mixed(a, b, (same.a.info(name).dtype, same.b.info(name).dtype), dtype, self._options.weight)
        _require_held(same, name, a, b, mixed, dtype)
        return Block(dtype, shape, mixed)

    def _memory(self) -> tuple[Raw, Raw]:
        if not hasattr(self._of_thread, "memory"):
            size = SLICE * F64.itemsize
            self._of_thread.memory = tuple(np.empty(size, np.uint8) for _ in range(2))
        return self._of_thread.memory


def _mixed(a: Raw, b: Raw, stored: tuple[Dtype, Dtype], dtype: Dtype, weight: float) -> Raw:
    """The means of entries of two dtypes: in float32, or float64 where one of them is, and rounded once."""
    count = len(a) // stored[0].itemsize
    mixed = np.empty(count * dtype.itemsize, np.uint8)
    for start in range(0, count, _COMPUTED):
        stop = min(count, start + _COMPUTED)
        x, y = (widened(_part(raw, found, start, stop), found) for raw, found in zip((a, b), stored, strict=True))
        common = np.promote_types(x.dtype, y.dtype)
        x, y = (entries.astype(common, copy=False) for entries in (x, y))
        _part(mixed, dtype, start, stop)[:] = rounded(lerp(x, y, weight), dtype)
    return mixed


def _part(raw: Raw, dtype: Dtype, start: int, stop: int) -> Raw:
    return raw[start * dtype.itemsize : stop * dtype.itemsize]


def _mixed_whole(same: Same, options: Options, name: str) -> Block:
    """A tensor mixed by a method that looks at all of it, as the same method mixes models that are aligned: by torch,
    for its sums are other sums than numpy's."""
    import torch

    from hf_align.checkpoints.checkpoint import tensor_of

    infos, raw = [model.info(name) for model in (same.a, same.b)], [_whole(model, name) for model in (same.a, same.b)]
    if not infos[0].dtype.is_floating_point:
        return Block(infos[0].dtype, infos[0].shape, raw[0])
    a, b = (tensor_of(r, info.dtype).view(info.shape) for r, info in zip(raw, infos, strict=True))
    common = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    dtype = same.dtype(name, options)
    mixed = TENSORWISE[options.method](a.to(common), b.to(common), options.weight).to(dtype.in_torch)
    block = Block.of(mixed)
    _require_held(same, name, raw[0], raw[1], block.raw, dtype)
    return block


def _require_held(same: Same, name: str, a: Raw, b: Raw, mixed: Raw, dtype: Dtype) -> None:
    """See that what is written is finite. Only that is looked at: one bad entry of an input makes one there.

    Raises:
        CheckpointError: it is not.
    """
    if is_finite(mixed, dtype):
        return
    for model, raw in ((same.a, a), (same.b, b)):
        require_finite(name, raw, model.info(name).dtype, model.info(name).shard)
    raise CheckpointError(f"{name} has entries that {dtype} cannot hold; choose another --dtype")


def threads() -> int:
    """How many compute at once: as torch would, one for each core, or as the environment says."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else len(os.sched_getaffinity(0))


def _adapted(stored: Stored, source: ModelSource) -> Stored:
    """The tensors of a model with its adapter, if it has one, whose products are torch's.

    Raises:
        CheckpointError: as `adapted`.
    """
    if source.adapter is None:
        return stored
    from hf_align.checkpoints.adapters import adapted
    from hf_align.checkpoints.checkpoint import Checkpoint

    return adapted(Checkpoint.open(source.folder, source.shards), source)


def _integers(stored: Stored, name: str) -> NDArray[Any]:
    return _whole(stored, name).view(stored.info(name).dtype.bits)


def _whole(stored: Stored, name: str) -> Raw:
    return stored.raw(name, 0, math.prod(stored.info(name).shape))


def _layout(checkpoint: Stored) -> dict[str, tuple[tuple[int, ...], bool]]:
    """The shape of every tensor, and whether it has floating point numbers."""
    infos = {name: checkpoint.info(name) for name in checkpoint}
    return {name: (info.shape, info.dtype.is_floating_point) for name, info in infos.items()}


def _described(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a config says of the architecture, and the modelling code beside it."""
    code = {file.name: file.read_bytes() for file in folder.glob("*.py") if file.is_file()}
    return {key: value for key, value in config.items() if key not in _NOTED}, code


def _require_same_function(
    refs: tuple[str, str], folders: list[Path], stored: tuple[Stored, Stored], trust_remote_code: bool
) -> None:
    """As for models that are aligned.

    Raises:
        IncompatibleModels: the models compute differently.
        HfAlignError: there is no modelling code that would tell.
    """
    from hf_align.agreement import require_same_function
    from hf_align.tracing.budget import Budget, within
    from hf_align.tracing.trace import build_without_weights, read_config

    a, b = (read_config(folder, trust_remote_code=trust_remote_code) for folder in folders)
    for ref, config, checkpoint in zip(refs, (a, b), stored, strict=True):
        with within(Budget.of_stored(len(checkpoint), checkpoint.entries_in_all), ref):
            build_without_weights(config)
    require_same_function(refs, a, b)


def _kind(config: dict[str, Any]) -> tuple[Any, Any]:
    return config.get("model_type"), config.get("architectures")
