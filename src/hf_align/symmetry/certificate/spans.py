"""What is the same in every instance of a value: rows r for which r·x is a constant.

What a LayerNorm writes, γ ⊙ n + β, has one such row, 1/γ, for n has mean zero; a linear map W x + b of a value has
those r for which rᵀW is one of that value; and of what no input reaches, every entry is constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.certificate.readings import LINEAR, LinearReading, linear_reading
from hf_align.symmetry.passing import axes_before, is_centred, keeps_last, pads_nothing, takes_rows
from hf_align.tracing.trace import Program, op_name, operand

_ZERO = 1e-9


@dataclass(frozen=True)
class Constant:
    """row · x = value for every x along the last axis of some node, [width] and []."""

    row: Tensor
    value: Tensor

    def matches(self, other: Constant) -> bool:
        """Whether the same combination of entries is constant."""
        return self.row.shape == other.row.shape and torch.allclose(self.row, other.row)


@dataclass(frozen=True)
class Spans:
    """The constant rows of values at some weights, float64 by parameter name."""

    program: Program
    weights: Mapping[str, Tensor]

    def constants(self, node: fx.Node) -> list[Constant]:
        """A basis of the constant rows along the last axis of a node's value."""
        while (
            (op_name(node) in LINEAR | {"mean"} and len(node.all_input_nodes) == 1 and keeps_last(node))
            or self._is_times_one(node)
            or pads_nothing(node)
            or (op_name(node) == "index" and takes_rows(node, self.program))
        ):
            node = node.all_input_nodes[0]
        if node.op != "call_function":
            return []
        if (before := _turned_back(node)) is not None or (before := _pooled_whole(node)) is not None:
            return self.constants(before)
        if op_name(node) in ("cat", "concat") and node.args[1:2] in ((-1,), (node.meta["val"].dim() - 1,)):
            return self._side_by_side(node)
        if (row := self._looked_up(node)) is not None:
            return [Constant(one, v) for one, v in zip(torch.eye(len(row), dtype=row.dtype), row, strict=True)]
        if (read := linear_reading(node, self.program)) is not None:
            return self._mapped(read)
        norm = self._norm(node)
        if norm is None:
            return []
        gain, bias = norm
        return [Constant(1 / gain, torch.zeros_like(gain[0]) if bias is None else (bias / gain).sum())]

    def _side_by_side(self, node: fx.Node) -> list[Constant]:
        found, start = [], 0
        for part in node.args[0]:  # type: ignore[union-attr]
            assert isinstance(part, fx.Node)
            behind = node.meta["val"].shape[-1] - start - part.meta["val"].shape[-1]
            for one in self.constants(part):
                found.append(Constant(torch.nn.functional.pad(one.row, (start, behind)), one.value))
            start += part.meta["val"].shape[-1]
        return found

    def _looked_up(self, node: fx.Node) -> Tensor | None:
        """The one row of a table that is looked up at every place."""
        numbers = self.program.constants.get(operand(node, 1)) if op_name(node) == "embedding" else None  # type: ignore[arg-type]
        table = self.program.parameters.get(operand(node, 0))  # type: ignore[arg-type]
        if not isinstance(numbers, Tensor) or table is None or len(numbers.unique()) > 1:
            return None
        return self.weights[table][int(numbers.reshape(-1)[0])]

    def _mapped(self, read: LinearReading) -> list[Constant]:
        """Of W x + b: all r with rᵀW = Σ λ_k r_k, r_k the constant rows of x."""
        before = self.constants(read.source)
        weight = self.weights[self.program.parameters[read.weight]]
        matrix = weight.mT if read.rows_out else weight  # [inputs, outputs]
        if read.bias is not None and read.bias not in self.program.parameters:
            return []
        rows = torch.stack([-c.row for c in before], 1) if before else matrix.new_zeros(len(matrix), 0)
        both = torch.cat([matrix, rows], 1)
        _, s, vh = torch.linalg.svd(both, full_matrices=True)
        kernel = vh[int((s > _ZERO * s[0]).sum()) :]
        bias = matrix.new_zeros(matrix.shape[1])
        if read.bias is not None:
            bias = self.weights[self.program.parameters[read.bias]]
        values = torch.stack([c.value for c in before]) if before else matrix.new_zeros(0)
        found = ((k[: matrix.shape[1]], k[matrix.shape[1] :]) for k in kernel)
        return [Constant(r, shares @ values + r @ bias) for r, shares in found]

    def _is_times_one(self, node: fx.Node) -> bool:
        """Whether a value is only multiplied by a mask that hides nothing."""
        mask = self.program.constants.get(operand(node, 1)) if op_name(node) == "mul" else None  # type: ignore[arg-type]
        return isinstance(mask, Tensor) and bool((mask == 1).all()) and node.meta["val"].shape == (
            node.all_input_nodes[0].meta["val"].shape)  # fmt: skip

    def _norm(self, source: fx.Node) -> tuple[Tensor, Tensor | None] | None:
        """(gain, bias) of a value that is γ ⊙ n + β with n of mean zero."""
        if source.op != "call_function":
            return None
        ones = torch.ones(source.meta["val"].shape[-1:], dtype=torch.float64)
        if op_name(source) == "layer_norm":
            gain, bias = (self.weight(source, i) for i in (2, 3))
            return ones if gain is None else gain, bias
        weights = [i for i, a in enumerate(source.args) if isinstance(a, fx.Node) and self._is_vector(a)]
        others = [a for a in source.all_input_nodes if not self._is_vector(a)]
        if op_name(source) == "add" and len(weights) == len(others) == 1:
            norm = self._norm(others[0])
            return None if norm is None or norm[1] is not None else (norm[0], self.weight(source, weights[0]))
        if op_name(source) == "mul" and len(weights) == len(others) == 1 and is_centred(others[0]):
            gain = self.weight(source, weights[0])
            return None if gain is None else (gain, None)
        return (ones, None) if is_centred(source) else None

    def _is_vector(self, node: fx.Node) -> bool:
        return plain_weight(node)[0] in self.program.parameters and node.meta["val"].dim() == 1

    def weight(self, node: fx.Node, position: int) -> Tensor | None:
        argument = node.args[position] if len(node.args) > position else None
        if not isinstance(argument, fx.Node):
            return None
        weight, offset = plain_weight(argument)
        return self.weights[self.program.parameters[weight]] + offset


def plain_weight(node: fx.Node) -> tuple[fx.Node, float]:
    """What a vector is a cast of, or what one is added to: (w, 1) for a gain written as 1 + w."""
    offset = 0.0
    while op_name(node) in ("to", "_to_copy", "add", "alias") and len(node.all_input_nodes) == 1:
        if op_name(node) == "add":
            offset += next(a for a in node.args if isinstance(a, (int, float)))
        node = node.all_input_nodes[0]
    return node, offset


def _pooled_whole(node: fx.Node) -> fx.Node | None:
    """The value whose mean over all places along its last axis a node is, seen with that axis in front of it."""
    pooled = operand(node, 0)
    if op_name(node) not in ("flatten", "squeeze", "view", "reshape") or pooled is None:
        return None
    turned, shape = operand(pooled, 0), pooled.meta["val"].shape
    whole = op_name(pooled) in ("adaptive_avg_pool1d", "adaptive_avg_pool2d") and shape[2:].numel() == 1
    if not whole or turned is None or node.meta["val"].shape != shape[:2]:
        return None
    rank = turned.meta["val"].dim()
    brought = op_name(turned) in ("transpose", "permute") and axes_before(turned)[1] == rank - 1
    return turned.all_input_nodes[0] if brought else None


def _turned_back(node: fx.Node) -> fx.Node | None:
    """The value from which several permutations of axes lead here, if together they leave the last axis in place."""
    last = at = node.meta["val"].dim() - 1 if isinstance(node.meta["val"], Tensor) else 0
    while op_name(node) in ("permute", "transpose"):
        at = axes_before(node)[at]
        node = node.all_input_nodes[0]
        if at == last:
            return node
    return None
