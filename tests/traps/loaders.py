"""Decoders that change as they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from .tower import Tower


class LoadingTower(Tower):
    @classmethod
    def from_pretrained(cls, folder: Any, *more: Any, **options: Any) -> Self:
        model = super().from_pretrained(folder, *more, **options)
        model.loaded(Path(folder))
        return model

    def loaded(self, folder: Path) -> None:
        pass


class UnitRowsTower(LoadingTower):
    """Each row of the head comes to length one."""

    def loaded(self, folder: Path) -> None:
        with torch.no_grad():
            self.head.weight.copy_(normalize(self.head.weight))


class TiedLastTower(Tower):
    """Each row of the head comes to length one where weights are tied, which is last."""

    def tie_weights(self, *more: Any, **options: Any) -> None:
        super().tie_weights(*more, **options)
        if not self.head.weight.is_meta:
            self.head.weight.data = normalize(self.head.weight.data)


class SharperTower(LoadingTower):
    """What is loaded computes something else."""

    share = 0.0

    def loaded(self, folder: Path) -> None:
        self.share = 0.5

    def run(self, x: Tensor, *more: Any) -> Tensor:
        return super().run(x + self.share * x.cumsum(-1), *more)


class BesideTower(LoadingTower):
    """A vector comes from a file of another name."""

    def loaded(self, folder: Path) -> None:
        self.beside = load_file(folder / "beside.safetensors")["beside"]

    def save_pretrained(self, folder: Any, *more: Any, **options: Any) -> None:
        super().save_pretrained(folder, *more, **options)
        save_file({"beside": torch.arange(1.0, 1 + self.config.hidden_size)}, Path(folder) / "beside.safetensors")

    def run(self, x: Tensor, *more: Any) -> Tensor:
        return super().run(x + self.beside.to(x), *more) if hasattr(self, "beside") else super().run(x, *more)


class SameTower(LoadingTower):
    """Nothing changes."""
