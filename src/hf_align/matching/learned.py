"""Learned matching (Theus et al., arXiv 2506.22712, algorithm 1): gradient descent on the loss between two models.

From the weight match, every step draws a mixing weight λ, merges A with the moved B, and moves the elements along the
gradient of the merged network's loss. Orthogonal maps, head elements and scales move on their groups; permutations
move through latent matrices. The function of B is untouched at every step: only its basis moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from hf_align.errors import HfAlignError
from hf_align.matching.balanced import Balanced
from hf_align.matching.latent import Arranging, Latent, Stretching, Turning
from hf_align.matching.objectives import Objective
from hf_align.matching.schedule import Schedule
from hf_align.matching.steepest import Steepest
from hf_align.running.network import Network
from hf_align.symmetry.action import Elements, act
from hf_align.symmetry.elements import Element, Monomial
from hf_align.symmetry.groups import Group, ScaledPermutation

Draw = Callable[[Generator], float]
Progress = Callable[[int, float], None]


def _uniform(low: float, high: float) -> Draw:
    return lambda rng: low + (high - low) * float(torch.rand((), generator=rng))


MIXING: dict[str, Draw] = {
    "narrow": _uniform(0.4, 0.6),
    "uniform": _uniform(0.0, 1.0),
    "middle": lambda rng: 0.5,
}
"""Where on the line the loss is taken: around the middle, anywhere, or at the middle alone."""


@dataclass(frozen=True)
class State:
    """Where a descent keeps how far it got, and what it is made of: only a run of the same goes on from there."""

    path: Path
    made_of: str


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
        state: a run that was killed goes on from there; the file is removed at the end.
        progress: called after each step with its number and the loss.

    Raises:
        HfAlignError: the loss is not finite.
    """
    first, *others = (network.placed(m) for m in models.models)
    latents = [dict(_latents(models, elements, schedule, network.device)) for elements in start]
    run = _Run(latents, schedule, state)
    for step in run.steps():
        moved = [first]
        for weights, elements, moving in zip(others, start, latents, strict=True):
            present = {**elements, **{s: latent.element() for s, latent in moving.items()}}
            moved.append({n: act(t, n, models.spec, present) for n, t in weights.items()})
        shares = _shares(schedule, len(moved), run.rng)
        merged = {n: _sum(share * w[n] for share, w in zip(shares, moved, strict=True)) for n in first}
        loss = objective.loss(network, merged, schedule.rows, run.rng)
        if not bool(loss.isfinite()):
            raise HfAlignError(f"the loss is not finite at step {step}; try a smaller rate")
        run.move(loss)
        if progress is not None:
            progress(step + 1, loss.item())
    return [
        {**elements, **{s: latent.settled(_group(models, s)) for s, latent in moving.items()}}
        for elements, moving in zip(start, latents, strict=True)
    ]


def _shares(schedule: Schedule, count: int, rng: Generator) -> list[float]:
    """What each model contributes: 1-λ and λ for two; for more, as near to equal shares as λ is to a half."""
    if count == 2:
        at = MIXING[schedule.mixing](rng)
        return [1 - at, at]
    drawn = [MIXING[schedule.mixing](rng) for _ in range(count)]
    return [x / sum(drawn) for x in drawn]


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    """Σ, without a zero to start from."""
    return functools.reduce(torch.add, tensors)


def _latents(
    models: Balanced, start: Elements, schedule: Schedule, device: torch.device
) -> Iterator[tuple[str, Latent]]:
    for name, element in start.items():
        group = _group(models, name)
        if not isinstance(group, ScaledPermutation):
            yield name, Turning(group, element, device, schedule.stretching)
        elif isinstance(element, Monomial) and schedule.order_rate and group.permutes:
            yield name, Arranging(group, element, device)
        elif isinstance(element, Monomial):
            yield name, Stretching(group, element, device)


def _group(models: Balanced, space: str) -> Group:
    group = models.spec.spaces[space].group
    assert group is not None
    return group


class _Run:
    """The optimiser's side of a descent, with its state on disk."""

    def __init__(self, latents: Sequence[Mapping[str, Latent]], schedule: Schedule, state: State | None) -> None:
        self._latents = [latent for moving in latents for latent in moving.values()]
        self._schedule = schedule
        self._state = state
        self.rng = Generator().manual_seed(schedule.seed)
        turns = [t for x in self._latents for t in x.turns]
        single = [{"params": [t], "rate": schedule.stretch_rate} for x in self._latents for t in x.stretches]
        single += [{"params": [t], "rate": schedule.order_rate} for x in self._latents for t in x.choices]
        self._optimisers: list[torch.optim.Optimizer] = []
        if turns:
            self._optimisers.append(Steepest([{"params": turns, "rate": schedule.rate}]))
        if single:
            self._optimisers.append(torch.optim.Adam(single, betas=(0.9, 0.95)))

    def steps(self) -> Iterator[int]:
        """The steps that are left; the state is written on the way, and removed at the end."""
        for step in range(self._resumed(), self._schedule.steps):
            for group in (g for o in self._optimisers for g in o.param_groups):
                group["lr"] = group["rate"] * self._schedule.pace(step)
            yield step
            if self._state is not None and (step + 1) % self._schedule.checkpoint_every == 0:
                self._save(self._state, step + 1)
        if self._state is not None:
            self._state.path.unlink(missing_ok=True)

    def move(self, loss: Tensor) -> None:
        """One step down."""
        for optimiser in self._optimisers:
            optimiser.zero_grad()
        loss.backward()
        for optimiser in self._optimisers:
            optimiser.step()
        for latent in self._latents:
            latent.retract()

    def _save(self, state: State, step: int) -> None:
        state.path.parent.mkdir(parents=True, exist_ok=True)
        partial = state.path.with_suffix(".partial")
        torch.save({"step": step, "made_of": self._made_of(state), "rng": self.rng.get_state(),
                    "optimisers": [o.state_dict() for o in self._optimisers],
                    "latents": [x.state() for x in self._latents]}, partial)  # fmt: skip
        partial.replace(state.path)

    def _resumed(self) -> int:
        """The step to go on from."""
        if self._state is None or not self._state.path.exists():
            return 0
        saved: dict[str, Any] = torch.load(self._state.path, weights_only=True)
        if saved["made_of"] != self._made_of(self._state):
            return 0
        for latent, kept in zip(self._latents, saved["latents"], strict=True):
            latent.restore(kept)
        for optimiser, kept in zip(self._optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.rng.set_state(saved["rng"])
        return int(saved["step"])

    def _made_of(self, state: State) -> str:
        return f"{state.made_of} {self._schedule!r}"
