"""Blocks in which lengths are divided out, and blocks in which they nearly are."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, Attention, TowerConfig, towers


class Cosine(Attention):
    """Queries and keys are unit vectors before they turn."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotate(self.unit(x), positions)

    def unit(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1)


class CosineByHand(Cosine):
    def unit(self, x: Tensor) -> Tensor:
        return x * x.square().sum(-1, keepdim=True).rsqrt()


class CosineFloored(Cosine):
    """Short vectors keep their length."""

    def unit(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1, eps=0.5)


class CosineNearly(Cosine):
    """A little is added to the length."""

    def unit(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + 1e-3)


class CosineSquared(Cosine):
    """What is divided by is the square of the length."""

    def unit(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True)


class CosineSummed(Cosine):
    """What is divided by may be less than nothing, and is kept from that."""

    def unit(self, x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True).clamp_min(1e-6) * 1e-6


class CosineBeside(Cosine):
    """The vectors themselves pass by."""

    def unit(self, x: Tensor) -> Tensor:
        return super().unit(x) + x


class CosineAcross(Cosine):
    """The length is that of one coordinate in all heads."""

    def unit(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=1)


class CosineOfAll(Cosine):
    """The length is that of all heads together."""

    def unit(self, x: Tensor) -> Tensor:
        return x / x.square().sum((1, 3), keepdim=True).sqrt()


class MixedUnit(Attention):
    """What attention has mixed is normalised."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return functional.normalize(super().mix(shares, v), dim=-1)


class MixedUnitShown(MixedUnit):
    """Its length is seen beside."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return super().mix(shares, v) * v.mean(2, keepdim=True)


class UnitUp(MLP):
    """What a gate multiplies is normalised."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.activate(self.gate(x)) * functional.normalize(self.up(x), dim=-1)


class UnitUpAgain(UnitUp):
    """The same map writes something else, too."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + self.activate(self.up(x))


class UnitOfANorm(MLP):
    """The whole text is told by the direction of the mean of what a norm writes, which is added to every unit."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.norm = nn.LayerNorm(config.intermediate_size)

    def written(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).mean(1, keepdim=True)

    def hidden(self, x: Tensor) -> Tensor:
        written = self.written(x)
        return self.activate(self.gate(x)) + written / written.norm(dim=-1, keepdim=True)


class UnitOfANormChosen(UnitOfANorm):
    """Each token is told by its own."""

    def written(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x))[:, :, None].squeeze(2)


class UnitOfANormSeen(UnitOfANormChosen):
    """How long it is, is seen elsewhere."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + self.norm(self.up(x))


class UnitOfANormShifted(UnitOfANormChosen):
    """What is added has no such factor."""

    def written(self, x: Tensor) -> Tensor:
        return super().written(x) + 0.1


globals().update(towers(
    __name__,
    **{f"{name}Tower": part for name, part in list(globals().items()) if getattr(part, "__module__", "") == __name__},
))  # fmt: skip
