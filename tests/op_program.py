"""One op as a whole model: operands written by free linear maps, the op, and a free linear map that reads the result.

Every axis of an operand is a space that nothing else bounds, and every axis of a result is read by nothing but weights,
so that whatever a derived spec says about them comes from the rule of the op alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Generator, Tensor, nn
from transformers import PretrainedConfig

from hf_align.tracing import recorder, trace
from hf_align.tracing.example import Example
from hf_align.tracing.program import Program

_INPUTS = 3
"""Numbers that the model reads."""

Draw = Callable[[tuple[int, ...], Generator], Tensor]


def normal(shape: tuple[int, ...], rng: Generator) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def positive(shape: tuple[int, ...], rng: Generator) -> Tensor:
    return 0.2 + torch.rand(shape, generator=rng, dtype=torch.float64)


def small(shape: tuple[int, ...], rng: Generator) -> Tensor:
    """So that what is written lies between zero and one."""
    return 0.02 + 0.2 * torch.rand(shape, generator=rng, dtype=torch.float64)


def digits(shape: tuple[int, ...], rng: Generator) -> Tensor:
    """One of three values for each row, so that what is written has ties and zeros."""
    kept = torch.zeros(shape[-1], dtype=torch.float64)
    kept[0] = 1.0
    return torch.randint(-1, 2, shape, generator=rng).double()[..., :1] * kept


def mostly(value: int) -> Draw:
    """Zeros and ones, most of them this."""

    def draw(shape: tuple[int, ...], rng: Generator) -> Tensor:
        return digits(shape, rng) * 0 + (torch.rand((*shape[:-1], 1), generator=rng) < 0.15 + 0.7 * value).double()

    return draw


def wild(shape: tuple[int, ...], rng: Generator) -> Tensor:
    """So that what is written is a number, infinite, or none."""
    numbers = torch.randn(shape, generator=rng, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=rng) < 0.4, numbers * torch.inf, numbers)


@dataclass(frozen=True)
class Data:
    """An operand that the model computes; each of its axes is free."""

    shape: tuple[int, ...]
    draw: Draw = normal


@dataclass(frozen=True)
class Weight:
    """An operand that is a parameter as it is stored."""

    shape: tuple[int, ...]
    draw: Draw = normal


@dataclass(frozen=True)
class Statistic:
    """An operand that is a persistent buffer, which training moves."""

    shape: tuple[int, ...]
    draw: Draw = positive


Operand = Data | Weight | Statistic


@dataclass(frozen=True)
class OpExample:
    """A call of one op.

    Attributes:
        op: its name in the graph.
        operands: what the call gets.
        along: read the results along their last axis alone, which is then all that happens to them.
    """

    op: str
    call: Callable[..., Any]
    operands: tuple[Operand, ...]
    label: str
    along: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}".strip()


class OpModel(nn.Module):
    """reader(op(writer(u), …)) with u [3]."""

    def __init__(self, example: OpExample) -> None:
        super().__init__()
        self.example = example
        self.config = PretrainedConfig()
        rng = torch.Generator().manual_seed(0)
        self.written, self.stored, self.statistics = nn.ParameterDict(), nn.ParameterDict(), nn.Module()
        for i, operand in enumerate(example.operands):
            if isinstance(operand, Data):
                self.written[str(i)] = operand.draw((math.prod(operand.shape), _INPUTS), rng)
            elif isinstance(operand, Weight):
                self.stored[str(i)] = operand.draw(operand.shape, rng)
            else:
                self.statistics.register_buffer(f"of{i}", operand.draw(operand.shape, rng))
        self.readers = nn.ParameterList()
        with torch.no_grad():
            for result in self.results(torch.ones(_INPUTS, dtype=torch.float64)):
                width = result.shape[-1] if example.along else result.numel()
                self.readers.append(torch.randn(2, width, generator=rng, dtype=torch.float64))

    def operand(self, i: int, u: Tensor) -> Tensor:
        if str(i) in self.written:
            return nn.functional.linear(u, self.written[str(i)]).view(self.example.operands[i].shape)
        return self.stored[str(i)] if str(i) in self.stored else getattr(self.statistics, f"of{i}")

    def results(self, u: Tensor) -> list[Tensor]:
        found = self.example.call(*(self.operand(i, u) for i in range(len(self.example.operands))))
        return [_as_numbers(r) for r in _tensors(found) if r.shape != (0,)]

    def forward(self, u: Tensor) -> Tensor:
        read = [_read(y, v, self.example.along) for y, v in zip(self.results(u), self.readers, strict=True)]
        return torch.cat(read) if len(read) > 1 else read[0]


def _read(result: Tensor, reader: Tensor, along: bool) -> Tensor:
    if along:
        return nn.functional.linear(result, reader).reshape(-1)
    return nn.functional.linear(result.reshape(-1), reader)


def _tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, (tuple, list)):
        for part in results:
            yield from _tensors(part)


def _as_numbers(result: Tensor) -> Tensor:
    if result.is_complex():
        result = torch.view_as_real(result)
    return result if result.dtype == torch.float64 else result.to(torch.float64)


_WRITTEN_OTHERWISE = frozenset(("numpy_T", "index_put", "index_put_"))
"""Ops that a recording writes down as others, or with other arguments (a mask as numbers): what it would not show."""


def trace_op(example: OpExample) -> Program:
    """As `trace.trace_model` would, but ops that write in place stay what they are: their rules are meant."""
    model: Any = OpModel(example).eval()
    arguments = Example({"u": torch.ones(_INPUTS, dtype=torch.float64)}, {})
    way = trace._by_export if example.op in _WRITTEN_OTHERWISE else trace._by_record
    with (
        torch.no_grad(),
        mock.patch.object(trace, "_writes_in_place", lambda node: False),
        mock.patch.object(recorder.Recorder, "_written_anew", lambda recorder, *call: False),
    ):
        return way(model, arguments)


def draw_weights(example: OpExample, program: Program, rng: Generator) -> dict[str, Tensor]:
    """Random values of every parameter, as the operands ask for them."""
    weights = {}
    for name, shape in program.shapes.items():
        group, _, last = name.rpartition(".")
        draw = normal if group == "readers" else example.operands[int(last.removeprefix("of"))].draw
        weights[name] = draw(shape, rng)
    return weights


def draw_inputs(rng: Generator) -> dict[str, Tensor]:
    return {"u": 0.5 + torch.rand(_INPUTS, generator=rng, dtype=torch.float64)}
