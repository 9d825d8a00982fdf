"""Descents that a job takes once: what a run with the same record has found is used again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.ondemand import Computed
from hf_align.jobs.opened import Opened
from hf_align.matching.descent import State
from hf_align.matching.find import searching
from hf_align.matching.objectives import Objective
from hf_align.merging.distil import TowardsMix, distilled, nearest
from hf_align.running.generate import own_inputs, writes
from hf_align.running.network import Batch, Weights
from hf_align.tracing.build import build_without_weights

_DISTILLED, _START = "distilled.safetensors", "start"
_WRITTEN, _LENGTH = 4096, 64
"""Sequences that each model writes, and tokens of each."""


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
) -> tuple[str, Mapping[str, Tensor]]:
    """Which start a descent took, and the weights that it ends at, float32, by name.

    Args:
        starts: what it may start from, by what they are called, each by name in memory; the one with the lowest
            objective is taken.
        towards: makes the objective, if it is not known yet where it leads.
    """
    network, search = models.network, models.search()

    def find(state: State) -> Callable[[Path], None]:
        objective = towards()
        called = nearest({what: placed(models, weights) for what, weights in starts.items()}, network, objective)
        with searching(search, "distilling") as progress:
            found = distilled(
                placed(models, starts[called]), network, objective, search.schedule, state=state, progress=progress
            )
        return partial(save_file, found, metadata={_START: called})

    path = once(claim, _DISTILLED, find)
    with safe_open(path, "pt") as file:
        return file.metadata()[_START], load_file(path)


def placed(models: Opened, weights: Weights) -> Weights:
    """Weights by name in memory, as the models' network runs with them."""
    return models.network.placed(Computed(models.first.spec.parameters, weights.__getitem__))


def towards_mix(models: Opened, sources: Sequence[Weights], shares: Sequence[float], data: Batch | None) -> TowardsMix:
    """Towards Σ s·log p of some models, on the data and on what each of them writes."""
    return TowardsMix([placed(models, weights) for weights in sources], shares, written_by(models, sources, data))


def written_by(models: Opened, authors: Sequence[Weights], data: Batch | None) -> list[Batch]:
    """Inputs of a descent: the data, and what each of some models writes; without data, noise where none writes."""
    network = models.network
    given = [] if data is None else [{k: t for k, t in data.items() if k != "labels"}]
    if given and not writes(build_without_weights(network.config)):
        return given
    each = [own_inputs(network, placed(models, weights), _WRITTEN, _LENGTH, seed)
            for seed, weights in enumerate(authors, start=2)]  # fmt: skip
    # A text is one of many that the merged model will meet, and a short one is soon known by heart.
    return [*given, {k: torch.cat([batch[k] for batch in each]) for k in each[0]}]
