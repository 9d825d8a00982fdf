"""Merging two checkpoints as they are: without alignment no basis need be known, so no model is built or traced.

Entry belongs to entry wherever both store the same tensors, also where the modelling code would fuse or rename them.
Methods that look at one entry at a time are computed in slices that fit into a processor's cache, in several threads,
from the files of the inputs into their place in the file of the output.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_align.checkpoints.adapters import adapted
from hf_align.checkpoints.checkpoint import Checkpoint, is_finite, require_finite
from hf_align.checkpoints.companions import require_same_vocabulary, write_companions
from hf_align.checkpoints.hub import Source as ModelSource
from hf_align.checkpoints.hub import resolve
from hf_align.checkpoints.shards import ShardPlan, Source, claimed, write_with_bar
from hf_align.errors import CheckpointError
from hf_align.merging.tensors import ELEMENTWISE, TENSORWISE
from hf_align.options import Options
from hf_align.outcome import Report
from hf_align.publishing.card import document

SLICE = 2**19
"""Entries at a time: two inputs and an output in bfloat16 are 3 MiB."""


@dataclass(frozen=True)
class Same:
    """Two checkpoints that store the same tensors of one architecture."""

    sources: tuple[ModelSource, ModelSource]
    a: Checkpoint
    b: Checkpoint
    config: dict[str, Any]

    @classmethod
    def open(cls, a: str, b: str) -> Same | None:
        """Open both; None if they are not alike, so that only the modelling code can tell whether they fit.

        Args:
            a, b: folders or Hub references.

        Raises:
            HfAlignError: a reference that leads nowhere, damaged files, different vocabularies.
        """
        sources = resolve(a), resolve(b)
        folders = [source.folder for source in sources]
        configs = [_config(folder) for folder in folders]
        if configs[0] is None or configs[1] is None or _kind(configs[0]) != _kind(configs[1]):
            return None
        require_same_vocabulary((a, b), folders)
        first, second = (Checkpoint.open(source.folder, source.shards) for source in sources)
        try:
            first, second = (adapted(c, source) for c, source in zip((first, second), sources, strict=True))
        except CheckpointError:  # the modelling code may know what an adapter's names stand for
            return None
        if {n: first.info(n).shape for n in first} != {n: second.info(n).shape for n in second}:
            return None
        return cls(sources, first, second, configs[0])

    def dtype(self, name: str, chosen: torch.dtype | None) -> torch.dtype:
        """Of a tensor that is written: that of A, unless another is chosen for the floating point ones."""
        found = self.a.info(name).dtype
        return chosen if chosen is not None and found.is_floating_point else found

    def plan(self, options: Options) -> ShardPlan:
        """Which tensor goes into which file."""
        tensors = [(n, self.a.info(n).shape, self.dtype(n, options.dtype)) for n in sorted(self.a)]
        return ShardPlan.build(tensors, options.max_shard_size)

    def record(self, options: Options) -> dict[str, str]:
        """What the result depends on, by name."""
        first, second = self.sources
        return options.result | self.a.record(first.reference) | self.b.record(second.reference)

    def source(self, options: Options) -> Source:
        """The entries of the merge."""
        mix, weight = TENSORWISE[options.method], options.weight
        if options.method not in ELEMENTWISE:
            mixing = _Mixing(self, lambda a, b: mix(a, b, weight), options.dtype, sliced=False)
            return Source(mixing.entries)
        mixing = _Mixing(self, lambda a, b: mix(a, b, weight), options.dtype, sliced=True)
        return Source(mixing.entries, SLICE, torch.get_num_threads())


def merge(
    a: str,
    b: str,
    output: Path,
    options: Options,
    say: Callable[[str], None] = lambda _: None,
    *,
    command: str = "",
) -> Report | None:
    """Write the merge of two checkpoints as they are.

    Floating point tensors are mixed, in float32 (float64 stays); all others are A's.

    Args:
        a, b: folders or Hub references.
        say: told what is going on, a line at a time.
        command: what the card says that the merge was made with.

    Returns:
        None, and nothing is written, if the two do not store the same tensors, or the method needs to know what they
        are.

    Raises:
        HfAlignError: any bad input.
    """
    began = time.monotonic()
    same = Same.open(a, b) if options.method in TENSORWISE else None
    if same is None:
        return None
    opened, plan = time.monotonic(), same.plan(options)
    if options.drop_cache:
        same.a.drop_when_read(list(same.a))
        same.b.drop_when_read([n for n in same.b if same.b.info(n).dtype.is_floating_point])
    with claimed(output, same.record(options), overwrite=options.overwrite) as claim:
        if claim.is_complete:
            say(f"{output} is already complete")
            return Report.again(output)
        say(f"writing {len(same.a)} tensors to {output}")
        write_with_bar(claim, plan, same.source(options), quiet=options.quiet)
        seconds = {"open": round(opened - began, 3), "write": round(time.monotonic() - opened, 3)}
        report = Report(str(output), str(same.config.get("model_type")), seconds)
        if claim.processes.leads:
            write_companions(output, same.a.folder, {})
            document(output, same.sources, say, command=command, strategy=options.strategy, **report.facts)
    return report


class _Mixing:
    """The entries of a merge, in the dtype in which they are written; memory for inputs is used again and again."""

    def __init__(
        self, same: Same, mix: Callable[[Tensor, Tensor], Tensor], chosen: torch.dtype | None, *, sliced: bool
    ) -> None:
        self._same = same
        self._mix = mix
        self._chosen = chosen
        self._sliced = sliced
        self._of_thread = threading.local()

    def entries(self, name: str, start: int, stop: int) -> Tensor:
        same = self._same
        if not same.a.info(name).dtype.is_floating_point:
            return self._shaped(name, same.a.entries(name, start, stop))
        memory = self._memory() if self._sliced else (None, None)
        a, b = (self._shaped(name, model.entries(name, start, stop, into)) for model, into in
                zip((same.a, same.b), memory, strict=True))  # fmt: skip
        dtype = same.dtype(name, self._chosen)
        mixed = self._mix(*_computable(a, b, dtype, self._sliced)).to(dtype)
        if not is_finite(mixed):
            self._blame(name, a, b, dtype)
        return mixed

    def _shaped(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self._sliced else tensor.view(self._same.a.info(name).shape)

    def _memory(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self._of_thread, "memory"):
            size = SLICE * torch.float64.itemsize
            self._of_thread.memory = tuple(torch.empty(size, dtype=torch.uint8) for _ in range(2))
        return self._of_thread.memory

    def _blame(self, name: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
        """Only what is written is looked at: one bad entry of an input makes one there."""
        for model, tensor in zip((self._same.a, self._same.b), (a, b), strict=True):
            require_finite(name, tensor, model.info(name).shard)
        raise CheckpointError(f"{name} has entries that {dtype} cannot hold; choose another --dtype")


def _computable(a: Tensor, b: Tensor, dtype: torch.dtype, elementwise: bool) -> tuple[Tensor, Tensor]:
    """Both in the dtype to compute in.

    An elementwise method on low precision computes in float32 and rounds once, which torch does entry by entry where
    all three dtypes are one; copies in float32 of the whole slice would come to the same.
    """
    if elementwise and a.dtype == b.dtype == dtype:
        return a, b
    common = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(common), b.to(common)


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _kind(config: dict[str, Any]) -> tuple[Any, Any]:
    return config.get("model_type"), config.get("architectures")
