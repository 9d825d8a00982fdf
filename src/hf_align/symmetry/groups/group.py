"""What a group of maps of a space can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Generator, Tensor

from hf_align.symmetry.elements import Element
from hf_align.symmetry.groups.fit import Cross, fit


@dataclass(frozen=True)
class Group(ABC):
    """All elements that a space of `size` dimensions admits."""

    size: int

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def has_gauge(self) -> bool:
        """Whether elements change lengths, so that a gauge must be fixed before weights are compared."""
        return False

    @property
    def permutes(self) -> bool:
        """Whether every order of the entries is an element."""
        return False

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Continuous dimensions."""

    @abstractmethod
    def identity(self, index: tuple[int, ...]) -> Element: ...

    @abstractmethod
    def random(self, index: tuple[int, ...], rng: Generator) -> Element:
        """A random element for each index, continuous and discrete parts alike, well conditioned."""

    @abstractmethod
    def nearest(self, cross: Cross) -> Element:
        """argmax ⟨g, M⟩ over the elements that preserve length."""

    @abstractmethod
    def tangents(self) -> Tensor:
        """A basis of the Lie algebra in the coordinates of an element: [d, n, n], of k scales [d, k, n]."""

    @abstractmethod
    def algebra(self, x: Tensor) -> Tensor:
        """The orthogonal projection on the Lie algebra, of matrices [*, n, n], or of the logarithms of k scales
        [*, k, n]; differentiable."""

    def balance(self, grams: Cross) -> Element:
        """The gauge in which primal and dual weights have equal Grams; the identity where there is none."""
        return self.identity(tuple(next(iter(grams.values())).shape[:-2]))

    def score(self, cross: Cross) -> Tensor:
        """max ⟨g, M⟩ [*index]."""
        return fit(self.nearest(cross), cross)
