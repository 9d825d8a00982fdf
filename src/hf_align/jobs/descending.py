"""Descents that a job takes once: what a run with the same record has found is used again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from hf_align.checkpoints.claim import Claim
from hf_align.jobs.opened import Opened
from hf_align.matching.descent import State
from hf_align.matching.find import searching
from hf_align.matching.objectives import Objective
from hf_align.merging.distil import Limits, TowardsMix, distilled, nearest, written_by
from hf_align.running.network import Batch, Weights
from hf_align.runtime.saving import read_tensors, save_tensors

_DISTILLED, _NEAREST, _START = "distilled.safetensors", "nearest.safetensors", "start"


def once(claim: Claim, file: str, find: Callable[[State], Callable[[Path], None]]) -> Path:
    """The file of what a descent finds; by the process that leads.

    Args:
        file: what it is kept as.
        find: goes on from a state, keeps how far it got there, and returns what writes the file.
    """
    with claim.processes.together():
        if claim.processes.leads and claim.kept(file) is None:
            state = State(claim.progress, made_of=f"{file} {claim.record!r}")
            claim.keep(file, find(state))
            claim.progress.unlink(missing_ok=True)
    path = claim.kept(file)
    assert path is not None
    return path


def distil_once(
    claim: Claim,
    models: Opened,
    starts: Mapping[str, Weights],
    towards: Callable[[], Objective],
    limits: Limits | None = None,
) -> tuple[str, Mapping[str, Tensor]]:
    """Which start a descent took, and the weights that it ends at, float32, by name.

    Args:
        starts: what it may start from, by what they are called, each by name in memory; the one with the lowest
            objective is taken.
        towards: makes the objective, if it is not known yet where it leads.
        limits: as `distilled` takes them, not placed.
    """
    network, search = models.network, models.search()

    def find(state: State) -> Callable[[Path], None]:
        objective = towards()
        called = nearest(starts, network, objective)
        start = network.placed(starts[called])
        held = None if limits is None else replace(limits, around=network.placed(limits.around))
        with searching(search, "distilling") as progress:
            found = distilled(start, network, objective, search.schedule, limits=held, state=state, progress=progress)
        return partial(save_tensors, found, metadata={_START: called})

    path = once(claim, _DISTILLED, find)
    with safe_open(path, "pt") as file:
        return file.metadata()[_START], read_tensors(path)


def nearest_once(
    claim: Claim,
    models: Opened,
    starts: Mapping[str, Weights],
    towards: Callable[[], Objective],
) -> str:
    """What the start with the lowest objective is called.

    Args:
        starts, towards: as `distil_once` takes them.
    """

    def find(_: State) -> Callable[[Path], None]:
        called = nearest(starts, models.network, towards())
        return partial(save_tensors, {}, metadata={_START: called})

    with safe_open(once(claim, _NEAREST, find), "pt") as file:
        return str(file.metadata()[_START])


def towards_mix(
    models: Opened, sources: Sequence[Weights], shares: Sequence[float], data: Batch | None, count: int
) -> TowardsMix:
    """Towards Σ s·log p of some models, on the data and on `count` sequences that each of them writes."""
    held = [models.network.placed(weights) for weights in sources]
    return TowardsMix(held, shares, written_by(models.network, held, data, count))
