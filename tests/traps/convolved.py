"""Norms that convolutions read, whose places lie along another axis than in the norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, TowerConfig, towers


class Convolved(MLP):
    """Channels are normalised in front of a convolution that also reads zeros beside the ends."""

    padding = 1
    bias = True

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        size = config.intermediate_size
        self.channels = nn.LayerNorm(size)
        self.places = nn.Conv1d(size, size, 1 + 2 * self.padding, padding=self.padding, bias=self.bias)

    def hidden(self, x: Tensor) -> Tensor:
        return functional.gelu(self.read(self.channels(self.up(x)).transpose(1, 2)).transpose(1, 2))

    def read(self, x: Tensor) -> Tensor:
        return self.places(x)


class ConvolvedUnbiased(Convolved):
    bias = False


class ConvolvedInside(Convolved):
    """No zeros are read: the first result stands twice."""

    padding = 0

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.places = nn.Conv1d(config.intermediate_size, config.intermediate_size, 2)

    def read(self, x: Tensor) -> Tensor:
        found = self.places(x)
        return torch.cat([found[..., :1], found], -1)


class ConvolvedBent(Convolved):
    """What is read is bent first."""

    def read(self, x: Tensor) -> Tensor:
        return self.places(torch.tanh(x))


class ConvolvedBeside(Convolved):
    """Something else sees it, too."""

    def read(self, x: Tensor) -> Tensor:
        return self.places(x) * x.square().mean(1, keepdim=True)


class ConvolvedMasked(Convolved):
    """Some channels are set to zero first, and there are more of them than are made of them."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        size = config.intermediate_size
        self.channels = nn.LayerNorm(config.hidden_size)
        self.places = nn.Conv1d(config.hidden_size, size, 3, padding=1)

    def hidden(self, x: Tensor) -> Tensor:
        shown = (torch.arange(x.shape[-1], device=x.device) % 3 != 0)[:, None]
        return functional.gelu(self.read(self.channels(x).transpose(1, 2) * shown).transpose(1, 2))


class ConvolvedRolled(Convolved):
    """The channels are read in another order."""

    def read(self, x: Tensor) -> Tensor:
        return self.places(x.roll(1, 1))


class ConvolvedAcross(Convolved):
    """One half of the channels is read in the place of the other half elsewhere."""

    def read(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return self.places(torch.cat([first, second], 1)) + self.places(torch.cat([second, first], 1))


globals().update(towers(
    __name__,
    **{f"{name}Tower": part for name, part in list(globals().items()) if getattr(part, "__module__", "") == __name__},
))  # fmt: skip
