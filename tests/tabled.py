"""A module whose part is read by a function of a table that another file has."""

from __future__ import annotations

from another_hand import BY_NAME
from torch import Tensor, nn


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_a_table = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return BY_NAME["first"](self, x)
