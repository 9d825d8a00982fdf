"""What is saved beside the parameters, of every dtype, and is not what the config says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from traps import buffers as code
from traps.trap import Trap, cases, check, custom

Draw = Callable[[Tensor, Generator], Tensor]


def of(name: str, alike: bool = False, **drawn: Draw) -> Trap:
    """A tower whose buffers of some names are drawn, for each model or for both at once."""
    kind: Any = getattr(code, f"{name}Tower", None) or getattr(code, name)

    def then(model: PreTrainedModel, rng: Generator) -> None:
        rng = Generator().manual_seed(7) if alike else rng
        for path, buffer in model.named_buffers():
            if (draw := drawn.get(path.rpartition(".")[2])) is not None:
                buffer.copy_(draw(buffer, rng))

    return Trap(f"{name} alike" if alike else name, custom(kind), may_refuse=True, then=then)


def some(old: Tensor, rng: Generator) -> Tensor:
    """A mask that leaves about two thirds."""
    return torch.rand(old.shape, generator=rng) < 0.66


def shuffled(old: Tensor, rng: Generator) -> Tensor:
    return torch.randperm(len(old), generator=rng)


def normal(old: Tensor, rng: Generator) -> Tensor:
    return torch.randn(old.shape, generator=rng)


def positive(old: Tensor, rng: Generator) -> Tensor:
    return torch.rand(old.shape, generator=rng) + 0.5


def limited(old: Tensor, rng: Generator) -> Tensor:
    """Limits of half of the units."""
    return torch.where(torch.rand(old.shape, generator=rng) < 0.5, old, old.sign() * 0.1)


def reached(old: Tensor, rng: Generator) -> Tensor:
    """Limits of all units."""
    return old.sign() * (0.1 + torch.rand(old.shape, generator=rng))


def one(old: Tensor, rng: Generator) -> Tensor:
    return torch.ones_like(old)


def turned(old: Tensor, rng: Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(old.shape, generator=rng))[0]


TRAPS = [
    of("Mask", kept=some),
    of("StreamMask", kept=some),
    of("Order", order=shuffled),
    of("HeadOrder", of=lambda old, rng: old.flip(0)),
    of("Switch", on=one),
    of("Branch", on=one),
    of("Count", steps=one),
    of("Largest"),
    of("Limits"),
    of("Limits", alike=True, least=limited, most=limited),
    of("Limits", least=reached, most=reached),
    of("Limits", least=limited),
    of("Zero", strength=one),
    of("Statistics", running_mean=normal, running_var=positive),
    of("HiddenStatistics", mean=normal, scale=positive),
    of("Frequencies", frequencies=positive),
    of("Slopes", slopes=positive),
    of("Rotation", rotation=turned),
    of("Words", stands_for=shuffled, written=some),
    of("Unsaved"),
    of("Mask", alike=True, kept=some),
    of("StreamMask", alike=True, kept=some),
    of("Order", alike=True, order=shuffled),
    of("HeadOrder", alike=True, of=lambda old, rng: old.flip(0)),
    of("Words", alike=True, stands_for=shuffled, written=some),
    of("Frequencies", alike=True, frequencies=positive),
]


@pytest.mark.parametrize("trap", cases("buffers", TRAPS))
def test_buffers(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
