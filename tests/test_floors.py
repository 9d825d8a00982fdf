"""A floor that no length falls below leaves factors of what is measured alone; one of squares is reached by lengths as
small as its root."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from traps.tower import MLP, Tower, TowerConfig

from hf_align.symmetry.rules.links import exponent_of
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.trace import trace_first_call


@pytest.mark.parametrize(
    ("length", "unreached"),
    [
        (lambda h: h.norm(dim=-1, keepdim=True).clamp_min(1e-8), True),
        (lambda h: h.norm(dim=-1, keepdim=True).clamp_min(1e-6), False),
        (lambda h: h.square().sum(-1, keepdim=True).clamp_min(1e-16).sqrt(), True),
        (lambda h: h.square().sum(-1, keepdim=True).clamp_min(1e-12).sqrt(), False),
        (lambda h: (h * h).mean(-1, keepdim=True).clamp_min(1e-12).sqrt(), False),
        (lambda h: h.pow(2).sum(-1, keepdim=True).sqrt().clamp_min(1e-8), True),
        (lambda h: h.abs().amax(-1, keepdim=True).clamp_min(1e-6), False),
        (lambda h: h.sum(-1, keepdim=True).clamp_min(1e-6), False),
    ],
)
def test_floors_of_squares_are_reached_by_lengths(length: Callable[[Tensor], Tensor], unreached: bool) -> None:
    part = type("Part", (MLP,), {"hidden": lambda self, x: self.up(x) / length(self.up(x))})
    with torch.device("meta"):
        model = type("Floor", (Tower,), {"mlp": part})(TowerConfig(num_hidden_layers=1)).eval()
    floors = [node for node in trace_first_call(model).graph.nodes if does(node, Trait.FLOORS)]
    assert [exponent_of(node) is not None for node in floors] == [unreached]
