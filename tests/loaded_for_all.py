"""A module whose part may be read by code that is loaded when it is needed, and then is there for all."""

from __future__ import annotations

from torch import Tensor, nn


class LoadedForAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_another_hand = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        global version
        from packaging import version

        return by_what_is_loaded(self, x)


def by_what_is_loaded(module: LoadedForAll, x: Tensor) -> Tensor:
    return version.parse(module, x)
