"""Choices of the largest entries made by a plan: how many rows choose an expert is what a loop over experts may read.

Routers with random weights give each expert about as many rows. A plan says how many rows each is to get, and runs go
through plans until every number of rows, from none to all, has been met.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_align.tracing.nested import leaves
from hf_align.tracing.ops import Trait
from hf_align.tracing.results import behaviour_of

EACH, _EACH_OF_FEW = 256, 1024
"""Experts times rows, and times few rows, up to which each expert meets each number of rows; beyond, some does."""
_PLANS = 256
"""Plans at most."""
_FEW = 24
"""Rows; as many or fewer are met by each call, and more perhaps by another."""
Kind = tuple[int, int]
"""Experts, and how many of them a row chooses."""


class Planned(TorchDispatchMode):
    """Has every choice of the largest entries of one axis chosen by a plan.

    A choice of what is not finite, as of an expert that is ruled out, is left as it is.

    Args:
        met: numbers of rows that some expert got in other calls, to which those of this one are added.
        first: whether each expert is to meet each number of rows; else some expert does, if none has before.

    Attributes:
        number: of the plan, for all choices alike.
        most: plans of the choices that were met.
    """

    def __init__(self, met: dict[Kind, set[int]], *, first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met, self.first = met, first
        self.number = self.most = 0
        self._plans: dict[tuple[int, Kind], list[list[int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not behaviour_of(func).traits & Trait.POINTS_TO_LARGEST:
            return result
        numbers = [t for t in leaves(result) if t.dtype == torch.int64 and t.dim()]
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        dim = named.get("dim", -1)
        if len(numbers) != 1 or not isinstance(dim, int) or named.get("largest") is False:
            return result
        return self._chosen(args[0], dim, numbers[0], result)

    def _chosen(self, scores: Tensor, dim: int, numbers: Tensor, result: Any) -> Any:
        kept = numbers if numbers.dim() == scores.dim() else numbers.unsqueeze(dim)
        experts, chosen = scores.shape[dim], kept.shape[dim]
        rows = kept.numel() // max(chosen, 1)
        if not 0 < chosen < experts or not rows:
            return result
        planned = self._rows(rows, (experts, chosen)).reshape(*kept.movedim(dim, -1).shape).movedim(-1, dim)
        values = scores.gather(dim, planned)
        if not values.isfinite().all():
            return result
        if numbers is not kept:
            planned, values = planned.squeeze(dim), values.squeeze(dim)
        return planned if isinstance(result, Tensor) else (values, planned)

    def _rows(self, rows: int, kind: Kind) -> Tensor:
        """The experts of each row, [rows, chosen], in an order of their own."""
        if (rows, kind) not in self._plans:
            met = self.met.setdefault(kind, set())
            self._plans[rows, kind] = plans(rows, *kind, None if self.first else met)
            met.update(n for plan in self._plans[rows, kind] for n in plan)
            self.most = max(self.most, len(self._plans[rows, kind]))
        known, (experts, chosen) = self._plans[rows, kind], kind
        rng = Generator().manual_seed(self.number)
        counts = torch.tensor(known[self.number % len(known)])
        dealt = torch.arange(experts).repeat_interleave(counts).reshape(chosen, rows).T
        dealt = dealt[torch.randperm(rows, generator=rng)]
        return dealt.gather(1, torch.rand(rows, chosen, generator=rng).argsort(1))


def plans(rows: int, experts: int, chosen: int, met: Collection[int] | None = None) -> list[list[int]]:
    """How many rows each expert gets, plan by plan, until each has got each number of rows, or some one has if these
    are many or another call was measured before.

    Args:
        chosen: experts of each row, fewer than there are.
        met: the numbers that need not be met again, unless they are small.
    """
    rng = random.Random(rows)
    each = met is None and rows * experts <= (_EACH_OF_FEW if rows <= _FEW else EACH)
    numbers = [n for n in range(rows + 1) if met is None or n not in met or n <= _FEW]
    wanted = [(n, e) for n in numbers for e in (range(experts) if each else [rng.randrange(experts)])]
    rng.shuffle(wanted)
    found: list[list[int]] = []
    while wanted and len(found) < _PLANS:
        counts = _plan(wanted, rows, experts, chosen)
        wanted = [(n, e) for n, e in wanted if counts[e] != n]
        found.append(counts)
    return found


def _plan(wanted: Sequence[tuple[int, int]], rows: int, experts: int, chosen: int) -> list[int]:
    """As many of the wanted numbers at once as go together: each row still chooses as many experts as ever."""
    counts, left = dict[int, int](), rows * chosen
    for number, expert in wanted:
        others = experts - len(counts) - 1
        if expert not in counts and 0 <= left - number <= others * rows:
            counts[expert] = number
            left -= number
    for expert in range(experts):
        if expert not in counts:
            counts[expert] = min(rows, left)
            left -= counts[expert]
    return [counts[expert] for expert in range(experts)]
