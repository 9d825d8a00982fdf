"""What a merge would do, from configs, indexes and headers alone: no weights are read, and none are fetched.

Modelling code takes seconds to load. What needs it is imported where it is called, so that a plain merge does not wait.
"""

from __future__ import annotations

import math
import shutil
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.plan import ShardPlan
from hf_align.errors import HfAlignError
from hf_align.jobs import plain
from hf_align.jobs.job import silent
from hf_align.merging.tensors import ELEMENTWISE, TENSORWISE
from hf_align.settings.options import Options

_DOUBLE = torch.float64.itemsize
_COPIES = 8
"""Of the largest tensor in float64, for methods that look at whole ones."""


@dataclass(frozen=True)
class DryRun:
    """The plan of a merge.

    Attributes:
        compatible: whether the two can be merged at all; `reason` says why not.
        spaces: group -> how many spaces have it.
        dimensions: continuous ones of all groups together.
        pinned_by_unknown_ops: op without a rule -> line of the modelling code.
        shards: files to be written, with their bytes.
        bytes_to_read: of weights, once; matching reads tensors that are not kept again in each sweep.
        bytes_to_fetch: of those, what the Hub's cache does not have yet.
        peak_bytes: the most memory taken beside the program itself (about 0.3 GiB, with modelling code 0.5 GiB).
        holds_models: whether both models are run, which takes them in float32 as well, and activations.
        largest: the tensor that this depends on.
        disk_needed, disk_free: bytes for the output, and on its disk.
    """

    compatible: bool
    reason: str | None = None
    model_type: str | None = None
    untied: bool = False
    spaces: dict[str, int] = field(default_factory=dict)
    dimensions: int = 0
    pinned_by_unknown_ops: dict[str, str] = field(default_factory=dict)
    tensors: int = 0
    shards: dict[str, int] = field(default_factory=dict)
    bytes_to_read: int = 0
    bytes_to_fetch: int = 0
    bytes_to_write: int = 0
    peak_bytes: int = 0
    holds_models: bool = False
    largest: str | None = None
    disk_needed: int = 0
    disk_free: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def dry_run(a: str, b: str, output: Path, options: Options) -> DryRun:
    """Plan a merge; what would refuse it is its `reason`."""
    try:
        plainly = options.match == "none" and options.method in TENSORWISE
        same = plain.Same.open(a, b, trust_remote_code=options.trust_remote_code) if plainly else None
        if same is not None:
            return _plain(same, output, options)
        return _aligned(a, b, output, options)
    except HfAlignError as error:
        return DryRun(False, str(error))


def _plain(same: plain.Same, output: Path, options: Options) -> DryRun:
    return DryRun(
        True,
        model_type=str(same.config.get("model_type")),
        peak_bytes=_plain_peak(same, options),
        largest=max(same.a, key=lambda name: same.a.info(name).nbytes, default=None),
        **_traffic(same.a, same.b, same.plan(options), output),
    )


def _aligned(a: str, b: str, output: Path, options: Options) -> DryRun:
    from hf_align.jobs.opened import open_models
    from hf_align.jobs.writing import draft_of
    from hf_align.matching.memory import of_matching
    from hf_align.matching.weights import steps_of
    from hf_align.merging.methods import RUNNING
    from hf_align.runtime.devices import Devices
    from hf_align.witness.effort import memory

    pair = open_models(a, b, options, silent, lambda respelled, _: respelled)
    spec = pair.spec
    plan = draft_of(pair, pair.layout(pair.a), options).plan
    groups = Counter(s.group_name for s in spec.spaces.values())
    largest = max(spec.parameters, key=lambda name: math.prod(spec.shape(name)))
    aligned = options.witness and options.match != "none"
    witness = memory(spec, Devices.choose(options.device).running, options.offload) if aligned else 0
    return DryRun(
        True,
        model_type=spec.model_type,
        untied=pair.untied,
        spaces=dict(groups.most_common()),
        dimensions=spec.dimensions(),
        pinned_by_unknown_ops=dict(spec.unknown_ops),
        peak_bytes=max(of_matching(spec, steps_of(spec)), witness),
        holds_models=(options.match in ("activation", "learned") or options.method in RUNNING) and not options.offload,
        largest=largest,
        **_traffic(pair.a.checkpoint, pair.b.checkpoint, plan, output),
    )


def _plain_peak(same: plain.Same, options: Options) -> int:
    """The most bytes that a merge without alignment takes: some slices for each thread, or copies of a tensor."""
    if options.method in ELEMENTWISE:
        return torch.get_num_threads() * plain.SLICE * 5 * _DOUBLE
    entries = max((math.prod(same.a.info(n).shape) for n in same.a), default=0)
    return _COPIES * entries * _DOUBLE


def _traffic(a: Checkpoint, b: Checkpoint, plan: ShardPlan, output: Path) -> dict[str, Any]:
    """What is read, fetched and written."""
    written = sum(s.nbytes + len(s.header) for s in plan.shards)
    return {
        "tensors": sum(len(s.tensors) for s in plan.shards),
        "shards": {s.file: s.nbytes + len(s.header) for s in plan.shards},
        "bytes_to_read": sum(c.info(name).nbytes for c in (a, b) for name in c),
        "bytes_to_fetch": a.bytes_to_fetch + b.bytes_to_fetch,
        "bytes_to_write": written,
        "disk_needed": written,
        "disk_free": shutil.disk_usage(_existing(output)).free,
    }


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.absolute().parent)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def lines(found: DryRun) -> list[str]:
    """For people, 80 columns."""
    if not found.compatible:
        return [f"not compatible: {found.reason}"]
    groups = ", ".join(f"{count} {group}" for group, count in found.spaces.items())
    written = f"{_counted(found.tensors, 'tensor')} in {_counted(len(found.shards), 'file')}"
    held = " and both models" if found.holds_models else ""
    return [
        f"{found.model_type}: compatible{', the head is untied' if found.untied else ''}",
        *(_wrapped(f"spaces    {groups}; {found.dimensions} continuous dimensions") if groups else []),
        *(
            row
            for op, line in found.pinned_by_unknown_ops.items()
            for row in _wrapped(f"pinned    no rule for {op} ({line})")
        ),
        f"read      {_size(found.bytes_to_read)}, of which {_size(found.bytes_to_fetch)} from the Hub",
        f"write     {_size(found.bytes_to_write)}: {written}",
        f"memory    {_size(found.peak_bytes)} at most beside the program{held}; largest is",
        f"          {found.largest}",
        f"disk      {_size(found.disk_needed)} needed, {_size(found.disk_free)} free",
    ]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 80, subsequent_indent=" " * 10)


def _size(count: int) -> str:
    value, units = float(count), ["B", "KB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
