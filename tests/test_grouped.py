"""Convolutions in groups: groups are matched as heads are, and then the channels that each of them reads and writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hf_align
from hf_align.matching.head_families import head_families
from hf_align.matching.weights import steps_of


class Block(nn.Module):
    """Of a ResNeXt."""

    def __init__(self, inputs: int, width: int, outputs: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.read, self.write = nn.Conv2d(inputs, width, 1), nn.Conv2d(width, outputs, 1)
        self.inside = nn.Conv2d(width, width, 3, padding=1, groups=4)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, outputs))
        self.past = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norms[0](self.read(x)))
        y = self.act(self.norms[1](self.inside(y)))
        return self.act(self.norms[2](self.write(y)) + self.past(x))


def network(seed: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(seed)
    stem = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), act()]
    blocks = [Block(12, 12, 24, act), Block(24, 12, 24, act), Block(24, 16, 32, act)]
    made = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 7)).eval()
    for norm in made.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for mean in (norm.running_mean, norm.bias):
                nn.init.normal_(mean, 0.0, 0.1)  # type: ignore[arg-type]
            for scale in (norm.running_var, norm.weight):
                nn.init.uniform_(scale, 0.5, 1.5)  # type: ignore[arg-type]
    return made


INPUTS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_network_in_another_basis_is_found_again(act: type[nn.Module], seed: int) -> None:
    first = network(seed, act)
    twin = hf_align.randomize(first, seed=seed + 5, inputs=INPUTS)
    found = hf_align.align(twin, to=first, inputs=INPUTS)
    assert found.distance is not None
    assert found.distance[1] < 1e-4 * found.distance[0]


def test_of_unlike_networks_every_sweep_brings_them_closer_and_all_channels_are_looked_at() -> None:
    found = hf_align.align(network(1), to=network(0), inputs=INPUTS)
    assert found.distance is not None
    assert found.distance[1] < found.distance[0]
    families = head_families(found.spec)
    assert len(families) == 3
    steps = steps_of(found.spec)
    for family in families:
        inside = found.spec.indexed_by(family.heads)
        assert len(inside) == 2 and set(inside) <= family.spaces
        assert set(inside) == set(family.meeting) <= set(steps)
