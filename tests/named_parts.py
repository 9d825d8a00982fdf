"""Modules with a part that something names in some way, or nothing does."""

from __future__ import annotations

from typing import Any

import torch
from another_hand import by_another_hand
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


class Plain(nn.Module):
    """It has a part that nothing names."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(4, 4)
        self.left_over = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x)


class AskedForItsKind(Plain):
    """What it imports late says of what kind something is, or is not there."""

    def forward(self, x: Tensor) -> Tensor:
        import of_no_package  # type: ignore[import-not-found]
        from packaging.version import Version

        return of_no_package.of(self) if isinstance(self.read, Version) else self.read(x)


class Asked(Plain):
    """What its weights are is looked at, and whether they learn, but not their values."""

    def dtype_of(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def freeze(self) -> None:
        for parameter in self.parameters():
            parameter.requires_grad = False

    def _init_weights(self, module: Plain) -> None:
        nn.init.zeros_(module.left_over.weight)


class OfAnother(Plain):
    """Another class has a part of this name, and reads its own."""


class Named(Plain):
    def other(self, x: Tensor) -> Tensor:
        return self.by_self(x)


class BySelf(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.by_self = nn.Linear(4, 4)

    def other(self, x: Tensor) -> Tensor:
        return self.by_self(x)


class Above(Plain):
    def other(self, x: Tensor) -> Tensor:
        return self.given_by_those_below(x)


class Below(Above):
    def __init__(self) -> None:
        super().__init__()
        self.given_by_those_below = nn.Linear(4, 4)


class ByAnotherName(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first_name = nn.Linear(4, 4)
        self.second_name = self.first_name


class ReadByAnotherName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nobody_says_this = nn.Linear(4, 4)
        setattr(self, "a" + "lias", self._modules["nobody_says_this"])


class ByWord(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.by_word = nn.Linear(4, 4)

    def other(self, x: Tensor) -> Tensor:
        return getattr(self, "by_word")(x)  # noqa: B009


class Numbered(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.part0 = nn.Linear(4, 4)

    def other(self, x: Tensor, number: int) -> Tensor:
        return getattr(self, f"part{number}")(x)


class AllOfThem(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.among_others = nn.Linear(4, 4)

    def other(self, x: Tensor) -> Tensor:
        return next(iter(self.children()))(x)


class InAFunction(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.in_a_function = nn.Linear(4, 4)


def beside(module: Any, x: Tensor) -> Tensor:
    return module.in_a_function(x)


class ByTheHandOfAnother(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.in_another_hand = nn.Linear(4, 4)

    def other(self, x: Tensor) -> Tensor:
        return by_another_hand(self, x)


class ByItsShape(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.by_its_shape = nn.Linear(4, 4)

    def other(self, x: Tensor) -> Tensor:
        match self:
            case ByItsShape(by_its_shape=part):
                return part(x)
        return x


class Lender(Plain):
    def borrowed(self, x: Tensor) -> Tensor:
        return self.by_a_lent_method(x)


class Borrower(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.by_a_lent_method = nn.Linear(4, 4)

    def other(self, x: Tensor) -> Tensor:
        return Lender.borrowed(self, x)


class InAList(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def other(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class KeptForLater(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept_for_later = nn.Linear(4, 4)
        self.later = lambda x: self.kept_for_later(x)


class ByItsClass(Plain):
    part = "by_its_class"

    def __init__(self) -> None:
        super().__init__()
        self.by_its_class = nn.Linear(4, 4)


class Weight(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4))

    @property
    def shown(self) -> Tensor:
        return 2 * self.table


class SpareConfig(PretrainedConfig):
    model_type = "spare"
    hidden_size = 4


class Spare(PreTrainedModel):
    """A weight as large as the hidden units, which nothing names."""

    config_class = SpareConfig
    main_input_name = "inputs_embeds"

    def __init__(self, config: SpareConfig) -> None:
        super().__init__(config)
        self.up, self.down, self.unsaid = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(6, 6)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(inputs_embeds)))


class Spared(Spare):
    """It can be asked for what its first call does not read, by an object that nobody guesses."""

    def forward(self, inputs_embeds: Tensor, note: Any = None) -> Tensor:
        hidden = torch.relu(self.up(inputs_embeds))
        return self.down(hidden if note is None else self.unsaid(hidden))
