"""Arguments for one call of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """Arguments for one forward pass.

    Attributes:
        arguments: by name. Floating point tensors and token ids are free; everything else is part of the question.
        tokens: for the names of token ids, the ids that may occur, [ids].
        rows_of_one: rows of token ids that make up one text: those of a sound may have one for each codebook.
        held: the names of floating point tensors that are part of the question, too, such as masks.
    """

    arguments: dict[str, Any]
    tokens: dict[str, Tensor]
    rows_of_one: int = 1
    held: frozenset[str] = frozenset()

    def is_free(self, name: str) -> bool:
        value = self.arguments[name]
        is_value = isinstance(value, Tensor) and value.is_floating_point() and name not in self.held
        return name in self.tokens or is_value

    def with_tokens(self, more: Tensor) -> Example:
        """The same with more ids that may occur."""
        return replace(self, tokens={name: torch.cat([ids, more]).unique() for name, ids in self.tokens.items()})

    def drawn(self, rng: torch.Generator) -> dict[str, Tensor]:
        """As `random`, in the shapes of this example."""
        return self.random({n: tuple(v.shape) for n, v in self.arguments.items() if self.is_free(n)}, rng)

    def random(self, shapes: dict[str, tuple[int, ...]], rng: torch.Generator) -> dict[str, Tensor]:
        """Random values of the free arguments: float64 noise, or token ids."""
        return {
            name: self.tokens[name][torch.randint(len(self.tokens[name]), shape, generator=rng)]
            if name in self.tokens
            else torch.randn(shape, generator=rng, dtype=torch.float64)
            for name, shape in shapes.items()
        }


class AsGiven(Example):
    """Arguments that are taken as they are: none is free."""

    def is_free(self, name: str) -> bool:
        return False
