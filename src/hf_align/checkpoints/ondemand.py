"""Weights that are made when they are asked for: neither `in` nor a loop over their names makes one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor


class OfNames(Collection[str]):
    """What is known by names; they may be those of another mapping."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class OnDemand(OfNames, Mapping[str, Tensor]):
    """Tensors by name, each made by `__getitem__`, which raises KeyError for any other name."""


class Recalled(OnDemand):
    """Weights that are made anew each time they are asked for, but for those that were kept when others made them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights)
        self._weights = weights
        self._kept: Mapping[str, Tensor] = {}

    def keep(self, made: Mapping[str, Tensor]) -> None:
        """Give copies of these from now on, and none of those that were kept before."""
        self._kept = made

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name].clone() if name in self._kept else self._weights[name]


class Computed(OnDemand):
    """Weights that a function makes, and that are not kept."""

    def __init__(self, names: Collection[str], compute: Callable[[str], Tensor]) -> None:
        super().__init__(names)
        self._compute = compute

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self._compute(name)
