"""Descents that a job takes once: what a run with the same record has found is used again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_align.checkpoints.claim import Claim
from hf_align.jobs.opened import Opened
from hf_align.matching.descent import State
from hf_align.matching.find import searching
from hf_align.merging.distil import TowardsMix, distilled
from hf_align.ondemand import Computed
from hf_align.running.generate import own_inputs, writes
from hf_align.running.network import Batch, Weights
from hf_align.tracing.trace import build_without_weights

_DISTILLED = "distilled.safetensors"
_WRITTEN, _LENGTH = 4096, 64
"""Sequences that each model writes, and tokens of each."""


def once(claim: Claim, file: str, find: Callable[[State], dict[str, Tensor]]) -> Mapping[str, Tensor]:
    """What a descent finds, by name; by the process that leads.

    Args:
        file: what it is kept as.
        find: goes on from a state, and keeps how far it got there.
    """
    with claim.processes.together():
        if claim.processes.leads and claim.kept(file) is None:
            state = State(claim.progress, made_of=f"{file} {claim.record!r}")
            claim.keep(file, partial(save_file, find(state)))
            claim.progress.unlink(missing_ok=True)
    path = claim.kept(file)
    assert path is not None
    return load_file(path)


def distil_once(
    claim: Claim,
    models: Opened,
    start: Weights,
    sources: Sequence[Weights],
    shares: Sequence[float],
    inputs: Sequence[Batch],
) -> Mapping[str, Tensor]:
    """The weights that a descent towards a mix of models ends at, float32, by name.

    Args:
        start: of the descent, by name in memory.
        sources, shares: what the teacher is a mix of.
        inputs: of the descent, without labels.
    """
    network, names, search = models.network, models.first.spec.parameters, models.search()

    def find(state: State) -> dict[str, Tensor]:
        placed = [network.placed(Computed(names, weights.__getitem__)) for weights in (start, *sources)]
        objective = TowardsMix(placed[1:], shares, inputs)
        with searching(search, "distilling") as progress:
            return distilled(placed[0], network, objective, search.schedule, state=state, progress=progress)

    return once(claim, _DISTILLED, find)


def written_by(models: Opened, authors: Sequence[Weights], data: Batch | None) -> list[Batch]:
    """Inputs of a descent: the data, and what each of some models writes; without data, noise where none writes."""
    network, names = models.network, models.first.spec.parameters
    given = [] if data is None else [{k: t for k, t in data.items() if k != "labels"}]
    if given and not writes(build_without_weights(network.config)):
        return given
    each = [own_inputs(network, network.placed(Computed(names, weights.__getitem__)), _WRITTEN, _LENGTH, seed)
            for seed, weights in enumerate(authors, start=2)]  # fmt: skip
    # A text is one of many that the merged model will meet, and a short one is soon known by heart.
    return [*given, {k: torch.cat([batch[k] for batch in each]) for k in each[0]}]
