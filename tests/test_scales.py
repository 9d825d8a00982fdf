"""Scales of layers in a chain, balanced together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_align
from hf_align.matching import balanced
from hf_align.matching.balanced import Balanced
from hf_align.symmetry.alignment import MovedWeights, balance
from hf_align.symmetry.spec import SymmetrySpec


def chain() -> tuple[nn.Module, Tensor]:
    """Convolutions, of which one is in groups, channels with their places, and wide layers."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU()]
    head = [nn.Flatten(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 5)]
    return nn.Sequential(*layers, *head), torch.randn(2, 3, 8, 8)


def spec_and_weights() -> tuple[SymmetrySpec, dict[str, Tensor]]:
    module, inputs = chain()
    rng = torch.Generator().manual_seed(0)
    spec = hf_align.symmetries(module, inputs=inputs).spec
    weights = {n: p.detach().double() * (1 + torch.rand(p.shape, generator=rng)) for n, p in module.named_parameters()}
    return spec, weights


def test_no_scale_of_a_chain_would_move_any_more() -> None:
    spec, weights = spec_and_weights()
    moved = MovedWeights(weights, spec, Balanced.of(spec, weights).gauges[0])
    free = [name for name, space in spec.spaces.items() if space.group is not None and space.group.has_gauge]
    assert len(free) == 5
    for name in free:
        assert float((balance(spec, moved, name).scale - 1).abs().max()) < 1e-5  # type: ignore[attr-defined]


def test_no_weight_is_moved_to_balance_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = spec_and_weights()
    spaces: list[str] = []

    def counted(spec: SymmetrySpec, weights: Any, name: str) -> Any:
        spaces.append(name)
        return balance(spec, weights, name)

    monkeypatch.setattr(balanced, "balance", counted)
    Balanced.of(spec, weights)
    assert len(spaces) == len(set(spaces)) > 1
