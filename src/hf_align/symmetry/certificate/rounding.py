"""What rounding alone does to a model: where scores tie, the last place of a weight decides which of them is chosen.

The weights are moved by half a unit in the last place on average, as the witness moves them, and the model is run
again. A symmetry rounds weights as well, so a model whose answers jump by that cannot say whether the symmetry leaves
it alone. Nor can one that overflows at the weights that were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, fx

from hf_align.symmetry.certificate.random_copy import Weights
from hf_align.tracing.execute import run
from hf_align.tracing.program import Program, evidence

EXACT = 1e-9
"""Relative changes below are rounding in any model."""
_FACTOR = 32.0
"""How much more than half a unit in the last place of every weight a symmetry may cost, as in the witness."""
_DRAWS = 4
"""Random roundings: a tie may go the same way in some."""
_SMALLEST = 1e-300
"""In the place of an output that is zero, by which a change is divided."""
_EPS = torch.finfo(torch.float64).eps

Changes = Mapping[fx.Node, float]


@dataclass(frozen=True)
class Undecided:
    """A model whose own rounding is as large as what is asked of it, or whose outputs are no numbers.

    Attributes:
        where: the op that enlarges rounding most, and its line; the first one whose result is no number, if any is.
        change: of an output by rounding alone, over its largest entry; NaN where the outputs are no numbers.
    """

    where: str
    change: float

    def __str__(self) -> str:
        if math.isnan(self.change):
            return f"the model itself gives no numbers at {self.where}"
        return f"the model itself is undecided at {self.where}: rounding alone changes its output by {self.change:.0e}"


def changes(before: Mapping[fx.Node, Any], after: Mapping[fx.Node, Any], program: Program) -> Changes:
    """The largest change of each result, over the largest of its entries."""
    results = (node for node in program.interface if node.meta["val"].numel())
    return {node: float(change(before[node], after[node])) for node in results}


def change(before: Tensor, after: Tensor) -> Tensor:
    """The largest change, over the largest entry. Infinite entries, with which models fill up scores, have to be the
    same; no number where entries are none, or nothing else is there."""
    before, after = (t if t.is_complex() else t.double() for t in (before, after))
    same = before.isinf() & (before == after)
    if same.all():
        return torch.full((), torch.nan, dtype=torch.float64)
    size = before[~before.isinf()].abs()
    largest = size.max() if size.numel() else torch.zeros((), dtype=before.dtype)
    moved = torch.where(same, 0, before - after).abs()
    return moved.max() / largest.clamp_min(_SMALLEST)


def undecided(
    found: Changes, program: Program, weights: Weights, inputs: Mapping[str, Tensor], rng: Generator
) -> Undecided | None:
    """Whether each result that changed may have changed by rounding alone; None if one did not.

    Args:
        found: what a symmetry changes in each result of these weights on these inputs.
    """
    before, rounding = run(program, weights, inputs), dict.fromkeys(found, 0.0)
    if any(_is_lost(before[node]) for node in found):
        return Undecided(_op(next(node for node, value in before.items() if _is_lost(value))), math.nan)
    worst, where = 0.0, ""
    for _ in range(_DRAWS):
        after = run(program, {n: _rounded(w, rng) for n, w in weights.items()}, inputs)
        drawn = changes(before, after, program)
        rounding = {node: max(rounding[node], drawn[node]) for node in found}
        if max(drawn.values()) > worst:
            worst, where = max(drawn.values()), _where(before, after)
    in_doubt = all(c < EXACT or c <= _FACTOR * rounding[node] for node, c in found.items())
    return Undecided(where, worst) if in_doubt else None


def _rounded(weight: Tensor, rng: Generator) -> Tensor:
    """Every entry moved to a neighbour, or not at all."""
    draws = torch.rand(weight.shape, generator=rng, dtype=torch.float64) * 2 - 1
    return weight + weight * draws * (1.5 * _EPS)


def _where(before: Mapping[fx.Node, Any], after: Mapping[fx.Node, Any]) -> str:
    """The op whose result changes most, against what it reads."""
    moved = {node: _moved(before[node], after[node]) for node in before}
    grown = {n: c / max(_EPS, *(moved.get(a, 0.0) for a in n.all_input_nodes))
             for n, c in moved.items() if n.op == "call_function"}  # fmt: skip
    return _op(max(grown, key=lambda n: grown[n]))


def _op(node: fx.Node) -> str:
    found = evidence(node, "")
    return f"{found.op} in {found.line}" if found.line else found.op


def _moved(before: Any, after: Any) -> float:
    """As `change`, of any dtype, and of the result of an op that has several that which changes most."""
    if isinstance(before, (tuple, list)):
        return max(map(_moved, before, after), default=0.0)
    if not isinstance(before, Tensor) or torch.equal(before, after):
        return 0.0
    found = float(change(before, after))
    return 0.0 if math.isnan(found) else found


def _is_lost(value: Any) -> bool:
    """Whether entries of a result, or of one of several, are no numbers."""
    if isinstance(value, (tuple, list)):
        return any(map(_is_lost, value))
    return isinstance(value, Tensor) and bool(value.isnan().any())
