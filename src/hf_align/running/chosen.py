"""Experts in a traced graph: the product of each token with the matrix chosen for it, without a copy of that matrix.

What loops over experts cannot be traced, so that they are traced as one batched product with a matrix for each token:
of a few thousand tokens the copies take gigabytes. Here the tokens of one matrix are multiplied together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.tracing.arguments import Arguments
from hf_align.tracing.execute import call_wide
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program, operand


@dataclass(frozen=True)
class Chosen:
    """Matrices [n, p, q], of which one is chosen for each row by its number, [rows]."""

    matrices: Tensor
    numbers: Tensor

    @property
    def transposed(self) -> Chosen:
        return Chosen(self.matrices.mT, self.numbers)

    def times(self, x: Tensor) -> Tensor:
        """Of each row, the product with x [rows, q, r]: [rows, p, r]."""
        found = x.new_empty(len(x), self.matrices.shape[1], x.shape[2])
        for number in self.numbers.unique():
            rows = (self.numbers == number).nonzero()[:, 0]
            together = x[rows].movedim(1, 0).flatten(1)  # [q, rows · r]
            product = (self.matrices[number] @ together).unflatten(1, (len(rows), -1))
            found[rows] = product.movedim(0, 1)
        return found

    def behind(self, x: Tensor) -> Tensor:
        """The product of x [rows, r, p] with each: [rows, r, q]."""
        return self.transposed.times(x.mT).mT


def chooses_matrices(node: fx.Node, program: Program) -> bool:
    """Whether all that is done with what a node chooses of a weight is to multiply by it, row by row."""
    weight = operand(node, 0)
    if not does(node, Trait.TAKES_ENTRIES) or weight not in program.parameters or weight.meta["val"].dim() != 3:
        return False
    chosen: Any = node.args[1]
    if len(chosen) != 1 or chosen[0].meta["val"].dim() != 1 or chosen[0].meta["val"].is_floating_point():
        return False
    return chosen[0].meta["val"].dtype is not torch.bool and all(_multiplies(user, node) for user in node.users)


def _multiplies(user: fx.Node, matrices: fx.Node) -> bool:
    if does(user, Trait.REORDERS_AXES) and _flips_matrices(user):
        return bool(user.users) and all(_multiplies(after, user) for after in user.users)
    return (
        does(user, Trait.BATCHED) and len(user.args) == 2 and (user.args[0] is matrices) != (user.args[1] is matrices)
    )


def _flips_matrices(node: fx.Node) -> bool:
    """Whether [n, p, q] becomes [n, q, p]."""
    arguments = Arguments(node)
    dims = arguments.ask("dim0", None), arguments.ask("dim1", None)
    return None not in dims and {dim % 3 for dim in dims} == {1, 2}


def call(node: fx.Node, args: Any, kwargs: Any, *, chooses: bool) -> Any:
    """Run one node; what `chooses` matrices is held as what it chooses of."""
    if chooses:
        return Chosen(args[0], args[1][0])
    if not any(isinstance(arg, Chosen) for arg in args):
        return call_wide(node, args, kwargs)
    if does(node, Trait.REORDERS_AXES):
        return args[0].transposed
    return args[0].times(args[1]) if isinstance(args[0], Chosen) else args[1].behind(args[0])
