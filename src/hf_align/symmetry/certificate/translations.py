"""Translations: constants that biases may exchange without changing the function.

A second, linear interpretation of the graph at given weights: every value carries what an infinitesimal change of each
bias-like weight adds to it (the same for all inputs). Linear ops pass that on; an op that would see it asks for it to
vanish. The kernel of all these demands are the translations: norm biases against reader biases, token against position
embeddings, key biases, value against output biases, and the mean direction of what reads a LayerNorm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.certificate.readings import LINEAR, MOVES, LinearReading, leads_to, linear_reading
from hf_align.symmetry.certificate.spans import Spans
from hf_align.symmetry.certificate.tables import Numbers, Tables
from hf_align.symmetry.passing import sums_to_one, takes_rows
from hf_align.symmetry.softmax_shift import reaches_softmax
from hf_align.tracing.execute import call_wide
from hf_align.tracing.trace import Program, op_name, operand

# fmt: off
_LINEAR_AT_FIXED_PLACES = MOVES | {
    "sum", "mean", "cumsum", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d",
    "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler", "grid_sampler_2d",
    "embedding_bag", "index_put",
}
_PLACES_ALL = frozenset(("copy", "slice_scatter", "select_scatter"))
"""Linear in all operands together."""
_READS_ITS_CONSTANTS = frozenset(("mul", "div", "grid_sampler", "grid_sampler_2d", "embedding_bag"))
"""The others add them up, where they change nothing."""
_ADDS_AT = {("linear", 2), ("addmm", 0), ("layer_norm", 3), ("group_norm", 3), ("batch_norm", 2),
            ("conv1d", 2), ("conv2d", 2), ("conv3d", 2), ("conv_transpose1d", 2), ("conv_transpose2d", 2),
            ("conv_transpose3d", 2), ("_native_batch_norm_legit_no_training", 2)}
"""Ops that add a vector to a result, and where it stands."""
# fmt: on
_CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
_CASTS = frozenset(("to", "_to_copy", "alias", "detach"))
_TABLE, _ADDED = "table", "added"


def translations(program: Program, weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """A basis of the translations at these weights, each as changes of some parameters.

    Args:
        weights: float64, by parameter name.
    """
    system = _System(program, weights)
    system.run()
    return system.kernel()


class _System:
    """The unknowns, what each adds to every value, and the demands so far."""

    def __init__(self, program: Program, weights: Mapping[str, Tensor]) -> None:
        self.program = program
        self.weights = weights
        self.unknowns: list[dict[str, Tensor]] = []
        self.added: dict[fx.Node, Tensor] = {}
        self.shift: dict[fx.Node, Any] = {}
        self.demands: list[Tensor] = []
        self.tables = Tables(program)
        self.numbers: Numbers = {}
        self.spans = Spans(program, weights)
        self.free_readers: dict[fx.Node, list[tuple[int, Tensor]]] = defaultdict(list)
        self.free_tables: dict[fx.Node, list[tuple[int, Tensor]]] = defaultdict(list)
        self.free_convolutions: dict[fx.Node, list[tuple[int, Tensor]]] = defaultdict(list)
        self._collect()

    # Unknowns: a basis of changes for each bias-like weight, and for each reader of a LayerNorm.

    def _collect(self) -> None:
        spans: dict[fx.Node, tuple[int, Tensor]] = {}
        for node, name in self.program.parameters.items():
            role = _role(node, self.program)
            if role is not None:
                spans[node] = (len(self.unknowns), self._basis(node, role))
                for change in spans[node][1]:
                    rows = change[self.tables.class_of_rows(node)] if role == _TABLE else change
                    self.unknowns.append({name: rows})
        self._collect_readers()
        for node, (start, basis) in spans.items():
            self.added[node] = basis.new_zeros(len(self.unknowns), *basis.shape[1:])
            self.added[node][start : start + len(basis)] = basis

    def _basis(self, node: fx.Node, role: str) -> Tensor:
        """One change for each entry, of a table for each entry of the rows of a class."""
        shape = tuple(node.meta["val"].shape)
        if role == _TABLE:
            shape = (int(self.tables.class_of_rows(node).max()) + 1, *shape[1:])
        return torch.eye(math.prod(shape), dtype=torch.float64).reshape(math.prod(shape), *shape)

    def _collect_readers(self) -> None:
        """W + u rᵀ adds u (r·x) to what W reads from x, where that is constant (r = 1/γ for γ ⊙ n + β of a LayerNorm);
        a tied table allows u that are alike for all rows of a class."""
        readings: dict[fx.Node, dict[fx.Node, LinearReading]] = defaultdict(dict)
        for node in self.program.graph.nodes:
            if (read := linear_reading(node, self.program)) is not None:
                readings[read.weight][node] = read
        for weight, found in readings.items():
            lookups = [u for u in weight.users if not leads_to(u, found)]
            rows_out = {r.rows_out for r in found.values()}
            if len(rows_out) == 1 and all(rows_out == {True} and u in self.tables.lookups for u in lookups):
                self._free_reader(weight, found, lookups)
        for node in self.program.graph.nodes:
            if op_name(node) in _CONVOLUTIONS and node.args[1] in self.program.parameters:
                self._free_convolution(node)

    def _free_reader(self, weight: fx.Node, readings: Mapping[fx.Node, LinearReading], lookups: list[fx.Node]) -> None:
        rows_out = next(iter(readings.values())).rows_out
        directions = torch.eye(weight.meta["val"].shape[0 if rows_out else 1], dtype=torch.float64)
        if lookups:
            directions = torch.nn.functional.one_hot(self.tables.class_of_rows(weight)).double().T
        rows = [self.spans.constants(r.source) for r in readings.values()]
        for one in rows[0]:
            same = [next((c for c in found if c.matches(one)), None) for found in rows]
            if None in same:
                continue
            start = len(self.unknowns)
            for u in directions:
                change = torch.outer(u, one.row) if rows_out else torch.outer(one.row, u)
                self.unknowns.append({self.program.parameters[weight]: change})
            for node, found in zip(readings, same, strict=True):
                assert found is not None
                self.free_readers[node].append((start, found.value * directions))
            for lookup in lookups:
                self.free_tables[lookup].append((start, one.row))

    def _free_convolution(self, node: fx.Node) -> None:
        """W + u rᵀ for every cell of the kernel, where r·x is constant along the channels."""
        weight, source = operand(node, 1), operand(node, 0)
        assert weight is not None and source is not None
        values = self.weights[self.program.parameters[weight]]
        rows = self.spans.constants(source.all_input_nodes[0]) if _shows_last_as_channels(source) else []
        if len(weight.users) > 1 or any(len(one.row) != values.shape[1] for one in rows):
            return
        cells = torch.eye(values[:, 0].numel(), dtype=torch.float64).reshape(-1, *values[:, 0].shape).unsqueeze(2)
        places = torch.ones(1, 1, *source.meta["val"].shape[2:], dtype=torch.float64)
        for one in rows:
            along = one.row.reshape(-1, *(1,) * (values.dim() - 2))
            added = [_convolved(node, one.value * places, cell)[0] for cell in cells]
            self.free_convolutions[node].append((len(self.unknowns), torch.stack(added)))
            self.unknowns.extend({self.program.parameters[weight]: cell * along} for cell in cells)

    # The interpretation.

    def run(self) -> None:
        """Demand what every class of rows must meet, at some inputs for each."""
        for numbers in self.tables.samples:
            self.numbers, self.shift = numbers, dict(self.added)
            self._interpret()

    def _interpret(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "output":
                for result in self.program.interface:
                    self._demand(self.shift.get(result))
            elif node.op == "call_function" and node not in self.program.constants:
                result = self._step(node)
                if result is not None:
                    self.shift[node] = result

    def _step(self, node: fx.Node) -> Any:
        name = op_name(node)
        read = linear_reading(node, self.program)
        if read is not None:
            return self._affine(node, read)
        if node in self.free_tables:
            return self._tied_lookup(node)
        moved = [a for a in node.all_input_nodes if a in self.shift]
        if not moved:
            return None
        if name in ("add", "sub"):
            return self._add(node)
        if name in LINEAR | _PLACES_ALL or (name in _LINEAR_AT_FIXED_PLACES and self._by_fixed_factor(node, moved)):
            return self._map(node)
        if name in ("mul", "div") and self._by_fixed_factor(node, moved):
            return self._map(node)
        if name == "layer_norm":
            return self._layer_norm(node)
        if name == "group_norm":
            return self._group_norm(node)
        if name in ("softmax", "log_softmax"):
            return self._softmax(node)
        if name == "index" and moved == [node.args[0]] and (rows := self._rows_anywhere(node)) is not None:
            return rows
        if name == "embedding" and node.args[0] in self.shift and len(moved) == 1:
            return self._lookup(node)
        if name.startswith("conv") and (name, 2) in _ADDS_AT:
            return self._convolution(node)
        if name in ("matmul", "bmm"):
            return self._matmul(node, 0)
        if name == "baddbmm":
            self._demand(self._shift_of(node, 0))
            return self._matmul(node, 1)
        if name in ("batch_norm", "_native_batch_norm_legit_no_training"):
            return self._batch_norm(node)
        for seen in moved:
            change = self.shift[seen]
            lost = isinstance(change, Tensor) and reaches_softmax(seen, self.program)
            self._demand(change - change.mean(-1, keepdim=True) if lost else change)
        return None

    def _affine(self, node: fx.Node, read: LinearReading) -> Tensor | None:
        total = None
        self._demand(self.shift.get(read.matrix))
        if read.source in self.shift:
            total = self.shift[read.source] @ self._matrix(read)
        for start, added in self.free_readers[node]:
            extra = added.new_zeros(len(self.unknowns), added.shape[1])
            extra[start : start + len(added)] = added
            total = _sum(total, extra)
        if read.bias in self.shift:
            total = _sum(total, self.shift[read.bias])
        return None if total is None else self._fill(total, node)

    def _matrix(self, read: LinearReading) -> Tensor:
        matrix = self.weights[self.program.parameters[read.weight]]
        return matrix.mT if read.rows_out else matrix

    def _add(self, node: fx.Node) -> Tensor:
        total, other = (self._shift_of(node, i) for i in (0, 1))
        if other is not None and op_name(node) == "sub":
            other = -other
        if total is not None and other is not None:
            return self._fill(total, node) + self._fill(other, node)
        one = total if total is not None else other
        assert one is not None
        return self._fill(one, node)

    def _rows_anywhere(self, node: fx.Node) -> Tensor | None:
        """Rows that are looked up at places of which all change alike."""
        change = self.shift[node.all_input_nodes[0]]
        numbers: Any = node.args[1]
        if not takes_rows(node, self.program) or any(n is None or n.meta["val"].dtype is torch.bool for n in numbers):
            return None
        for axis in range(1, 1 + len(numbers)):
            if not torch.equal(change, change.narrow(axis, 0, 1).expand_as(change)):
                return None
        return self._fill(change[(slice(None), *(0 for _ in numbers))], node)

    def _shift_of(self, node: fx.Node, position: int) -> Tensor | None:
        argument = operand(node, position)
        return self.shift.get(argument) if argument is not None else None

    def _map(self, node: fx.Node) -> Any:
        """A linear op, applied to the change of every unknown at once."""
        operands = [a for a in node.all_input_nodes if a in self.shift]

        def one(*changes: Any) -> Any:
            chosen = dict(zip(operands, changes, strict=True))

            def lookup(a: fx.Node) -> Any:
                if a in chosen:
                    return chosen[a]
                value = self._value(a)
                if isinstance(value, Tensor) and not value.is_floating_point():
                    return value
                if op_name(node) in _READS_ITS_CONSTANTS or (value is not None and not isinstance(value, Tensor)):
                    return value.double() if isinstance(value, Tensor) else value
                return torch.zeros(a.meta["val"].shape, dtype=torch.float64)

            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lookup)
            return call_wide(node, args, kwargs)

        if op_name(node) == "getitem":
            return self.shift[operands[0]][node.args[1]]
        return torch.func.vmap(one)(*(self.shift[a] for a in operands))

    def _by_fixed_factor(self, node: fx.Node, moved: list[fx.Node]) -> bool:
        fixed = self.program.constants.keys() | self.program.parameters.keys()
        others = [_before_casts(a) for a in node.all_input_nodes if a not in moved]
        return len(moved) == 1 and all(a in fixed for a in others)

    def _layer_norm(self, node: fx.Node) -> Tensor | None:
        change, gain, bias = (self._shift_of(node, i) for i in (0, 2, 3))
        if change is not None:
            self._demand(change - change.mean(-1, keepdim=True))
        self._demand(gain)
        return None if bias is None else self._fill(bias, node)

    def _group_norm(self, node: fx.Node) -> Tensor | None:
        """Blind to a constant that all channels of a group share; it adds β to all places of a channel."""
        change, gain, bias = (self._shift_of(node, i) for i in (0, 2, 3))
        if change is not None:
            grouped = change.reshape(*change.shape[:2], int(node.args[1]), -1)  # type: ignore[arg-type]
            self._demand(grouped - grouped.mean(-1, keepdim=True))
        self._demand(gain)
        trailing = (1,) * (node.meta["val"].dim() - 2)
        return None if bias is None else self._fill(bias.reshape(*bias.shape, *trailing), node)

    def _softmax(self, node: fx.Node) -> None:
        """Blind to a constant along its axis; otherwise it sees all."""
        change, dim = self._shift_of(node, 0), int(node.args[1])  # type: ignore[arg-type]
        assert change is not None
        if op_name(node) == "softmax":
            change = change - change.mean(dim if dim < 0 else dim + 1, keepdim=True)
        self._demand(change)

    def _batch_norm(self, node: fx.Node) -> Any:
        """y_c = γ_c (x_c - μ_c) / √(σ²_c + ε) + β_c."""
        eps = float(node.args[7] if op_name(node) == "batch_norm" else node.args[6])  # type: ignore[arg-type]
        gain, variance = (self.spans.weight(node, i) for i in (1, 4))
        change, bias, mean = (self._shift_of(node, i) for i in (0, 2, 3))
        self._demand(self._shift_of(node, 1))
        self._demand(self._shift_of(node, 4))
        if gain is None or variance is None:
            self._demand(change)
            return None
        factor = gain / (variance + eps).sqrt()
        trailing = (1,) * (len(node.all_input_nodes[0].meta["val"].shape) - 2)
        total = None if change is None else change * factor.reshape(-1, *trailing)
        for added in (bias, None if mean is None else -mean * factor):
            if added is not None:
                total = _sum(total, added.reshape(*added.shape, *trailing))
        if op_name(node) == "batch_norm" or total is None:
            return None if total is None else self._fill(total, node)
        return (self._filled(total, node.all_input_nodes[0].meta["val"].shape),)

    def _lookup(self, node: fx.Node) -> Tensor:
        change, rows = self._shift_of(node, 0), operand(node, 1)
        assert change is not None and rows is not None
        if rows in self.program.constants:
            return self._fill(change[:, self.program.constants[rows]], node)
        return self._fill(change[:, self._class_of_places(node)], node)

    def _tied_lookup(self, node: fx.Node) -> Tensor:
        """What the free changes of a reader add to the rows of the table that it is."""
        classes = int(self.tables.class_of_rows(self.tables.lookups[node]).max()) + 1
        change = torch.zeros(len(self.unknowns), classes, node.meta["val"].shape[-1], dtype=torch.float64)
        for start, row in self.free_tables[node]:
            for k in range(classes):
                change[start + k, k] += row
        return self._fill(change[:, self._class_of_places(node)], node)

    def _class_of_places(self, node: fx.Node) -> Tensor:
        """Numbers that depend on the weights may be any; no rows are told apart where there are such."""
        classes = self.tables.class_of_places(node, self.numbers)
        return torch.zeros(node.meta["val"].shape[:-1], dtype=torch.long) if classes is None else classes

    def _convolution(self, node: fx.Node) -> Tensor | None:
        change, bias, total = self._shift_of(node, 0), self._shift_of(node, 2), None
        self._demand(self._shift_of(node, 1))
        weight = operand(node, 1)
        if change is not None and op_name(node) in _CONVOLUTIONS and weight in self.program.parameters:
            results = _convolved(node, change.flatten(0, 1), self.weights[self.program.parameters[weight]])
            total = results.unflatten(0, change.shape[:2])
        else:
            self._demand(change)
        for start, added in self.free_convolutions[node]:
            extra = added.new_zeros(len(self.unknowns), 1, *added.shape[1:])
            extra[start : start + len(added), 0] = added
            total = _sum(total, extra)
        if bias is not None:
            total = _sum(total, bias.reshape(*bias.shape, *(1,) * (node.meta["val"].dim() - 2)))
        return None if total is None else self._fill(total, node)

    def _matmul(self, node: fx.Node, first: int) -> Tensor | None:
        """Keys: a constant is lost in softmax. Values: rows that sum to one pass it on. Else it must vanish."""
        self._demand(self._shift_of(node, first))
        change = self._shift_of(node, first + 1)
        if change is None:
            return None
        if reaches_softmax(node, self.program):
            self._demand(change - change.mean(-1, keepdim=True))
            return None
        if sums_to_one(node.args[first]):
            mean = change.mean(-2, keepdim=True)
            self._demand(change - mean)
            return self._fill(mean, node)
        self._demand(change)
        return None

    def _value(self, node: fx.Node) -> Any:
        node = _before_casts(node)
        if node in self.program.parameters:
            return self.weights[self.program.parameters[node]]
        return self.program.constants.get(node)

    def _fill(self, change: Tensor, node: fx.Node) -> Tensor:
        return self._filled(change, node.meta["val"].shape)

    def _filled(self, change: Tensor, shape: torch.Size) -> Tensor:
        missing = len(shape) - (change.dim() - 1)
        change = change.reshape(change.shape[0], *(1,) * missing, *change.shape[1:])
        return change.expand(change.shape[0], *shape).contiguous()

    def _demand(self, change: Any) -> None:
        for part in change if isinstance(change, (list, tuple)) else [change]:
            if part is not None:
                self.demands.append(torch.unique(part.reshape(part.shape[0], -1), dim=1))

    def kernel(self) -> list[dict[str, Tensor]]:
        """Combinations of the unknowns that meet every demand."""
        if not self.unknowns:
            return []
        demands = torch.cat([*self.demands, torch.zeros(len(self.unknowns), 1, dtype=torch.float64)], 1)
        u, s, _ = torch.linalg.svd(demands, full_matrices=True)
        rank = int((s > 1e-9 * s.amax().clamp_min(1e-300)).sum())
        return self._combined(u[:, rank:].T)

    def _combined(self, combinations: Tensor) -> list[dict[str, Tensor]]:
        """What combinations of the unknowns change, [combinations, unknowns]."""
        by_name: dict[str, list[int]] = defaultdict(list)
        for at, unknown in enumerate(self.unknowns):
            for name in unknown:
                by_name[name].append(at)
        totals = {}
        for name, places in by_name.items():
            changes = torch.stack([self.unknowns[at][name] for at in places])
            totals[name] = torch.tensordot(combinations[:, places], changes, 1)
        return [{name: total[i] for name, total in totals.items()} for i in range(len(combinations))]


def _before_casts(node: fx.Node) -> fx.Node:
    """The value that a node is but for its type."""
    while op_name(node) in _CASTS:
        node = node.all_input_nodes[0]
    return node


def _shows_last_as_channels(node: fx.Node) -> bool:
    """Whether an op moves the last axis of its operand to where a convolution looks for channels."""
    rank = node.meta["val"].dim() if isinstance(node.meta["val"], Tensor) else 0
    if op_name(node) == "permute":
        return node.args[1][1] in (-1, rank - 1)  # type: ignore[index, operator]
    return op_name(node) == "transpose" and rank == 3 and {int(d) % 3 for d in node.args[1:3]} == {1, 2}  # type: ignore[arg-type]


def _convolved(node: fx.Node, value: Tensor, kernel: Tensor) -> Tensor:
    """What a convolution makes of another value and kernel, without its bias."""
    groups = 1 if kernel.shape[1] == value.shape[1] else node.args[6]
    args = (value, kernel, None, *node.args[3:6])
    return call_wide(node, args if groups == 1 else (*args, groups), node.kwargs)


def _role(node: fx.Node, program: Program) -> str | None:
    """Whether a weight only ever adds: as a table whose rows the inputs choose, or entry by entry."""
    roles: set[str | None] = set()
    for user in node.users:
        name = op_name(user)
        at = user.args.index(node) if node in user.args else None
        if name in _CASTS:
            roles.add(_role(user, program))
        elif name == "embedding" and at == 0:
            roles.add(_ADDED if user.args[1] in program.constants else _TABLE)
        elif (name, at) in _ADDS_AT or name in LINEAR | {"add", "sub"} or _resizes(user, node, program):
            roles.add(_ADDED)
        else:
            return None
    return roles.pop() if len(roles) == 1 else None


def _resizes(user: fx.Node, node: fx.Node, program: Program) -> bool:
    """Whether an op makes a fixed linear map of a weight, as of a table for another grid."""
    fixed = all(a is node or a in program.constants for a in user.all_input_nodes)
    return fixed and op_name(user) in _LINEAR_AT_FIXED_PLACES


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    if a is None:
        return b
    return a + b.reshape(b.shape[0], *(1,) * (a.dim() - b.dim()), *b.shape[1:])
