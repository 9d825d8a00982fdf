"""Decoders with conditions that are decided when they are built: no call can go the other way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .tower import Tower


class SinusoidTower(Tower):
    """A table that is made again for long texts, by a function that the size of the model is handed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.columns = config.hidden_size
        self.make(8, config.hidden_size)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if module is self:
            init.copy_(self.table, self.sinusoids(8, self.columns))

    def make(self, count: int, width: int) -> None:
        self.register_buffer("table", self.sinusoids(count, width), persistent=False)

    @staticmethod
    def sinusoids(count: int, width: int) -> Tensor:
        steps = torch.arange(width // 2) / (width // 2)
        angles = torch.arange(count)[:, None] * 100.0**-steps
        table = torch.cat((angles.sin(), angles.cos()), 1).view(count, -1)
        if width % 2 == 1:
            table = torch.cat((table, torch.zeros(count, 1)), 1)
        return table

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        most = x.shape[1] + 2
        if most > self.table.shape[0]:
            self.make(most, self.columns)
        return super().run(x + self.table[: x.shape[1]].to(x), positions, seen, cache)


class Spread(nn.Sequential):
    """Hands on several values, or one."""

    def forward(self, *values: Any) -> Any:
        for part in self:
            values = part(*values) if type(values) == tuple else part(values)  # noqa: E721
        return values


class Paired(nn.Module):
    """Two values from one, or from two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, width)

    def forward(self, x: Tensor, size: int = 1) -> tuple[Tensor, int]:
        return x + torch.tanh(self.read(x)) / size, size + 1


class SpreadTower(Tower):
    """The kind of what a module hands on is the same in every call."""

    def more(self, config: Any) -> None:
        self.spread = Spread(Paired(config.hidden_size), Paired(config.hidden_size))

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(self.spread(x)[0], positions, seen, cache)


class AppendedTower(Tower):
    """A list that is filled in long texts, by a condition of its own."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        late = []
        for place in range(x.shape[1]):
            if place > 40:
                late.append(place)
        if len(late):
            x = x + torch.tanh(x[:, late[0] : late[0] + 1])
        return super().run(x, positions, seen, cache)


class ExtendedTower(Tower):
    """A list that is filled in texts of 44 words, and nothing asks whether."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        late = []
        last = 4 * self.config.hidden_size - 5
        late.extend(range(x.shape[1])[last:][: last + 2 - min(x.shape[1], last + 2)])
        if late:
            x = x + torch.tanh(x[:, late[0] : late[0] + 1])
        return super().run(x, positions, seen, cache)
