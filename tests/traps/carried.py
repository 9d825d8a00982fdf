"""Decoders with LayerNorms behind the sums, whose readers have no bias: what such a norm's bias may become.

Each part breaks one of what lets it change: that maps without bias alone read it, that what it is added to loses its
mean, that values come to where it is added as a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .tower import MLP, Attention, Block, RMSNorm, Tower, TowerConfig


class Behind(Block):
    """The norms are behind the sums, and one before all."""

    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, attention, mlp)
        self.first = nn.LayerNorm(config.hidden_size)
        self.attn_norm, self.mlp_norm = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.first(x)
        x = self.attn_norm(self.join(x, self.attn(x, positions, seen, cache)))
        return self.mlp_norm(x + self.mlp(x))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class CarriedTower(Tower):
    block = Behind


class Uncentred(Behind):
    """The last norm sees the mean of what it reads."""

    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, attention, mlp)
        self.mlp_norm = RMSNorm(config.hidden_size)


class Less(Behind):
    """Values are taken off."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


class Half(Behind):
    """Half of what is read is added."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * x + y


class Turned(Behind):
    """Values are added in another order."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + torch.cat((y[..., 5:], y[..., :5]), -1)


class Bent(Behind):
    """What is read is seen bent, too."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y + torch.tanh(x)


class _Both(nn.LayerNorm):
    """One parameter is gain and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.weight, self.eps)


class Shared(Behind):
    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__(config, index, attention, mlp)
        self.first = _Both(config.hidden_size, bias=False)


class Kept(MLP):
    """A bias takes up what the norm loses."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)


class KeptTwice(Kept):
    """The bias is added a second time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.down.bias


class Again(MLP):
    """A map also reads what is no norm."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x) + self.gate(super().forward(x)))


class Doubled(Attention):
    """The shares sum to two."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return 2 * shares @ v


class Measured(Attention):
    """Something else sees the values."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return shares @ v * (1 + torch.tanh(v.mean()))


PARTS: dict[str, dict[str, type[nn.Module]]] = {
    **{f"Carried{part.__name__}": {"block": part} for part in (Uncentred, Less, Half, Turned, Bent, Shared)},
    **{f"Carried{part.__name__}": {"mlp": part} for part in (Kept, KeptTwice, Again)},
    **{f"Carried{part.__name__}": {"attention": part} for part in (Doubled, Measured)},
}
globals().update({f"{name}Tower": type(f"{name}Tower", (CarriedTower,), {**parts, "__module__": __name__})
                  for name, parts in PARTS.items()})  # fmt: skip
