"""Decoders whose users set, by a method and between two calls, which hidden units of their MLPs count."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, Tower, TowerConfig


class _First(MLP):
    """The first units, as many as its width says."""

    width: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.hidden(x)[..., : self.width], self.down.weight[:, : self.width])


class Width(Tower):
    mlp = _First

    def set_width(self, width: int) -> None:
        for layer in self.layers:
            layer.mlp.width = width


class WidthOfEach(Tower):
    """A method of the MLP, which is called while it is built, too."""

    class Units(_First):
        def __init__(self, config: TowerConfig, index: int) -> None:
            super().__init__(config, index)
            self.set_width(config.intermediate_size)

        def set_width(self, width: int) -> None:
            self.width = width

    mlp = Units

    def set_width(self, width: int) -> None:
        for layer in self.layers:
            layer.mlp.set_width(width)


class WidthInConfig(Tower):
    """What the config says, of all MLPs."""

    class Units(MLP):
        def forward(self, x: Tensor) -> Tensor:
            width = self.config.width
            return functional.linear(self.hidden(x)[..., :width], self.down.weight[:, :width])

    mlp = Units

    def more(self, config: TowerConfig) -> None:
        config.width = config.intermediate_size

    def set_width(self, width: int) -> None:
        self.config.width = width


class Subnetwork(Tower):
    """MatFormer: a word for a share."""

    class Units(MLP):
        def __init__(self, config: TowerConfig, index: int) -> None:
            super().__init__(config, index)
            self.shares, self.size = {"s": 0.25, "m": 0.5, "l": 1.0}, "l"

        def forward(self, x: Tensor) -> Tensor:
            width = int(self.config.intermediate_size * self.shares[self.size])
            return functional.linear(self.hidden(x)[..., :width], self.down.weight[:, :width])

    mlp = Units

    def set_width(self, size: str) -> None:
        for layer in self.layers:
            layer.mlp.size = size


class Groups(Tower):
    class Units(MLP):
        groups = 1

        def forward(self, x: Tensor) -> Tensor:
            parts = self.hidden(x).unflatten(-1, (self.groups, -1))
            return self.down((parts * parts.mean(-1, keepdim=True).sigmoid()).flatten(-2))

    mlp = Units

    def set_width(self, groups: int) -> None:
        for layer in self.layers:
            layer.mlp.groups = groups


class Pruned(Tower):
    """A mask that no file has."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, self.mlp):
            nn.init.ones_(module.kept)

    class Units(MLP):
        def __init__(self, config: TowerConfig, index: int) -> None:
            super().__init__(config, index)
            self.register_buffer("kept", torch.ones(config.intermediate_size), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.hidden(x) * self.kept)

    mlp = Units

    def set_width(self, width: int) -> None:
        for layer in self.layers:
            layer.mlp.kept[width:] = 0


class MaskOrNone(Tower):
    """A mask that there is none of at first."""

    class Units(MLP):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.hidden(x)
            return self.down(hidden if self.kept is None else hidden * self.kept.to(hidden.dtype))

    mlp = Units

    def set_width(self, width: int) -> None:
        for layer in self.layers:
            layer.mlp.kept = torch.arange(self.config.intermediate_size) < width


class Listed(Tower):
    """The numbers of the units that count."""

    class Units(MLP):
        def __init__(self, config: TowerConfig, index: int) -> None:
            super().__init__(config, index)
            self.kept = list(range(config.intermediate_size))

        def keep(self, units: Iterable[int]) -> None:
            self.kept = [*units]

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.hidden(x)[..., self.kept], self.down.weight[:, self.kept])

    mlp = Units

    def set_width(self, width: int) -> None:
        for layer in self.layers:
            layer.mlp.keep(range(width))


class Dropped(Tower):
    """A share, by a property."""

    class Units(MLP):
        _dropped = 0.0

        @property
        def dropped(self) -> float:
            return self._dropped

        @dropped.setter
        def dropped(self, share: float) -> None:
            self._dropped = share

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.hidden(x)
            width = hidden.shape[-1]
            return self.down(hidden * (torch.arange(width) >= self.dropped * width))

    mlp = Units

    def set_width(self, share: float) -> None:
        for layer in self.layers:
            layer.mlp.dropped = share
