"""Arguments for one call of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
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
        choices: texts of each row, [rows, choices, tokens], where a head chooses among them.
        held: the names of floating point tensors that are part of the question, too, such as masks.
        ends: for some of these names, the id that ends every text and stands nowhere else in it.
        settings: what the model was set to before the call, by attribute.
    """

    arguments: dict[str, Any]
    tokens: dict[str, Tensor]
    rows_of_one: int = 1
    choices: int = 1
    held: frozenset[str] = frozenset()
    ends: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """What is given, by name."""
        names = " and ".join(self.arguments)
        return f"{names} (texts that end with token {min(self.ends.values())})" if self.ends else names

    @property
    def words(self) -> dict[str, Any]:
        """The words, numbers and flags that it is given, or the model was set to."""
        given = {**self.arguments, **self.settings}
        return {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}

    @property
    def axis_of_tokens(self) -> int:
        """Of token ids, along which a text goes on."""
        return 1 if self.choices == 1 else 2

    def is_free(self, name: str) -> bool:
        value = self.arguments[name]
        is_value = isinstance(value, Tensor) and value.is_floating_point() and name not in self.held
        return name in self.tokens or is_value

    def with_tokens(self, more: Tensor) -> Example:
        """The same with more ids that may occur."""
        return replace(self, tokens={name: torch.cat([ids, more]).unique() for name, ids in self.tokens.items()})

    def ended_by(self, token: int, names: Collection[str]) -> Example:
        """The same with texts that a token ends, which stands nowhere else in them.

        Args:
            names: of the token ids.
        """
        tokens = {name: ids[ids != token] if name in names else ids for name, ids in self.tokens.items()}
        other = {n: t.masked_fill(t == token, int(tokens[n][0])) for n, t in self.arguments.items() if n in names}
        return replace(self, arguments={**self.arguments, **other}, tokens=tokens,
                       ends=dict.fromkeys(names, token)).ended()  # fmt: skip

    def ended(self) -> Example:
        """The same with the tokens that end texts where they belong."""
        return replace(self, arguments={n: self.at_end(n, value) for n, value in self.arguments.items()})

    def at_end(self, name: str, value: Any) -> Any:
        """What an argument gives, [..., tokens], with the token that ends it where there is one."""
        if name not in self.ends:
            return value
        return torch.cat([value[..., :-1], torch.full_like(value[..., -1:], self.ends[name])], -1)

    def drawn(self, rng: torch.Generator) -> dict[str, Tensor]:
        """As `random`, in the shapes of this example."""
        return self.random({n: tuple(v.shape) for n, v in self.arguments.items() if self.is_free(n)}, rng)

    def random(self, shapes: dict[str, tuple[int, ...]], rng: torch.Generator) -> dict[str, Tensor]:
        """Random values of the free arguments: float64 noise, or token ids."""
        return {
            name: self.at_end(name, self.tokens[name][torch.randint(len(self.tokens[name]), shape, generator=rng)])
            if name in self.tokens
            else torch.randn(shape, generator=rng, dtype=torch.float64)
            for name, shape in shapes.items()
        }


class AsGiven(Example):
    """Arguments that are taken as they are: none is free."""

    def is_free(self, name: str) -> bool:
        return False
