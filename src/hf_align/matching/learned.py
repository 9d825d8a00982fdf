"""Learned matching (Theus et al., arXiv 2506.22712, algorithm 1): gradient descent on the loss between two models.

From the weight match, every step draws a mixing weight λ, merges A with the moved B, and moves the elements along the
gradient of the merged network's loss. Orthogonal maps, head elements and scales move on their groups; permutations
move through latent matrices. The function of B is untouched at every step: only its basis moves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from hf_align.matching.balanced import Balanced
from hf_align.matching.descent import Descent, Progress, State
from hf_align.matching.latent import Arranging, Latent, Stretching, Turning
from hf_align.matching.objectives import Objective
from hf_align.matching.steepest import Steepest
from hf_align.running.network import Network
from hf_align.settings.schedule import Schedule
from hf_align.symmetry.action import Elements, act
from hf_align.symmetry.elements import Element, Monomial
from hf_align.symmetry.groups import ScaledPermutation


def learn(
    models: Balanced,
    start: Sequence[Elements],
    network: Network,
    objective: Objective,
    schedule: Schedule,
    *,
    state: State | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Element]]:
    """The elements for all balanced models but the first that a descent on the merged loss finds.

    Args:
        start: where it begins, for each model but the first; every space that moves named.

    Raises:
        HfAlignError: the loss is not finite.
    """
    first, *others = (network.placed(m) for m in models.models)
    latents = [dict(_latents(models, elements, schedule, network.device)) for elements in start]

    def loss(rng: Generator) -> Tensor:
        moved = [first]
        for weights, elements, moving in zip(others, start, latents, strict=True):
            present = {**elements, **{s: latent.element() for s, latent in moving.items()}}
            moved.append({n: act(t, n, models.spec, present) for n, t in weights.items()})
        shares = schedule.shares(len(moved), rng)
        merged = {n: functools.reduce(torch.add, (s * w[n] for s, w in zip(shares, moved, strict=True))) for n in first}
        return objective.loss(network, merged, schedule.rows, rng)

    all_latents = [latent for moving in latents for latent in moving.values()]
    Descent(all_latents, _optimisers(all_latents, schedule), schedule, state).run(loss, progress)
    return [
        {**elements, **{s: latent.resolved(models.spec.group(s)) for s, latent in moving.items()}}
        for elements, moving in zip(start, latents, strict=True)
    ]


def _latents(
    models: Balanced, start: Elements, schedule: Schedule, device: torch.device
) -> Iterator[tuple[str, Latent]]:
    for name, element in start.items():
        group = models.spec.group(name)
        if not isinstance(group, ScaledPermutation):
            yield name, Turning(group, element, device, schedule.stretching)
        elif isinstance(element, Monomial) and schedule.order_rate and group.permutes:
            yield name, Arranging(group, element, device)
        elif isinstance(element, Monomial):
            yield name, Stretching(group, element, device)


def _optimisers(latents: Sequence[Latent], schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Steps of even length along matrices; a rate for each factor, and for each entry of a latent matrix."""
    turns = [t for x in latents for t in x.turns]
    single = [{"params": [t], "rate": schedule.stretch_rate} for x in latents for t in x.stretches]
    single += [{"params": [t], "rate": schedule.order_rate} for x in latents for t in x.choices]
    found: list[torch.optim.Optimizer] = []
    if turns:
        found.append(Steepest([{"params": turns, "rate": schedule.rate}]))
    if single:
        found.append(torch.optim.Adam(single, betas=(0.9, 0.95)))
    return found
