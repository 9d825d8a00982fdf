"""What a call draws at random, what it computes of that, and which of it is the same whatever is drawn.

Of some draws it is known which numbers may come out: places of a list. Then each entry of what is computed of them is
one of several values, as in an interpretation by sets (Cousot and Cousot, "Abstract interpretation", POPL 1977): no
two entries are taken to belong together, so that there are rather too many values than too few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_align.tracing.nested import leaves, mapped
from hf_align.tracing.ops import Trait
from hf_align.tracing.results import behaviour_of

_MOST = 2**12
"""Values that an entry may have at most; beyond, it may be anything."""
_ENTRYWISE = Trait.MOVES | Trait.JOINS | Trait.STACKS | Trait.SAME | Trait.CASTS | Trait.COPIES
"""What each entry of is computed of one entry of each operand at most."""


class Draws:
    """The random numbers of one call."""

    def __init__(self) -> None:
        self._memories = set[int]()
        self._values = dict[int, tuple[Tensor, int, Tensor]]()

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Note what an op draws, by no generator of its own, or computes of what was drawn.

        Returns:
            Whether its result is the same in all runs, or a tensor of the same shape, of which nothing is asked yet.
        """
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and kwargs.get("generator") is None
        read = () if behaviour_of(func).makes or not self._memories else leaves((args, kwargs))
        drawn = {id(leaf): leaf for leaf in read if self._is_drawn(leaf)}
        if _decides_shape(func, args, drawn):
            return False
        results = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        values = self._places(func, args, result) if draws else self._computed(func, args, kwargs, drawn)
        if not (draws or drawn) or (values is not None and bool((values == values[0]).all())):
            for value in results if self._memories else ():
                if _memory(value) in self._memories:  # what else lies there is another in other runs
                    self._values[id(value)] = value, value._version, value[None]
            return True
        self._memories.update(map(_memory, results))
        if values is not None:
            self._values.update((id(value), (value, value._version, values)) for value in results)
        return bool(results)

    def _is_drawn(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or _memory(value) not in self._memories:
            return False
        known = self._may_be(value)
        return known is None or len(known) > 1

    def _may_be(self, value: Tensor) -> Tensor | None:
        """The values that something drawn may have, [values, *its shape]; None where it may have any."""
        same, version, values = self._values.get(id(value), (None, 0, None))
        return values if same is value and version == value._version else None

    def _places(self, func: Any, args: Sequence[Any], result: Any) -> Tensor | None:
        """Those of a draw of places of a list."""
        if Trait.DRAWS_PLACES not in behaviour_of(func).traits or args[0].dim() != 1 or self._is_drawn(args[0]):
            return None
        places = args[0].nonzero()[:_MOST, 0]
        return places.view(-1, *(1 for _ in result.shape)).expand(-1, *result.shape) if len(places) < _MOST else None

    def _computed(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], drawn: Mapping[int, Tensor]
    ) -> Tensor | None:
        """The values that a result may have, by those of what it is computed of; None where it may have any."""
        op = behaviour_of(func)
        if not drawn:
            return None
        if Trait.TAKES_ENTRIES in op.traits and id(args[0]) not in drawn and _is_alike(args[0]):
            return torch.zeros(1)  # whichever entries are drawn of it
        values = {key: known for key, value in drawn.items() if (known := self._may_be(value)) is not None}
        if len(values) < len(drawn) or op.is_mutable or not _ENTRYWISE & op.traits:
            return None
        choices = _choices([*map(len, values.values())], together=not op.traits & (Trait.JOINS | Trait.STACKS))
        found = [self._with(func, args, kwargs, values, choice) for choice in itertools.islice(choices, _MOST + 1)]
        return torch.stack(found) if len(found) <= _MOST else None

    @staticmethod
    def _with(
        func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[int, Tensor], choice: Sequence[int]
    ) -> Tensor:
        """What an op gives of certain values of its operands."""
        chosen = {key: known[number] for (key, known), number in zip(values.items(), choice, strict=True)}
        given: Any = mapped(Tensor, lambda t: chosen.get(id(t), t), [tuple(args), dict(kwargs)])
        result: Tensor = func(*given[0], **given[1])
        return result


def _choices(sizes: Sequence[int], *, together: bool) -> Iterable[Sequence[int]]:
    """Numbers of values of several operands, so that each entry of a result is seen with all that it may have.

    Args:
        sizes: how many values each operand has.
        together: whether an entry may be computed of several operands.
    """
    if together:
        return itertools.product(*map(range, sizes))
    return ([number % size for size in sizes] for number in range(max(sizes)))


def _decides_shape(func: Any, args: Sequence[Any], drawn: Mapping[int, Tensor]) -> bool:
    """Whether what is drawn says how many entries a result has: how many are not zero, or those of a mask."""
    if not behaviour_of(func).is_indexing:
        return bool(drawn) and torch.Tag.dynamic_output_shape in func.tags
    return any(id(index) in drawn and index.dtype in (torch.bool, torch.uint8) for index in leaves(args[1]))


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _is_alike(value: Any) -> bool:
    """Whether all entries are the same."""
    return isinstance(value, Tensor) and bool(value.numel()) and bool((value == value.flatten()[0]).all())
