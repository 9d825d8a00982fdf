"""Rows that are sorted by what their data chooses, and cut where one choice ends, written down at full length.

Experts are often written so: the numbers of the chosen experts are sorted, rows are put in this order, and each expert
takes as many of them as chose it, which only a run decides. Here the rows stay in place, and each part is taken to hold
all of them. What is joined of all parts gives each row what its own part gives; what goes back by the numbers of a part
is what this part holds (`listed.py`).

Where nothing is sorted, code may still ask how many rows chose each expert, to skip those that none did. It is told
that some did, not how many, and all experts run (`listed.py`).

As with lists, whether nothing else depends on these numbers is held against runs (`measured.py`), and so is whether
what code asks for are the numbers of rows that have each key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from hf_align.tracing.listed import Lists
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.results import Behaviour

_SAID = 4099
"""Rows that each part is said to have: where one starts and ends then shows which one it is. Loops over so many rows
come to an end, where code has any."""
_aten = torch.ops.aten


@dataclass
class _Sorted:
    """Rows that were sorted.

    Attributes:
        keys: what each row is sorted by, a whole number from zero on.
        held: [rows, count], which row belongs to which part, once that is asked for.
    """

    keys: FakeTensor
    held: Tensor | None = None


class Some:
    """That some rows have a key: code may ask whether any do, and nothing else.

    Args:
        refuse: raises an error.
    """

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return not self._is_more_than(other)

    def __gt__(self, other: object) -> bool:
        return self._is_more_than(other)

    def __le__(self, other: object) -> bool:
        return not self._is_more_than(other)

    def _is_more_than(self, other: object) -> bool:
        if type(other) is not int or other != 0:
            self._refuse()
        return True

    def _number(self, *_: object) -> NoReturn:
        self._refuse()

    __hash__ = __index__ = __int__ = __float__ = __lt__ = __ge__ = __neg__ = __abs__ = __repr__ = __format__ = _number
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _number
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __divmod__ = __rdivmod__ = _number
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __rshift__ = __lshift__ = __invert__ = _number


@contextmanager
def numbers_told(numbers: Callable[[FakeTensor], list[int] | list[Some]]) -> Iterator[None]:
    """While code that asks for the numbers of a tensor without value is told some."""
    listed = patch.object(FakeTensor, "tolist", lambda value: numbers(value))
    as_array = patch.object(FakeTensor, "numpy", lambda value: torch.tensor(numbers(value)).numpy())
    with listed, as_array:
        yield


@contextmanager
def numbers_seen(see: Callable[[Tensor], None]) -> Iterator[None]:
    """While it is seen in a run which tensors code asks for their numbers."""

    def seeing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def ask(value: Tensor, *args: Any, **kwargs: Any) -> Any:
            see(value)
            return plain(value, *args, **kwargs)

        return ask

    listed = patch.object(Tensor, "tolist", seeing(Tensor.tolist))
    as_array = patch.object(Tensor, "numpy", seeing(Tensor.numpy))
    with listed, as_array:
        yield


class Parts:
    """The rows that were sorted last in one pass.

    Attributes:
        call: runs an op, and writes it down.
        nodes: what each value is written down as.
        here: the line of modelling code that runs.
        refuse: raises what is said of code that needs numbers.
        stay: whether what is sorted stays in place.
        skips: whether nothing is sorted, and counts say no more than that there are some.
        asked_at: the first line that asked how many rows a part has.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        nodes: MutableMapping[Tensor, fx.Node],
        here: Callable[[], str],
        lists: Lists,
        refuse: Callable[[], NoReturn],
        *,
        stay: bool,
        skips: bool,
    ) -> None:
        self.call, self.nodes, self.here, self.lists = call, nodes, here, lists
        self.refuse, self.stay, self.skips = refuse, stay, skips
        self.asked_at: str | None = None
        self._asked_of_others: str | None = None
        self._counts = set[fx.Node]()
        self._last: _Sorted | None = None
        self._kinds = 0

    @property
    def open_question(self) -> str | None:
        """Where it was asked how many rows a part has of what was never sorted, or of what is not counted."""
        return (self._asked_of_others if self.skips else self.asked_at) if self._last is None else None

    def numbers(self, counts: FakeTensor) -> list[int] | list[Some] | None:
        """How many rows are said to have each key, or each key up to one; None where nothing is said."""
        self.asked_at = self.asked_at or self.here()
        if not self.stay or counts.dim() != 1:
            return None
        node = self.nodes[counts]
        while does(node, Trait.SAME | Trait.CASTS):
            node = cast(fx.Node, node.args[0])
        if node not in self._counts:
            self._asked_of_others = self._asked_of_others or self.here()
        if self.skips:
            self.lists.places.add(self.here())
            return [Some(self.refuse) for _ in range(len(counts))]
        self._kinds = len(counts)
        self.lists.places.add(self.here())
        return [_SAID * (i + 1 if does(node, Trait.RUNNING_SUM) else 1) for i in range(self._kinds)]

    def cut(self, op: Behaviour, args: Any, kwargs: Any) -> Any:
        """What an op gives that cuts a part, or all of them; None for all others."""
        is_cut = self.stay and self._last is not None and Trait.CUTS in op.traits
        return self._cut(*args, **kwargs) if is_cut else None

    def instead(self, func: Any, op: Behaviour, args: Any, kwargs: Any) -> Any:
        """What an op gives that sorts, counts, or joins the parts; None for all others."""
        if Trait.SORTS in op.traits and _are_open(args[0]):
            return self._sort(args[0], only_numbers=len(func._schema.returns) == 1)
        if Trait.COUNTS in op.traits and _are_open(args[0]):
            return self._count(*args, **kwargs)
        is_joined = self.stay and self._last is not None and Trait.JOINS in op.traits
        return self._join(*args, **kwargs) if is_joined else None

    def _sort(self, keys: FakeTensor, *, only_numbers: bool) -> Any:
        """Rows in the order in which they are."""
        self._last = _Sorted(keys)
        if not self.stay:
            return None
        self.lists.places.add(self.here())
        order = torch.arange(len(keys))
        return order if only_numbers else (keys, order)

    def _count(self, keys: Any, weights: Tensor | None = None, least: int = 0) -> Tensor | None:
        """How many rows have each key, by the largest one that there may be."""
        self.asked_at = self.asked_at or self.here()
        most = self.lists.most(keys)
        if not self.stay or weights is not None or most is None:
            return None
        kinds = int(most.max()) + 1
        if least < kinds:  # a run may count fewer of them
            self._asked_of_others = self._asked_of_others or self.here()
        held = self.call(_aten.one_hot.default, (keys, max(least, kinds)), {})
        counts: Tensor = self.call(_aten.sum.dim_IntList, (held, [0]), {})
        self._counts.add(self.nodes[counts])
        return counts

    def _cut(self, rows: Any, *which: Any, **more: Any) -> Any:
        """The part between two numbers of rows, or all parts, if that is what is cut."""
        if which and isinstance(which[0], (list, tuple)):  # the sizes of all pieces
            dim = which[1] if len(which) > 1 else more.get("dim", 0)
            are_all = [*which[0]] == [_SAID] * self._kinds and self._has(rows, dim)
            return [self._part(number, rows) for number in range(self._kinds)] if are_all else None
        dim, start, end, *step = which if len(which) > 2 else (None, None, None)
        if more or step not in ([], [1]) or type(start) is not int or type(end) is not int or not self._has(rows, dim):
            return None
        number, rest = divmod(start, _SAID)
        return self._part(number, rows) if not rest and end - start == _SAID and number < self._kinds else None

    def _has(self, rows: Tensor, dim: Any) -> bool:
        """Whether something has as many entries along its first axis as were sorted."""
        return self._last is not None and dim == 0 and rows.dim() > 0 and len(rows) == len(self._last.keys)

    def _part(self, number: int, rows: Tensor) -> Tensor:
        """All rows, as those that have some key."""
        if isinstance(rows, FakeTensor):
            whole: Tensor = self.call(_aten.slice.Tensor, (rows, 0, 0, len(rows)), {})
            return whole
        return self.lists.as_listed(rows.clone(), self._held(number))

    def _held(self, number: int) -> Tensor:
        """[rows], which of them have a key."""
        last = self._last
        assert last is not None
        if last.held is None:
            last.held = self.call(_aten.one_hot.default, (last.keys, self._kinds), {})
        held = self.call(_aten.select.int, (last.held, 1, number), {})
        found: Tensor = self.call(_aten.ne.Scalar, (held, 0), {})
        return found

    def _join(self, parts: Any, dim: int = 0) -> Tensor | None:
        """Of each row, what the part gives that it belongs to."""
        if len(parts) != self._kinds or not all(isinstance(part, FakeTensor) and self._has(part, dim)
                                                for part in parts):  # fmt: skip
            return None
        joined: Tensor | None = None
        for number, part in enumerate(parts):
            held = self.call(_aten.reshape.default, (self._held(number), [-1] + [1] * (part.dim() - 1)), {})
            own = self.call(_aten.where.ScalarOther, (held, part, 0), {})
            joined = own if joined is None else self.call(_aten.add.Tensor, (joined, own), {})
        return joined


def are_counts(numbers: Tensor, keys: Tensor) -> bool:
    """Whether numbers say how many rows have each key, or each key up to one."""
    if not (are_keys(keys) and int(keys.min()) >= 0 and int(keys.max()) < len(numbers)):
        return False
    counts = keys.bincount(minlength=len(numbers))
    return bool((numbers == counts).all() or (numbers == counts.cumsum(0)).all())


def are_keys(value: Tensor) -> bool:
    """Whether it says of each row a whole number."""
    return value.dim() == 1 and value.numel() > 0 and not value.is_floating_point() and value.dtype != torch.bool


def _are_open(value: Any) -> bool:
    """Whether they are keys that nobody knows."""
    return isinstance(value, FakeTensor) and are_keys(value) and value.numel() < _SAID
