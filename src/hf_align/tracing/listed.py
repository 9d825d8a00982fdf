"""Lists of where a mask holds, written down at full length: how long such a list is only a run decides.

Experts are often written as a loop over those that were chosen, each of which takes the rows that chose it and adds
what it makes of them. Where the mask has no value, the list is taken to hold every entry of it, in order. All experts
then run on all rows, and what goes back by such a list is what the mask lets through, and no more.

Whether nothing else depends on the list cannot be seen here: that an expert runs at all, or how many rows it takes.
So the places where lists were made are remembered, and what was written down is held against runs (`measured.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_align.tracing.nested import leaves
from hf_align.tracing.ops import Trait
from hf_align.tracing.results import Behaviour

LONGEST = 2**15
"""Entries of a mask from which on no list of them is written down."""
LISTED_AT = "listed at"
"""Under which a graph has the lines of modelling code that made lists of what its data chooses (`listed.py`)."""
_aten = torch.ops.aten


@dataclass(frozen=True)
class Listed:
    """All entries of a mask.

    Attributes:
        held: which of them the mask holds, in order.
        shape: of the mask, where all of its entries are listed.
    """

    held: Tensor
    shape: tuple[int, ...] | None

    def __len__(self) -> int:
        return self.held.numel()


class Lists:
    """The lists of one pass.

    Attributes:
        call: runs an op, and writes it down.
        here: the line of modelling code that runs.
        places: the lines that made a list.
    """

    def __init__(self, call: Callable[..., Any], here: Callable[[], str]) -> None:
        self.call, self.here = call, here
        self.places: set[str] = set()
        self._of = WeakIdKeyDictionary()
        self._most = WeakIdKeyDictionary()
        self._alive: list[Tensor] = []

    def instead(self, func: Any, op: Behaviour, args: Any, kwargs: Any) -> Any:
        """What an op gives that makes or follows a list; None for all others."""
        if Trait.LISTS in op.traits and len(args) == 1 and _is_open(args[0]):
            columns = self._listed(args[0])
            return torch.stack(columns, 1) if Trait.STACKS in op.traits else columns
        if op.is_indexing:
            return self._by_number(func, op, args, kwargs)
        if Trait.PUTS_IN_ORDER in op.traits and self.places and _is_open(args[1]):
            return self._put_in_order(*args)
        if Trait.ADDS_ROWS in op.traits and (listed := self._of.get(args[2])) is not None:
            values = self._let_through(listed, args[3], args[1] % args[3].dim())
            return self.call(func, (*args[:2], args[2].clone(), values), kwargs)
        if Trait.ADDS_ENTRIES in op.traits and (listed := self._of.get(args[2])) is not None:
            return self._add_rows(listed, func, *args, **kwargs)
        return None

    def as_listed(self, numbers: Tensor, held: Tensor) -> Tensor:
        """Numbers, of which some are held."""
        self._of[numbers] = Listed(held, None)
        self._alive.append(numbers)
        return numbers

    def most(self, numbers: Tensor) -> Tensor | None:
        """How large whole numbers can be; None where that is not known."""
        return self._most.get(numbers)

    def hand_on(self, operands: Any, result: Any) -> None:
        """What is computed of the numbers of a list, and is as long, is a list of the same entries."""
        if not self._of:
            return
        found = {id(m): m for t in leaves(operands) if isinstance(t, Tensor) and (m := self._of.get(t)) is not None}
        for listed in found.values() if len(found) == 1 else ():
            for part in leaves(result):
                if isinstance(part, Tensor) and part.dim() and len(part) == len(listed) and part not in self._of:
                    self._of[part] = listed

    def bound(self, func: Any, op: Behaviour, args: Any, kwargs: Any, result: Any) -> None:
        """Remember how large whole numbers can be that number the largest entries, and what is counted of these: an
        expert may have a place in a mask that no number points to."""
        if op.is_mutable:  # perhaps one of these numbers
            self._most.clear()
        elif Trait.CHOOSES_LARGEST in op.traits and isinstance(result, tuple):
            dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            self._most[result[1]] = torch.full(result[1].shape, args[0].shape[dim] - 1)
        elif Trait.RESHAPES in op.traits and args[0] in self._most:
            self._most[result] = self._most[args[0]].reshape(result.shape)
        elif op.traits & (Trait.ONE_HOT | Trait.GROWS) and isinstance(args[0], Tensor) and args[0] in self._most:
            most, rest = self._most[args[0]], leaves((args[1:], kwargs))
            if Trait.ONE_HOT in op.traits:
                self._most[result] = (torch.arange(result.shape[-1]) <= most[..., None]).long()
            elif not any(isinstance(leaf, Tensor) for leaf in rest):
                self._most[result] = func(most, *args[1:], **kwargs)

    def _listed(self, mask: FakeTensor) -> list[Tensor]:
        """The numbers of all entries, axis by axis; those that cannot be held are left out."""
        self.places.add(self.here())
        held = mask if mask.dtype == torch.bool else self.call(_aten.ne.Scalar, (mask, 0), {})
        held = self.call(_aten.reshape.default, (held, [-1]), {})
        possible = self._most.get(mask, torch.ones(mask.shape)) != 0
        if not possible.all():
            held = self.call(_aten.index.Tensor, (held, [possible.flatten().nonzero()[:, 0]]), {})
        columns = [*possible.nonzero(as_tuple=True)]
        listed = Listed(held, tuple(mask.shape) if possible.all() else None)
        for column in columns:
            self._of[column] = listed
        self._alive += columns
        return columns

    def _by_number(self, func: Any, op: Behaviour, args: Any, kwargs: Any) -> Any:
        """Entries that are taken or put by a list, or by a mask without value as by the list of what it holds."""
        open_masks = [i for i in args[1] if _is_open(i) and i.dtype in (torch.bool, torch.uint8)]
        puts = Trait.PUTS_ENTRIES in op.traits
        if open_masks and (not puts or (args[2].dim() and args[2].shape[0] == open_masks[0].numel() > 1)):
            numbers = [n for i in args[1] for n in (self._listed(i) if any(i is m for m in open_masks) else [i])]
            return self.call(func, (args[0], numbers, *args[2:]), kwargs)
        listed = next((m for i in args[1] if i is not None and (m := self._of.get(i)) is not None), None)
        if listed is None or not puts:
            return None
        if listed.shape is not None and self._at_all_entries(listed, listed.shape, args) and not args[2].dim():
            return self._choose(listed, listed.shape, args[0], args[2], in_place=op.is_mutable)
        return self._put(func, listed, args)

    def _at_all_entries(self, listed: Listed, shape: tuple[int, ...], args: Any) -> bool:
        """Whether something is put, not added, at just the entries of a list: its numbers may have been counted on
        from since."""
        base, numbers, _, *accumulate = args
        if any(accumulate) or base.shape[: len(numbers)] != shape:
            return False
        whole = torch.ones(shape).nonzero(as_tuple=True)
        return all(self._of.get(n) is listed and n.equal(column) for n, column in zip(numbers, whole, strict=True))

    def _add_rows(
        self,
        listed: Listed,
        func: Any,
        base: Tensor,
        dim: int,
        numbers: Tensor,
        values: Tensor,
        reduce: str = "sum",
        include_self: bool = True,
    ) -> Tensor | None:
        """Entries added by numbers that are the same all along a row, which are those of rows."""
        if dim or reduce != "sum" or not include_self or numbers.shape != values.shape:
            return None
        entries = numbers.reshape(len(numbers), -1)
        row = entries[:, :1]
        if not (entries == row).all():
            return None
        add = _aten.index_add_ if func._schema.is_mutable else _aten.index_add
        added: Tensor = self.call(add.default, (base, 0, row.flatten(), self._let_through(listed, values, 0)), {})
        return added

    def _choose(self, listed: Listed, shape: tuple[int, ...], base: Tensor, value: Tensor, *, in_place: bool) -> Tensor:
        """One value put wherever a mask holds: no list is needed for that, nor a difference, which truth values have
        not."""
        held = self.call(_aten.reshape.default, (listed.held, [*shape, *[1] * (base.dim() - len(shape))]), {})
        chosen: Tensor = self.call(_aten.where.self, (held, value, base), {})
        return self.call(_aten.copy_.default, (base, chosen), {}) if in_place else chosen

    def _put(self, func: Any, listed: Listed, args: Any) -> Any:
        """Entries put by a list: an entry may be listed twice, and held once, so what it changes by is added."""
        base, numbers, values, *accumulate = args
        if not any(accumulate):
            values = self.call(_aten.sub.Tensor, (values, self.call(_aten.index.Tensor, (base, numbers), {})), {})
        places = [i for i, n in enumerate(numbers) if n is not None]
        between = any(numbers[i] is None for i in range(places[0], places[-1]))
        values = self._let_through(listed, values, 0 if between else places[0])
        plain = [n if n is None or isinstance(n, FakeTensor) else n.clone() for n in numbers]  # what follows no list
        return self.call(func, (base, plain, values, True), {})

    def _put_in_order(self, base: Tensor, mask: Tensor, values: Tensor) -> Tensor | None:
        """As many entries as there are, put by a mask: they are taken to be all of a list, each where it goes."""
        if values.numel() != base.numel():
            return None
        self.places.add(self.here())
        values = self.call(_aten.reshape.default, (values, [*base.shape]), {})
        put: Tensor = self.call(_aten.where.self, (mask, values, base), {})
        return put

    def _let_through(self, listed: Listed, values: Tensor, dim: int) -> Tensor:
        """Values of all entries, and zeros for those that the mask does not hold."""
        shape = [len(listed) if i == dim else 1 for i in range(values.dim())]
        held = self.call(_aten.reshape.default, (listed.held, shape), {})
        masked: Tensor = self.call(_aten.where.ScalarOther, (held, values, 0), {})
        return masked


def _is_open(value: Any) -> bool:
    """Whether it is a mask whose entries nobody knows."""
    return isinstance(value, FakeTensor) and value.dim() > 0 and 0 < value.numel() <= LONGEST
