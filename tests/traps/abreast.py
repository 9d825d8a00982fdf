"""Norms of several vectors side by side, all of which one linear map reads at once, as where patches are merged."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, TowerConfig, towers


class Abreast(MLP):
    """Two places are normalised apart, and read one behind the other."""

    bias = False

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        size = config.intermediate_size
        self.vectors = nn.LayerNorm(size)
        self.both = nn.Linear(2 * size, size, bias=self.bias)

    def hidden(self, x: Tensor) -> Tensor:
        return functional.gelu(self.read(self.vectors(self.up(x)).unflatten(1, (-1, 2)))).repeat_interleave(2, 1)

    def read(self, x: Tensor) -> Tensor:
        return self.both(x.flatten(-2))


class AbreastBiased(Abreast):
    bias = True


class AbreastInterleaved(Abreast):
    """Their first entries come first, then their second ones."""

    def read(self, x: Tensor) -> Tensor:
        return self.both(x.transpose(-1, -2).flatten(-2))


class AbreastTwice(Abreast):
    """Either of them comes first once."""

    def read(self, x: Tensor) -> Tensor:
        return self.both(x.flatten(-2)) * self.both(x[..., [1, 0], :].flatten(-2))


class AbreastMixed(Abreast):
    """All entries are where they are in order, but half of each vector is of the other one."""

    def read(self, x: Tensor) -> Tensor:
        halves = x.unflatten(-1, (2, -1)).flatten(-3, -2)
        return self.both(halves[..., [0, 3, 2, 1], :].flatten(-2))


class AbreastRolled(Abreast):
    """Where one ends, the other begins, but neither begins with its first entry."""

    def read(self, x: Tensor) -> Tensor:
        return self.both(x.flatten(-2).roll(1, -1))


class AbreastPadded(Abreast):
    """Zeros stand in the place of a vector."""

    def read(self, x: Tensor) -> Tensor:
        return self.both(functional.pad(x[..., :1, :], (0, 0, 0, 1)).flatten(-2))


class AbreastBothWays(Abreast):
    """The same map reads them one behind the other, and interleaved."""

    def read(self, x: Tensor) -> Tensor:
        return self.both(x.flatten(-2)) * self.both(x.transpose(-1, -2).flatten(-2))


class AbreastSeen(Abreast):
    """Something else sees them, too."""

    def read(self, x: Tensor) -> Tensor:
        return self.both(x.flatten(-2)) * x.square().sum((-1, -2))[..., None]


globals().update(towers(
    __name__,
    **{f"{name}Tower": part for name, part in list(globals().items()) if getattr(part, "__module__", "") == __name__},
))  # fmt: skip
