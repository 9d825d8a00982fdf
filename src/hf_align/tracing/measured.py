"""A graph held against runs of its model, where what was written down took something for granted (`listed.py`).

Weights and inputs are random. In some runs all tokens are the same one, so that few experts are chosen, and in some all
but a few, which then may choose an expert alone. In others the choices are made by a plan (`planned.py`), so that each
number of rows that an expert can get is met. Where lists go by no choice of the largest, more random runs are made
until they have had every length, or for long. A graph that lets all of them run gives what the model gives only if
those that were not chosen change nothing. What a model's own code asks for in runs alone must go both ways in these. It
counts as measured where each list that was written down at full length held some entries, but not all, in some run, and
where what was taken for how many rows have each key was that in all.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_align.errors import first_line
from hf_align.tracing.branches.taken import in_runs, left_open
from hf_align.tracing.build import canonical_names, quiet, trained_buffers
from hf_align.tracing.execute import run
from hf_align.tracing.frames import line
from hf_align.tracing.ops import Trait
from hf_align.tracing.parted import are_counts, are_keys, numbers_seen
from hf_align.tracing.planned import EACH, Kind, Planned
from hf_align.tracing.program import Program
from hf_align.tracing.results import behaviour_of
from hf_align.tracing.returned import returned
from hf_align.tracing.state import left_as_found
from hf_align.tracing.tokens import announcing_tokens

logger = logging.getLogger(__name__)
LARGEST = 20_000_000
"""Parameters up to which a model is run."""
_RUNS = 12
_BY_CHANCE = 96
"""Runs at most until each list has had every length, where no plan makes the choices (a sort, a threshold)."""
_MORE, _MORE_BY_CHANCE = 1, 16
"""Runs for another call of the same lines, the first of which is the most telling."""
_LARGE = 3
"""Weights that are so much larger choose more of what seldom is."""
_RANDOM = 2
"""Of each three runs, the one with random tokens."""
_TOLERANCE = 1e-4
"""Of float32, relative to the largest output."""


@dataclass
class Measured:
    """What runs of a model have shown.

    Attributes:
        places: the lines whose lists were written down at full length, and shorter in some run.
        refuted: those where a program gave something else than a run; another call does not make them good.
        met: how many rows some expert got, by how many experts there are and how many a row chooses.
        announcing: whether some list got shorter only where tokens that announce other data stood in a text.
        needs_ends: whether texts are refused that the token does not end which ends those of the call.
    """

    places: set[str] = field(default_factory=set)
    refuted: set[str] = field(default_factory=set)
    met: dict[Kind, set[int]] = field(default_factory=dict)
    announcing: bool = False
    needs_ends: bool = False


class _Lengths(TorchDispatchMode):
    """Notes how many entries of masks are listed, or put in order, and which numbers code asks for.

    Attributes:
        places: the lines of modelling code that list or put some entries of a mask, but not all, or that ask how many
            of what is sorted or counted have each key.
        others: the lines that ask for other numbers.
        is_shorter: whether any list has fewer entries than its mask.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: set[str] = set()
        self.others: set[str] = set()
        self.is_shorter = False
        self._asked: list[tuple[str, Tensor]] = []
        self._keys: list[Tensor] = []
        self._met: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._most: dict[tuple[str, int], int] = {}
        self._times = Counter[str]()

    @contextmanager
    def of_a_run(self) -> Iterator[None]:
        """While a model is called once."""
        for seen in (self._times, self._asked, self._keys):
            seen.clear()
        with numbers_seen(lambda value: self._asked.append((line(), value.detach().clone()))), self:
            yield
        for place, numbers in self._asked:
            counted = numbers.dim() == 1 and any(are_counts(numbers, keys) for keys in self._keys)
            (self.places if counted else self.others).add(place)

    def is_open(self) -> bool:
        """Whether some list that is not always as long has had some lengths only: of each that a line makes, as for
        each expert, or where these are many, of all together."""
        varying = {at: met for at, met in self._met.items() if len(met) > 1}
        lists = [(met, self._most[at]) for at, met in varying.items()]
        if sum(most for _, most in lists) > EACH:
            together = {place: set[int]().union(*(m for (p, _), m in varying.items() if p == place))
                        for place, _ in varying}  # fmt: skip
            lists = [(met, max(most for (p, _), most in self._most.items() if p == place))
                     for place, met in together.items()]  # fmt: skip
        return any(len(met) <= most for met, most in lists)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = behaviour_of(func)
        masks = [args[0]] if Trait.LISTS in op.traits and len(args) == 1 else []
        if Trait.PUTS_IN_ORDER in op.traits:
            masks = [args[1]]
        if op.is_indexing:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if op.traits & (Trait.SORTS | Trait.COUNTS) and are_keys(args[0]):
            self._keys.append(args[0].clone())
        if Trait.SORTS in op.traits and are_keys(args[0]):
            masks = [args[0] == key for key in range(min(int(args[0].max()) + 1, EACH))]
        for mask in masks:
            place, length = line(), int(mask.count_nonzero())
            at = place, self._times[place]
            self._times[place] += 1
            self._met[at].add(length)
            self._most[at] = max(mask.shape, default=1)
            self.is_shorter |= length < mask.numel()
            self.places |= {place} if 0 < length < mask.numel() else set()
        return func(*args, **(kwargs or {}))


def lists_of_data(call: Callable[[], object]) -> bool:
    """Whether a call of a model lists fewer entries than a mask has."""
    lengths = _Lengths()
    with lengths.of_a_run():
        call()
    return lengths.is_shorter


def agrees_with_runs(model: PreTrainedModel, program: Program, places: Collection[str], before: Measured) -> bool:
    """Whether a program gives all that its model gives, in runs that make each list shorter at least once.

    Args:
        places: where the program's lists were made.
        before: what other calls of the model have shown, to which this one is added if it agrees.
    """
    if before.refuted & set(places):
        return False
    runs = _Runs(model, program, set(places), before)
    try:
        with in_runs(model) as met:
            agree = runs.agree()
        agree = agree and not left_open(met)
    except Exception as error:  # as many ways to fail as there are models
        logger.info("%s: no run to measure (%s)", type(model).__name__, first_line(error))
        return False
    if agree:
        before.places |= runs.lengths.places & set(places)
    elif agree is False:
        before.refuted |= runs.lengths.others & set(places) or set(places)
    return bool(agree) and before.places >= set(places)


class _Runs:
    """The runs of a model that a program is held against.

    Attributes:
        first: whether this call makes lists that no other has made; else it is run less often.
    """

    def __init__(self, model: PreTrainedModel, program: Program, places: set[str], before: Measured) -> None:
        self.model, self.program, self.places, self.before = model, program, places, before
        self.first = not before.places or not before.places >= places
        self.lengths, self.planned = _Lengths(), Planned(before.met, first=self.first)
        self.rng = Generator().manual_seed(0)
        self.weights = dict[str, Tensor]()

    def agree(self) -> bool | None:
        """Whether they do; None if one gives no number."""
        return self._plain() and self._with_other_data() and self._by_plan() and self._by_chance()

    def _agrees(self, program: Program, number: int = _RANDOM) -> bool | None:
        with self.lengths.of_a_run():
            agrees = _agrees(self.model, program, self.weights, _free(program, self.rng, number))
        return agrees if self.lengths.others.isdisjoint(self.places) else False

    def _are_met(self) -> bool:
        return self.lengths.places | self.before.places >= self.places

    def _plain(self) -> bool | None:
        for number in range(_RUNS if self.first else _MORE):
            self.weights = random_weights(self.model, self.rng)
            if not (agrees := self._agrees(self.program, number)):
                return agrees
        return True

    def _with_other_data(self) -> bool | None:
        """With tokens that announce other data, if lists are met by no others."""
        announcing = announcing_tokens(self.model.config)
        if not len(announcing) or self._are_met():
            return True
        more = replace(self.program, example=self.program.example.with_tokens(announcing))
        agree = all(self._agrees(more) for _ in range(_RUNS))
        self.before.announcing |= agree
        return agree

    def _by_plan(self) -> bool | None:
        while self.planned.number < max(self.planned.most, 1):
            with self.planned:
                if not (agrees := self._agrees(self.program)):
                    return agrees
            self.planned.number += 1
        return True

    def _by_chance(self) -> bool:
        """Until each list has had every length, or for long. Weights are larger while some list was always empty, or
        always whole; numbers that are then too large say nothing."""
        for number in range(_BY_CHANCE if self.first else 0 if self.planned.most else _MORE_BY_CHANCE):
            met = self._are_met()
            if met and not self.lengths.is_open():
                break
            self.weights = random_weights(self.model, self.rng, 1 if met or number % 2 else _LARGE)
            if self._agrees(self.program) is False:
                return False
        return True


def needs_ends(model: PreTrainedModel, program: Program) -> bool:
    """Whether a model refuses texts without the token that ends those of a program, and where that stands in other
    places, too, refuses them or answers as the program does."""
    rng = Generator().manual_seed(0)
    weights, free = random_weights(model, rng), program.example.drawn(rng)
    ends = program.example.ends

    def answer(places: Callable[[str, Tensor], Tensor]) -> bool | None:
        with suppress(Exception):  # models refuse texts in as many ways as there are models
            return bool(_agrees(model, program, weights, {**free, **{n: places(n, free[n]) for n in ends}}))
        return None

    def more(count: int, rows: int | None) -> Callable[[str, Tensor], Tensor]:
        """The first texts, or all, with so many more of these tokens."""

        def places(name: str, ids: Tensor) -> Tensor:
            every = torch.full_like(ids[:rows, -1 - count :], ends[name])
            return torch.cat([torch.cat([ids[:rows, : -1 - count], every], 1), ids[rows:] if rows else ids[:0]])

        return places

    if answer(lambda name, ids: ids[:, :1].expand(ids.shape)) is not None:
        return False
    length = min(free[name].shape[1] for name in ends)
    return all(answer(more(count, rows)) is not False for count in (1, 2, length) for rows in (None, 1))


def _agrees(
    model: PreTrainedModel, program: Program, weights: dict[str, Tensor], free: dict[str, Tensor]
) -> bool | None:
    """Whether a program gives all that its model gives, in one run; None if that is no number."""
    names, _ = canonical_names(model)
    arguments = dict(program.example.arguments) | free
    with torch.no_grad(), quiet():
        with left_as_found(model):
            results = torch.func.functional_call(model, weights, (), arguments, tie_weights=True)
        values = run(program, {names.get(n, n): w for n, w in weights.items()}, free)
    given = [values[node] for node in program.interface]
    found = returned(model, results)
    left = iter(sorted(found, key=Tensor.is_floating_point, reverse=True))
    # some are stages on the way to the first, which a program does not return
    if all(any(_is_close(value, other) for other in left) for value in given):
        return True
    return False if all(t.isfinite().all() for t in found) else None


def _is_close(given: Tensor, expected: Tensor) -> bool:
    if given.shape != expected.shape or not expected.numel():
        return given.shape == expected.shape
    given, expected = given.double(), expected.double()
    return bool((given - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def random_weights(model: PreTrainedModel, rng: Generator, size: float = 1.0) -> dict[str, Tensor]:
    """Values of all that a model is trained in, none of which is small beside the others."""
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    scales = {n: size * (s[-1] ** -0.5 if len(s) > 1 else 0.5) for n, s in shapes.items()}
    drawn = {n: torch.randn(s, generator=rng) * scales[n] for n, s in shapes.items()}
    return drawn | {n: torch.rand(s, generator=rng) + 0.5 for n, s in trained_buffers(model).items()}


def _free(program: Program, rng: Generator, number: int) -> dict[str, Tensor]:
    """Values of the free arguments: tokens are the same but for a few, all the same, or random, in turn."""
    given = program.example.arguments
    free = program.example.random({name: tuple(given[name].shape) for name in program.inputs.values()}, rng)
    free = {n: t.to(given[n].dtype) for n, t in free.items()}
    for name in program.example.tokens.keys() & free.keys() if number % 3 < _RANDOM else ():
        tokens = program.example.tokens[name]
        one, other = tokens[torch.randperm(len(tokens), generator=rng)[[0, -1]]]
        free[name] = torch.full_like(free[name], int(one))
        if number % 3 == 0:
            free[name].flatten()[-1 - number // 3 :] = other
    return {name: program.example.at_end(name, value) for name, value in free.items()}


def parameters_of(model: PreTrainedModel) -> int:
    """How many numbers its weights have."""
    return sum(p.numel() for p in model.parameters())
