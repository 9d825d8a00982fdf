"""Blocks that centre and scale what they read by numbers that are stored, and blocks in which these are seen again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .tower import MLP, TowerConfig, towers


class Centred(MLP):
    """One map, with a bias, reads (x - mean) / deviation."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.mean = nn.Parameter(torch.zeros(config.hidden_size))
        self.deviation = nn.Parameter(torch.ones(config.hidden_size))

    def hidden(self, x: Tensor) -> Tensor:
        return self.activate(self.gate(x)) * self.read((x - self.mean) / self.deviation)

    def read(self, x: Tensor) -> Tensor:
        return self.up(x)


class CentredUnbiased(Centred):
    """Nothing takes the mean up."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)


class CentredTable(CentredUnbiased):
    """A row that is added behind does."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.table = nn.Parameter(torch.zeros(1, config.intermediate_size))

    def read(self, x: Tensor) -> Tensor:
        return self.up(x) + self.table


class CentredTableSeen(CentredTable):
    """It is a factor, too."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1 + self.table)


class CentredTableTwice(CentredTable):
    """It is added behind another map, too, that reads what nothing centres."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.second = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (self.second(x) + self.table)


class CentredBent(Centred):
    """What is read is bent first."""

    def read(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(x))


class CentredTwice(Centred):
    """The map reads something else, too."""

    def read(self, x: Tensor) -> Tensor:
        return self.up(x) + self.up(x * x)


class CentredHalf(Centred):
    """Something else sees half of what is scaled."""

    def read(self, x: Tensor) -> Tensor:
        return self.up(x) * x[..., : x.shape[-1] // 2].mean(-1, keepdim=True)


class CentredAgain(Centred):
    """The deviation is a factor elsewhere, and the mean a term."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x * self.deviation + self.mean)


class CentredBefore(Centred):
    """The map reads its neighbours' places, and zeros where there are none: these have no mean taken off."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.up = nn.Conv1d(config.hidden_size, config.intermediate_size, 2, padding=1)

    def read(self, x: Tensor) -> Tensor:
        return self.up(x.transpose(1, 2))[..., :-1].transpose(1, 2)


globals().update(towers(
    __name__,
    **{f"{name}Tower": part for name, part in list(globals().items()) if getattr(part, "__module__", "") == __name__},
))  # fmt: skip
