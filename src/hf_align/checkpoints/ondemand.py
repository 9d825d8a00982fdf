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


class Computed(OnDemand):
    """Weights that a function makes, and that are not kept."""

    def __init__(self, names: Collection[str], compute: Callable[[str], Tensor]) -> None:
        super().__init__(names)
        self._compute = compute

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self._compute(name)
