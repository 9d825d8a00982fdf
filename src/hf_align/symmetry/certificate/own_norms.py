"""Tables that only a norm of their own reads: y_t = γ ⊙ n(x_t) + β for the rows x_t of a table.

Since ε > 0, n(x) = (x - mean x) / √(var x + ε) takes every small value of mean zero, so that the table takes up any
small change of y that keeps hᵀ(y - β) = 0 for h = 1/γ. Where y_t becomes y_t + A y_t, the gain follows by γ ⊙ γ ⊙ Aᵀh,
and the bias by Aβ; and nothing changes behind the norm where the gain becomes longer, or the bias moves orthogonally
to h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.tracing.trace import Program, op_name, operand


@dataclass(frozen=True)
class OwnNorm:
    """A norm over rows that nothing else reads, by the names of its parameters."""

    table: str
    gain: str
    bias: str
    eps: float

    @classmethod
    def of(cls, norm: fx.Node, program: Program) -> OwnNorm | None:
        """What a norm is where nothing else knows of its table, its gain and its bias."""
        source, gain, bias = (operand(norm, i) for i in (0, 2, 3))
        table = operand(source, 0) if source is not None and op_name(source) == "embedding" else source
        if source is None or table is None or gain is None or bias is None:
            return None
        stored = all(node in program.parameters for node in (table, gain, bias))
        alone = all(len(node.users) == 1 for node in (source, table, gain, bias))
        eps = norm.args[4] if len(norm.args) > 4 else 1e-5
        if not (stored and alone and isinstance(eps, float) and eps > 0):
            return None
        return cls(program.parameters[table], program.parameters[gain], program.parameters[bias], eps)

    def changes(self, matrix: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of table and gain, where y becomes y + t A y; the bias is one of those that write."""
        gain = weights[self.gain]
        longer = gain * gain * (matrix.T @ (1 / gain))
        normed = self._normed(weights)[0]
        moved = (normed * gain @ matrix.T - longer * normed) / gain
        return {self.gain: longer, self.table: self._rows(moved, weights)}

    def alone(self, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """What changes nothing behind the norm."""
        gain = weights[self.gain]
        yield {self.gain: gain, self.table: self._rows(-self._normed(weights)[0], weights)}
        inverse = 1 / gain
        for one in torch.eye(len(gain), dtype=gain.dtype):
            step = one - inverse * inverse[one.argmax()] / inverse.square().sum()
            yield {self.bias: step, self.table: self._rows((-step / gain).expand_as(weights[self.table]), weights)}

    def _normed(self, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """n(x) and √(var x + ε) of every row."""
        rows = weights[self.table]
        centred = rows - rows.mean(-1, keepdim=True)
        length = (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return centred / length, length

    def _rows(self, steps: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """How the rows move where n(x) moves by steps of mean zero: dn = (1 - n nᵀ/d) dx / √(var x + ε)."""
        normed, length = self._normed(weights)
        along = normed.square().sum(-1, keepdim=True) / normed.shape[-1]
        return length * (steps + normed * (normed * steps).mean(-1, keepdim=True) / (1 - along))
