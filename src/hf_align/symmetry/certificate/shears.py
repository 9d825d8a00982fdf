"""Shears: x + t 1 hᵀx in place of every x of a stream, with any h, or h = 1/γ where a norm writes γ ⊙ n + β into it.

What the norm writes stays as it is then, for n has mean zero; what else is written moves along the all-ones direction,
which a norm that reads the stream does not see; what reads the stream linearly undoes it. Values between which elements
cannot differ (sums, and what the same weight writes or reads) are one stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from hf_align.symmetry.certificate.own_norms import OwnNorm
from hf_align.symmetry.certificate.readings import LINEAR, LinearReading, leads_to, linear_reading
from hf_align.symmetry.passing import keeps_last, takes_rows
from hf_align.tracing.trace import Program, op_name, operand

_READ, _WRITE = "read", "write"


@dataclass
class Streams:
    """Values, and weights as what reads or writes them, by stream (union-find).

    Attributes:
        members: all of them.
        seen: those that something sees, or writes as it likes.
        gains: by value, the γ of the norm that it comes from; None for a norm without.
        own_norms: by value, the norm of a table that takes up whatever becomes of it.
    """

    program: Program
    parent: dict[Hashable, Hashable] = field(default_factory=dict)
    members: set[Hashable] = field(default_factory=set)
    seen: set[Hashable] = field(default_factory=set)
    gains: dict[fx.Node, fx.Node | None] = field(default_factory=dict)
    own_norms: dict[fx.Node, OwnNorm] = field(default_factory=dict)
    readings: dict[fx.Node, LinearReading] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> Streams:
        """Those of a program."""
        streams = cls(program)
        for node in program.graph.nodes:
            if node.op == "call_function" and node not in program.constants:
                streams.see(node)
        for result in program.interface:
            streams.see_all(result)
        return streams

    def top(self, member: Hashable) -> Hashable:
        while member in self.parent:
            member = self.parent[member]
        return member

    def join(self, *members: Hashable) -> None:
        self.members.update(members)
        first = self.top(members[0])
        for other in members[1:]:
            if self.top(other) != first:
                self.parent[self.top(other)] = first

    def see_all(self, *nodes: fx.Node) -> None:
        self.seen.update(nodes)

    def see(self, node: fx.Node) -> None:
        """What one op does to the streams."""
        name, operands = op_name(node), node.all_input_nodes
        read = linear_reading(node, self.program)
        if read is not None:
            self.readings[node] = read
            self.join(read.source, (_READ, read.weight, read.rows_out))
            self.join(node, (_WRITE, read.weight, read.rows_out), *([read.bias] if read.bias is not None else []))
        elif name in ("add", "sub") and all(_as_wide(a, node) and a not in self.program.constants for a in operands):
            self.join(node, *operands)
        elif name in LINEAR | {"mean"} and len(operands) == 1 and keeps_last(node):
            self.join(node, operands[0])
        elif name == "mul" and (scaled := _times_rows(node)) is not None:
            self.join(node, scaled)
        elif name in ("cat", "concat") and node.args[1:] and node.args[1] not in (-1, node.meta["val"].dim() - 1):
            self.join(node, *(a for a in operands if a not in self.program.constants))
            self.seen.update(a for a in operands if a in self.program.constants)
        elif takes_rows(node, self.program):
            self.join(node, *(a for a in operands if a not in self.program.constants))
        elif (patches := _patches(node)) is not None and patches.args[1] in self.program.parameters:
            self.join(node, *(a for a in patches.args[1:3] if isinstance(a, fx.Node)))
        elif name == "layer_norm":
            gain, bias = operand(node, 2), operand(node, 3)
            self.join(node, *([bias] if bias is not None else []))
            own = OwnNorm.of(node, self.program)
            if own is not None:
                self.own_norms[node] = own
                return
            self.gains[node] = gain
            self.seen.update([gain] if gain is not None else [])
        elif name == "embedding":
            self.join(node, operands[0])
        elif any(_patches(behind) is node for user in node.users for behind in user.users):
            self.see_all(node, operands[0])
        else:
            self.see_all(node, *operands)

    def directions(self, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The shears at these weights, each as changes of some parameters: one for each stream that a norm writes and
        that nothing else sees; as many as it is wide where none does."""
        seen = self.seen_tops()
        streams: dict[Hashable, list[fx.Node]] = {}
        for node in self.gains:
            streams.setdefault(self.top(node), []).append(node)
        for stream, norms in streams.items():
            inverse = [self._inverse_gain(n, weights) for n in norms]
            if stream not in seen and all(torch.allclose(h, inverse[0]) for h in inverse):
                yield self.changes(stream, torch.outer(torch.ones_like(inverse[0]), inverse[0]), weights)
        sources = {self.top(source): source for n in self.gains if (source := operand(n, 0)) is not None}
        for stream in sources.keys() - streams.keys() - seen:
            for h in torch.eye(sources[stream].meta["val"].shape[-1], dtype=torch.float64):
                yield self.changes(stream, h.expand(len(h), -1), weights)

    def seen_tops(self) -> set[Hashable]:
        """The streams that something sees, or that share a weight in ways that must agree."""
        shared = (w for w in {r.weight for r in self.readings.values()} if not self._is_only_read(w))
        return {self.top(m) for m in (*self.seen, *(role for w in shared for role, _, _ in self._roles(w)))}

    def _inverse_gain(self, norm: fx.Node, weights: Mapping[str, Tensor]) -> Tensor:
        gain = self.gains[norm]
        if gain not in self.program.parameters:
            return torch.ones(norm.meta["val"].shape[-1], dtype=torch.float64)
        return 1 / weights[self.program.parameters[gain]]

    def _is_only_read(self, weight: fx.Node) -> bool:
        """Not so for the table that a tied head reads with."""
        return all(leads_to(user, self.readings) for user in weight.users)

    def _roles(self, weight: fx.Node) -> list[tuple[Hashable, int, int]]:
        """(member, axis along the stream, 1 where it writes and -1 where it reads)."""
        own = 0 if any(op_name(u).startswith("conv") for u in weight.users) else -1
        possible = ((weight, own, 1), ((_READ, weight, True), 1, -1), ((_READ, weight, False), 0, -1),
                    ((_WRITE, weight, True), 0, 1), ((_WRITE, weight, False), 1, 1))  # fmt: skip
        return [role for role in possible if role[0] in self.members]

    def changes(self, stream: Hashable, matrix: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where every x of a stream becomes x + t A x, what is written moves by A, and what reads by its negative."""
        changes: dict[str, Tensor] = {}
        for node, name in self.program.parameters.items():
            weight = weights[name]
            for member, axis, sign in self._roles(node):
                if self.top(member) == stream:
                    along = weight.movedim(axis, -1)
                    moved = along @ matrix.T if sign > 0 else -along @ matrix
                    changes[name] = changes.get(name, torch.zeros_like(weight)) + moved.movedim(-1, axis)
        for norm, own in self.own_norms.items():
            if self.top(norm) == stream:
                changes |= own.changes(matrix, weights)
        return changes


def _patches(node: fx.Node) -> fx.Node | None:
    """The convolution whose channels an op brings to the last axis, all places behind one another."""
    source = operand(node, 0)
    if op_name(node) not in ("transpose", "permute") or source is None or op_name(source) not in ("flatten", "view"):
        return None
    before = source.all_input_nodes[0]
    brought = node.args[1:3] in ((1, 2), (-2, -1), (-1, -2)) or node.args[1:2] == ([0, 2, 1],)
    channels_stay = source.meta["val"].dim() == 3 and source.meta["val"].shape[:2] == before.meta["val"].shape[:2]
    plain = op_name(before) in ("conv1d", "conv2d", "conv3d") and len(before.users) == len(source.users) == 1
    return before if brought and channels_stay and plain and before.args[6:] in ((), (1,)) else None


def _times_rows(node: fx.Node) -> fx.Node | None:
    """What is multiplied by one factor for each of its rows, such as a mask: linear maps of rows commute with that."""
    wide = [a for a in node.all_input_nodes if _as_wide(a, node)]
    others = [a for a in node.all_input_nodes if a not in wide]
    alike = len(wide) == len(others) == 1 and wide[0].meta["val"].dim() >= others[0].meta["val"].dim()
    return wide[0] if alike and others[0].meta["val"].shape[-1:] == (1,) else None


def _as_wide(operand_: fx.Node, node: fx.Node) -> bool:
    """Whether an operand has the last axis of the result."""
    return operand_.meta["val"].shape[-1:] == node.meta["val"].shape[-1:]
