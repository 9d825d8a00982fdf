"""A graph held against runs of its model, where what was written down took something for granted (`listed.py`).

Weights and inputs are random. In some runs all tokens are the same one, so that few experts are chosen, and in some all
but one, which then may choose an expert alone. A graph that lets all of them run gives what the model gives only if
those that were not chosen change nothing. It counts as measured where each list that was written down at full length
was shorter than that in some run.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hf_align.errors import first_line
from hf_align.tracing.build import canonical_names, quiet, trained_buffers
from hf_align.tracing.execute import run
from hf_align.tracing.ops import Trait
from hf_align.tracing.program import Program
from hf_align.tracing.results import behaviour_of
from hf_align.tracing.state import left_as_found

logger = logging.getLogger(__name__)
LARGEST = 20_000_000
"""Parameters up to which a model is run."""
_RUNS = 12
_MORE = 1
"""Runs for another call of the same lines, the first of which is the most telling."""
_TOLERANCE = 1e-4
"""Of float32, relative to the largest output."""


class _Shortened(TorchDispatchMode):
    """Notes the lines of modelling code that list fewer entries than a mask has."""

    def __init__(self, here: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.here = here
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = behaviour_of(func)
        masks = [args[0]] if Trait.LISTS in op.traits and len(args) == 1 else []
        if op.is_indexing:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if any(not bool(mask.all()) for mask in masks):
            self.places.add(self.here())
        return func(*args, **(kwargs or {}))


def agrees_with_runs(
    model: PreTrainedModel, program: Program, places: Collection[str], here: Callable[[], str]
) -> bool:
    """Whether a program gives all that its model gives, in runs that make each list shorter at least once.

    Args:
        places: where the program's lists were made that no other call of the model has shown to be good.
        here: the line of modelling code that runs.
    """
    rng = Generator().manual_seed(0)
    shortened = _Shortened(here)
    names, _ = canonical_names(model)
    for weights, free in itertools.islice(_draws(model, program, rng), _RUNS if places else _MORE):
        arguments = dict(program.example.arguments) | free
        try:
            with torch.no_grad(), quiet(), left_as_found(model), shortened:
                results = torch.func.functional_call(model, weights, (), arguments, tie_weights=True)
            expected = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
            expected.sort(key=Tensor.is_floating_point, reverse=True)
            with torch.no_grad():
                values = run(program, {names.get(n, n): w for n, w in weights.items()}, free)
        except Exception as error:  # as many ways to fail as there are models
            logger.info("%s: no run to measure (%s)", type(model).__name__, first_line(error))
            return False
        given = [values[node] for node in program.interface]
        left = iter(expected)  # some are stages on the way to the first, which a program does not return
        if not all(any(_is_close(value, other) for other in left) for value in given):
            return False
    return shortened.places >= set(places)


def _is_close(given: Tensor, expected: Tensor) -> bool:
    if given.shape != expected.shape or not expected.numel():
        return given.shape == expected.shape
    return bool((given - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _draws(
    model: PreTrainedModel, program: Program, rng: Generator
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights, and values of the free arguments: tokens are the same but for one, all the same, or random, in turn."""
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    statistics = trained_buffers(model)
    for number in itertools.count():
        weights = {n: torch.randn(s, generator=rng) * (s[-1] ** -0.5 if len(s) > 1 else 0.5) for n, s in shapes.items()}
        weights |= {n: torch.rand(s, generator=rng) + 0.5 for n, s in statistics.items()}
        given = program.example.arguments
        free = program.example.random({name: tuple(given[name].shape) for name in program.inputs.values()}, rng)
        free = {n: t.to(given[n].dtype) for n, t in free.items()}
        for name in program.example.tokens.keys() & free.keys() if number % 3 < 2 else ():
            tokens = program.example.tokens[name]
            one, other = tokens[torch.randperm(len(tokens), generator=rng)[[0, -1]]]
            free[name] = torch.full_like(free[name], int(one))
            free[name].flatten()[-1] = other if number % 3 == 0 else one
        yield weights, free


def parameters_of(model: PreTrainedModel) -> int:
    """How many numbers its weights have."""
    return sum(p.numel() for p in model.parameters())
