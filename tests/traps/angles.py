"""Rotary embedding by a table of sines and cosines that is saved, and embeddings that are nearly that."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import Attention, TowerConfig, towers


class Table(Attention):
    """The first half of the coordinates turns against the second, by complex numbers that are weights."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.table = nn.Parameter(torch.randn(config.max_position_embeddings, config.head_dim))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.shown(self.table[positions][:, None]).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def shown(self, rows: Tensor) -> Tensor:
        return rows


class TableOfNeighbours(Table):
    """Every other coordinate turns against the next."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (t.repeat_interleave(2, -1) for t in self.table[positions][:, None].chunk(2, -1))
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin


class TableShifted(Table):
    """One is added to all that the table holds."""

    def shown(self, rows: Tensor) -> Tensor:
        return rows + 1


class TableSquared(Table):
    def shown(self, rows: Tensor) -> Tensor:
        return rows * rows


class TableUneven(Table):
    """What turns is no circle."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.table[positions][:, None].chunk(2, -1)
        return torch.cat((first * cos - 2 * second * sin, second * cos + first * sin), -1)


class TableMirrored(Table):
    """What is turned is mirrored, too: two such do not make a turn."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.table[positions][:, None].chunk(2, -1)
        return torch.cat((first * cos + second * sin, first * sin - second * cos), -1)


class TableBeside(Table):
    """What is turned passes by, too."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotate(x, positions) + x


class TableOfUnits(Table):
    """What is turned has lost its length before."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotate(functional.normalize(x, dim=-1), positions)


class TableShown(Table):
    """The table is a bias of scores, too."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return super().score(q, k, positions) + self.table[positions].sum(-1)[:, None, :, None] * k.mean()


globals().update(towers(
    __name__,
    **{f"{name}Tower": part for name, part in list(globals().items()) if getattr(part, "__module__", "") == __name__},
))  # fmt: skip
