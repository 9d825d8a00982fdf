"""Calls of a model that somebody wrote down: what is given besides the arguments of the first call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_align.errors import HfAlignError
from hf_align.tracing.example import Example
from hf_align.tracing.inputs import reader
from hf_align.tracing.mode import Mode, extent

_DTYPES = {"float": torch.float32, "int": torch.long, "bool": torch.bool, "tokens": torch.long}


@dataclass(frozen=True)
class Argument:
    """One argument of a call.

    Attributes:
        shape: sizes, `batch` and `tokens` of the first call, or fields of the config; None for what is no tensor.
        dtype: `float`, `int`, `bool`, or `tokens` for ids of the vocabulary.
        values: a number or nested tuples that fill the shape; None where any values may be given: of floats and tokens.
    """

    name: str
    shape: tuple[int | str, ...] | None
    dtype: str
    values: Any = None


@dataclass(frozen=True)
class GivenCall:
    """A mode that no trying finds."""

    name: str
    arguments: tuple[Argument, ...]

    def mode(self, model: PreTrainedModel, base: Example) -> Mode:
        """The call, with the other arguments of the first one.

        Raises:
            HfAlignError: a shape names no number of the config, or the values do not fill it.
        """
        rows, tokens = extent(base)
        read = reader(model, rows, tokens)
        arguments, free = dict(base.arguments), dict(base.tokens)
        for argument in self.arguments:
            free.pop(argument.name, None)
            if argument.shape is None:
                arguments[argument.name] = argument.values
                continue
            known = {"batch": rows, "tokens": tokens}
            shape = [size if isinstance(size, int) else known.get(size) or read.number(size, default=0)
                     for size in argument.shape]  # fmt: skip
            if 0 in shape:
                unknown = argument.shape[shape.index(0)]
                raise HfAlignError(f"{self.name}: {unknown} is no size: the config has no such number")
            if argument.dtype == "tokens" and argument.values is None:
                ids = read.ids(read.number("vocab_size", default=2))[0]
                free[argument.name] = next(iter(base.tokens.values()), ids)
            arguments[argument.name] = self._filled(argument, shape)
        return Mode(self.name, Example(arguments, free))

    def _filled(self, argument: Argument, shape: list[int]) -> Tensor:
        value = torch.tensor(0 if argument.values is None else argument.values, dtype=_DTYPES[argument.dtype])
        try:
            return value.expand(shape).contiguous()
        except RuntimeError as error:
            raise HfAlignError(f"{self.name}: the values of {argument.name} do not fill {shape}") from error
