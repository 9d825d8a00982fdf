"""Going down a loss step by step, with what is needed to go on after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from hf_align.errors import HfAlignError, OptionError
from hf_align.runtime.saving import save_state
from hf_align.settings.schedule import Schedule

_AT_STAKE = 30.0
"""Seconds of work that a kill may cost, or one step where that takes longer."""
Progress = Callable[[int, float], None]
"""Called after each step with its number and the loss."""


class Moving:
    """Something that optimisers move.

    Attributes:
        kept: the attributes that say where it is.
    """

    kept: ClassVar[tuple[str, ...]]

    def retract(self) -> None:
        """Take up the optimisers' step: by default it is where they took it."""

    def state(self) -> dict[str, Tensor]:
        """Where it is, to go on from after a restart."""
        return {name: getattr(self, name).detach() for name in self.kept}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go where `state` was."""
        for name in self.kept:
            getattr(self, name).copy_(state[name])


@dataclass(frozen=True)
class State:
    """Where a descent keeps how far it got, and what it is made of: only a run of the same goes on from there.

    The file outlives the descent: it is removed when what was found has been kept.
    """

    path: Path
    made_of: str


class Descent:
    """The steps of one descent.

    Args:
        moving: what moves.
        optimisers: that move it; each of their groups of parameters has a "rate", which the schedule paces.
        state: an interrupted run resumes from there.

    Attributes:
        rng: what is random in a descent is drawn from it, and goes on after a kill as it would have without.
    """

    def __init__(
        self,
        moving: Sequence[Moving],
        optimisers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        state: State | None,
    ) -> None:
        self._moving = moving
        self._optimisers = optimisers
        self._schedule = schedule
        self._state = state
        self.rng = Generator().manual_seed(schedule.seed)
        self._saved = self._stepped = time.monotonic()

    def run(self, loss: Callable[[Generator], Tensor], progress: Progress | None = None) -> None:
        """Take all steps that are left.

        Raises:
            HfAlignError: the loss is not finite, or has no gradient.
        """
        for step in self._steps():
            found = loss(self.rng)
            if not found.requires_grad:
                raise OptionError("the loss has no gradient: it must be computed from the outputs, by torch")
            if not bool(found.isfinite()):
                raise HfAlignError(f"the loss is not finite at step {step}; try a smaller rate")
            self._move(found)
            if progress is not None:
                progress(step + 1, found.item())

    def _steps(self) -> Iterator[int]:
        """The steps that are left; the state is written on the way and at the end."""
        for step in range(self._resumed(), self._schedule.steps):
            for group in (g for o in self._optimisers for g in o.param_groups):
                group["lr"] = group["rate"] * self._schedule.pace(step)
            self._stepped = time.monotonic()
            yield step
            if self._state is not None and self._is_due(step + 1):
                self._save(self._state, step + 1)
                self._saved = time.monotonic()

    def _is_due(self, steps: int) -> bool:
        """Whether too much would be at stake when another step has been taken, as long as the last one was."""
        now = time.monotonic()
        at_stake = now - self._saved + (now - self._stepped)
        every, last = self._schedule.checkpoint_every, self._schedule.steps
        return steps % every == 0 or steps == last or at_stake > _AT_STAKE

    def _move(self, loss: Tensor) -> None:
        for optimiser in self._optimisers:
            optimiser.zero_grad()
        loss.backward()
        for optimiser in self._optimisers:
            optimiser.step()
        for moving in self._moving:
            moving.retract()

    def _save(self, state: State, step: int) -> None:
        state.path.parent.mkdir(parents=True, exist_ok=True)
        partial = state.path.with_suffix(".partial")
        save_state({"step": step, "made_of": self._made_of(state), "rng": self.rng.get_state(),
                    "optimisers": [o.state_dict() for o in self._optimisers],
                    "moving": [x.state() for x in self._moving]}, partial)  # fmt: skip
        partial.replace(state.path)

    def _resumed(self) -> int:
        """The step to go on from."""
        if self._state is None or not self._state.path.exists():
            return 0
        try:
            saved: dict[str, Any] = torch.load(self._state.path, weights_only=True)
        except Exception:  # a file that was cut off or overwritten may hold anything
            return 0
        if not isinstance(saved, dict) or saved.get("made_of") != self._made_of(self._state):
            return 0
        for moving, kept in zip(self._moving, saved["moving"], strict=True):
            moving.restore(kept)
        for optimiser, kept in zip(self._optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.rng.set_state(saved["rng"])
        return int(saved["step"])

    def _made_of(self, state: State) -> str:
        return f"{state.made_of} {self._schedule!r}"
