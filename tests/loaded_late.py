"""A module whose part is read by code that is loaded when it is needed."""

from __future__ import annotations

from torch import Tensor, nn


class LoadedLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_another_hand = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from another_hand import by_another_hand

        return by_another_hand(self, x)
