"""What a kill costs a descent: half a minute at most, or the step that was under way."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from hf_align.matching import descent
from hf_align.matching.descent import Descent, State
from hf_align.merging.curve import _Offset
from hf_align.settings.schedule import Schedule


class Clock:
    """Goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def offset() -> _Offset:
    made = _Offset.between(torch.zeros(3, 3), torch.ones(3, 3))
    assert made is not None
    return made


@pytest.mark.parametrize("longest", [0.3, 4.0, 11.0, 26.0, 100.0])
def test_half_a_minute_is_at_stake_at_most(longest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment: the steps since the last state took 30 seconds with the one that runs, or there is only that."""
    clock, rng = Clock(), random.Random(0)
    monkeypatch.setattr(descent, "time", clock)
    state, moving = State(tmp_path / "state", "this"), offset()
    began = [0.0]
    at_stake = []

    def loss(_: Generator) -> Tensor:
        steps = int(torch.load(state.path, weights_only=True)["step"]) if state.path.exists() else 0
        clock.now += longest * rng.uniform(0.98, 1)
        began.append(clock.now)
        at_stake.append((clock.now - began[steps], len(began) - 1 - steps))
        return moving.value.square().sum()

    optimiser = torch.optim.SGD([{"params": [moving.steps], "rate": 0.1}], lr=0.1)
    schedule = Schedule(steps=60 if longest > 1 else 250, checkpoint_every=10**6)
    Descent([moving], [optimiser], schedule, state).run(loss)
    assert all(seconds <= 30.0 or steps == 1 for seconds, steps in at_stake), max(at_stake)
    assert longest > 15 or max(steps for _, steps in at_stake) > 1, "a state for every step is too much"
