"""A model without weights: what its class fills at once takes no memory, and what it computes is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traps.tower import Tower, TowerConfig

from hf_align.tracing import build
from hf_align.tracing.budget import ANY, within

VAST = 2**30
"""Entries, of four bytes each."""


def built(part: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    model: Any = type("Built", (Tower,), {"mlp": part})
    monkeypatch.setattr(build, "model_class", lambda config: model._from_config)
    with within(ANY, "a model"):
        found = build.build_without_weights(TowerConfig(num_hidden_layers=1))
    return found.get_submodule("layers.0.mlp")


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones, torch.rand, lambda *shape: 0.02 * torch.randn(*shape)])
def test_weights_of_any_size_may_be_filled_at_once(
    fill: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the experts of Llama 4 are, with `torch.zeros`."""

    class Filled(nn.Module):
        def __init__(self, config: TowerConfig, index: int) -> None:
            super().__init__()
            self.experts = nn.Parameter(fill(16, VAST // 16))
            self.register_buffer("places", torch.arange(5), persistent=False)

    part = built(Filled, monkeypatch)
    assert part.experts.shape == (16, VAST // 16) and not part.experts.is_meta
    assert part.places.tolist() == [0, 1, 2, 3, 4]


def as_a_buffer(part: nn.Module, table: Tensor) -> None:
    part.register_buffer("table", table, persistent=False)


def as_an_attribute(part: nn.Module, table: Tensor) -> None:
    part.table = table


def as_numbers(part: nn.Module, table: Tensor) -> None:
    part.table = torch.tensor(table.tolist())


@pytest.mark.parametrize("keep", [as_a_buffer, as_an_attribute, as_numbers])
def test_a_table_keeps_its_values_however_large_it_is(
    keep: Callable[[nn.Module, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_LARGE", 10)

    class Computed(nn.Module):
        def __init__(self, config: TowerConfig, index: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(20))
            keep(self, torch.ones(20).cumsum(0))

    assert built(Computed, monkeypatch).table.tolist() == [*range(1, 21)]
