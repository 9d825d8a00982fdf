"""A small copy of a model with random weights, which is run to see what changes its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import IncompatibleModels, first_line
from hf_align.runtime.devices import CPU, drawing
from hf_align.tracing.answers import answers_by_name
from hf_align.tracing.asked import Ask, asks, whatever_number
from hf_align.tracing.branches.taken import brought
from hf_align.tracing.build import build_without_weights, quiet, trained_buffers
from hf_align.tracing.first_calls import first_calls
from hf_align.tracing.measured import LARGEST, parameters_of, random_weights
from hf_align.tracing.mode import Mode
from hf_align.tracing.small.kinds import Layers, with_all_kinds
from hf_align.tracing.small.reduce import running_copy
from hf_align.tracing.state import forgetting

logger = logging.getLogger(__name__)
_SMALL = 100_000
"""Parameters of a model of which no smaller copy is made."""
_TOLERANCE = 1e-4
"""Of float32, relative to the largest entry of the answer."""


class SmallCopy:
    """A model of random weights that is quickly run, to see what changes its answer.

    Args:
        model: the copy; its weights are never read.
        candidate: the number of its first call among `first_calls`.
        length: of that call, in tokens.
    """

    def __init__(self, model: PreTrainedModel, candidate: int, rows: int, length: int) -> None:
        rng, calls = Generator().manual_seed(0), first_calls(model, rows, length)
        self.model, self.example = model, next(islice(calls, candidate, None))
        self._weights = random_weights(model, rng)
        self._statistics = trained_buffers(model).keys()
        self._given = {n: t.to(self.example.arguments[n].dtype) for n, t in self.example.drawn(rng).items()}
        plain = self._results(Mode("", self.example))
        self._name, self._shown = _name_of_answer(plain), _shown(model, plain)
        self._plain = next(iter(_answers(plain, self._name)), None)

    @property
    def words(self) -> list[Tensor]:
        """The token ids that it is given."""
        return [self._given[name] for name in self.example.tokens]

    @property
    def stored(self) -> dict[str, Tensor]:
        """What its files hold."""
        others = {n: t for n, t in self.model.state_dict().items() if not isinstance(t, FakeTensor)}
        return others | self._weights

    @property
    def answers_without_values(self) -> bool:
        """Whether it goes by what it was given while it was traced, and kept."""
        return isinstance(self._plain, FakeTensor)

    @property
    def is_steady(self) -> bool:
        """Whether it answers twice alike, in numbers."""
        is_number = self._plain is not None and bool(self._plain.isfinite().all())
        return is_number and self.is_plain(self.answers(Mode("", self.example)))

    @cached_property
    def changing(self) -> frozenset[str]:
        """What it may be asked for that changes its answer, in whichever way it takes, and whatever the number."""
        return frozenset(whatever_number(ask.said) for ask in asks(self.model, self.example) if self._is_changed(ask))

    def gives_no_number(self, mode: Mode) -> bool:
        """Whether it answers a call, but with no finite number, as where something is divided by zero."""
        answers = self.answers(mode)
        return bool(answers) and not any(bool(answer.isfinite().any()) for answer in answers)

    def _is_changed(self, ask: Ask) -> bool:
        results = list[Any]()
        for mode in ask.modes(self.example):
            with suppress(Exception):  # models refuse arguments in as many ways as there are models
                results.append(self._results(mode))
        ways = [answers for each in results if (answers := self._in_numbers(each))]
        shows_more = any(_shown(self.model, each) - self._shown for each in results)
        return bool(ways) and (shows_more or not any(map(self.is_plain, ways)))

    def is_plain(self, answers: list[Tensor]) -> bool:
        """Whether the answer to the first call is among some results, or some rows of it."""
        return self._plain is not None and has_answer(answers, self._plain)

    def answers(self, mode: Mode, times: float = 1.0) -> list[Tensor]:
        """What may be the answer to a call; nothing where the model refuses it.

        Args:
            times: how much larger its weights are.

        Raises:
            IncompatibleModels: it goes by what other calls have computed of other weights.
        """
        try:
            results = self._results(mode, times)
        except Exception:  # models refuse arguments in as many ways as there are models
            return []
        return self._in_numbers(results)

    def _in_numbers(self, results: Any) -> list[Tensor]:
        """What may be the answer among some results.

        Raises:
            IncompatibleModels: as `answers`.
        """
        found = _answers(results, self._name)
        if any(isinstance(answer, FakeTensor) for answer in found):
            raise _keeps_what_it_computed(self.model)
        return found

    def answers_of(self, mode: Mode, times: float = 1.0) -> list[Tensor]:
        """What may be the answer to a call.

        Raises:
            Exception: whatever the model raises.
        """
        return _answers(self._results(mode, times), self._name)

    def _results(self, mode: Mode, times: float = 1.0) -> Any:
        with mode.prepared(self.model):
            return self._called({n: v for n, v in mode.example.arguments.items() if n not in self._given}, times)

    @torch.no_grad()
    def answers_of_another(self, model: PreTrainedModel) -> list[Tensor]:
        """What may be the answer of another model to the first call."""
        mode = Mode("", self.example)
        with mode.prepared(model), quiet(), drawing(CPU, 0):
            return _answers(model(**{**mode.example.arguments, **self._given}), self._name)

    @torch.no_grad()
    def _called(self, more: Mapping[str, Any], times: float) -> Any:
        arguments = {**self._given, **more}
        weights = {n: w.clone() if n in self._statistics else w for n, w in self._weights.items()}
        if times != 1.0:
            weights |= {n: w * times for n, w in weights.items() if n not in self._statistics}
        with quiet(), forgetting(self.model), drawing(CPU, 0):
            return torch.func.functional_call(self.model, weights, (), arguments, tie_weights=True)


def small_copy(
    model: PreTrainedModel, config: PretrainedConfig, candidate: int, rows: int, length: int
) -> SmallCopy | None:
    """A copy that answers alike whenever it is asked the same; None where there is none.

    Args:
        config: of the model, with all of its layers if it was shortened.
        candidate: the number of the model's first call among `first_calls`.
        rows, length: of that call.

    Raises:
        IncompatibleModels: it goes by what other calls have computed of other weights.
    """
    for copied in _copies(model, config, candidate):
        try:
            copy = SmallCopy(copied(), candidate, rows, length)
        except Exception as error:  # sizes that do not go together fail in their own way
            logger.info("%s: no copy to run (%s)", model.config.model_type, first_line(error))
            continue
        if copy.answers_without_values:
            raise _keeps_what_it_computed(model)
        if copy.is_steady:
            return copy
    return None


def _keeps_what_it_computed(model: PreTrainedModel) -> IncompatibleModels:
    return IncompatibleModels(
        f"{type(model).__name__} keeps what it computed in one call, and answers by it in others, of other weights"
    )


def _copies(
    model: PreTrainedModel, config: PretrainedConfig, candidate: int
) -> Sequence[Callable[[], PreTrainedModel]]:
    """How to get at a model to run: itself where it is small, else one with small sizes, else itself if it can be. What
    it is asked for may change one kind of layer alone, so it has them all."""
    size = parameters_of(model)
    if size <= _SMALL:
        return (lambda: model,)
    whole = Layers.of(model)

    def built(copied: PretrainedConfig | None) -> PreTrainedModel:
        copy = None if copied is None else build_without_weights(copied)
        if copy is None or whole.lacking(copy):
            raise IncompatibleModels("no small copy with every kind of layer runs")
        return copy

    shrunk = (
        lambda: built(with_all_kinds(config, whole)),
        lambda: built(running_copy(config, LARGEST, candidate)),
    )
    return (*shrunk, lambda: model) if size <= LARGEST else shrunk


def _name_of_answer(results: Any) -> str | None:
    """The first result with a name that is made of floating point numbers, but for the loss."""
    items = results.items() if isinstance(results, Mapping) else ()
    return next((n for n, t in items if isinstance(t, Tensor) and t.is_floating_point() and n != "loss"), None)


def _shown(model: PreTrainedModel, results: Any) -> set[str]:
    """The names of what is returned beside its answer by code that a model brings along: of each in a tuple, too."""
    named = answers_by_name(model, results) if isinstance(results, Mapping) and brought(model) else {}
    return {name for name, value in named.items() if isinstance(value, Tensor)}


def _answers(results: Any, name: str | None) -> list[Tensor]:
    """The result of a name; of results without names, all that are made of floating point numbers."""
    found = [results.get(name)] if isinstance(results, Mapping) and name is not None else tree_leaves(results)
    return [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]


def has_answer(answers: Iterable[Tensor], plain: Tensor) -> bool:
    """Whether one of some results is the plain answer, or some rows of it."""
    return any(_is_alike(plain, answer) for answer in answers)


def _is_alike(plain: Tensor, answer: Tensor) -> bool:
    """Whether an answer is the plain one, or some rows of it."""
    if not plain.numel():
        return plain.shape == answer.shape
    limit = _TOLERANCE * plain.abs().max()
    if plain.shape == answer.shape:
        return bool((plain - answer).abs().max() <= limit)
    if plain.dim() != answer.dim() or plain.shape[-1] != answer.shape[-1] or not answer.numel():
        return False
    apart = torch.cdist(answer.flatten(0, -2), plain.flatten(0, -2), p=torch.inf)
    return bool((apart.min(-1).values <= limit).all())
