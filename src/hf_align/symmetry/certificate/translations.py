"""Translations: constants that biases may exchange without changing the function.

A second, linear interpretation of the graph at given weights: every value carries what an infinitesimal change of each
bias-like weight adds to it (the same for all inputs). Linear ops pass that on; an op that would see it asks for it to
vanish. The kernel of all these demands are the translations: norm biases against reader biases, token against position
embeddings, key biases, value against output biases, and the mean direction of what reads a LayerNorm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.execute import call_wide
from hf_align.symmetry.certificate.tables import Tables
from hf_align.symmetry.passing import came_from, is_centred, stored_matrix, sums_to_one
from hf_align.symmetry.softmax_shift import reaches_softmax
from hf_align.trace import Program, op_name, operand

# fmt: off
LINEAR = frozenset((
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t", "unsqueeze", "squeeze",
    "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem", "cat", "concat", "stack",
    "contiguous", "clone", "alias", "detach", "dropout", "to", "_to_copy", "neg", "expand_as", "view_as", "type_as",
))
_LINEAR_AT_FIXED_PLACES = frozenset((
    "sum", "mean", "cumsum", "pad", "roll", "flip", "repeat", "repeat_interleave", "index", "index_select", "movedim",
    "narrow", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "upsample_nearest2d",
    "upsample_bilinear2d", "upsample_bicubic2d", "unfold", "copy", "slice_scatter", "select_scatter", "tile",
    "upsample_linear1d", "upsample_nearest1d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", "grid_sampler", "grid_sampler_2d", "embedding_bag", "gather",
))
_READS_ITS_CONSTANTS = frozenset(("mul", "div", "grid_sampler", "grid_sampler_2d", "embedding_bag"))
"""The others add them up, where they change nothing."""
_ADDS_AT = {("linear", 2), ("addmm", 0), ("layer_norm", 3), ("conv1d", 2), ("conv2d", 2), ("conv3d", 2),
            ("conv_transpose1d", 2), ("conv_transpose2d", 2), ("conv_transpose3d", 2), ("batch_norm", 2),
            ("_native_batch_norm_legit_no_training", 2)}
"""Ops that add a vector to a result, and where it stands."""
# fmt: on
_CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
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
        self.shift: dict[fx.Node, Any] = {}
        self.demands: list[Tensor] = []
        self.tables = Tables(program)
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
            self.shift[node] = basis.new_zeros(len(self.unknowns), *basis.shape[1:])
            self.shift[node][start : start + len(basis)] = basis

    def _basis(self, node: fx.Node, role: str) -> Tensor:
        """One change for each entry, of a table for each entry of the rows of a class."""
        shape = tuple(node.meta["val"].shape)
        if role == _TABLE:
            shape = (int(self.tables.class_of_rows(node).max()) + 1, *shape[1:])
        return torch.eye(math.prod(shape), dtype=torch.float64).reshape(math.prod(shape), *shape)

    def _collect_readers(self) -> None:
        """W + u (1/γ)ᵀ adds u Σβ/γ to what W reads from γ ⊙ n + β, for n has mean zero; a tied table allows u that are
        alike for all rows of a class."""
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
        outputs, width = weight.meta["val"].shape if rows_out else weight.meta["val"].shape[::-1]
        directions = torch.eye(outputs, dtype=torch.float64)
        if lookups:
            directions = torch.nn.functional.one_hot(self.tables.class_of_rows(weight)).double().T
        blocks = [self._normed(r.source, r.source.meta["val"].dim() - 1) for r in readings.values()]
        for block in blocks[0]:
            same = [next((b for b in found if b.matches(block)), None) for found in blocks]
            if None in same:
                continue
            start, row = len(self.unknowns), torch.zeros(width, dtype=torch.float64)
            row[block.start : block.start + len(block.gain)] = 1 / block.gain
            for u in directions:
                change = torch.outer(u, row) if rows_out else torch.outer(row, u)
                self.unknowns.append({self.program.parameters[weight]: change})
            for node, found in zip(readings, same, strict=True):
                assert found is not None
                self.free_readers[node].append((start, (found.bias / found.gain).sum() * directions))
            for lookup in lookups:
                self.free_tables[lookup].append((start, row))

    def _free_convolution(self, node: fx.Node) -> None:
        """W + u (1/γ)ᵀ for every cell of the kernel, where γ ⊙ n + β lies along the channels."""
        weight, source = operand(node, 1), operand(node, 0)
        assert weight is not None and source is not None
        values = self.weights[self.program.parameters[weight]]
        blocks = self._normed(source, 1)
        if len(weight.users) > 1 or len(blocks) != 1 or len(blocks[0].gain) != values.shape[1]:
            return
        cells = torch.eye(values[:, 0].numel(), dtype=torch.float64).reshape(-1, *values[:, 0].shape).unsqueeze(2)
        inverse = (1 / blocks[0].gain).reshape(-1, *(1,) * (values.dim() - 2))
        places = torch.ones(1, 1, *source.meta["val"].shape[2:], dtype=torch.float64)
        added = [_convolved(node, (blocks[0].bias / blocks[0].gain).sum() * places, cell)[0] for cell in cells]
        self.free_convolutions[node].append((len(self.unknowns), torch.stack(added)))
        self.unknowns.extend({self.program.parameters[weight]: cell * inverse} for cell in cells)

    def _normed(self, source: fx.Node, place: int, start: int = 0) -> list[_Normed]:
        """The parts of an axis of a value (counted from the front) that are γ ⊙ n + β with n of mean zero."""
        while (before := self._passed(source, place)) is not None:
            source, place = source.all_input_nodes[0], before
        if op_name(source) in ("cat", "concat") and source.args[1:2] in ((place - source.meta["val"].dim(),), (place,)):
            parts = []
            for part in source.args[0]:  # type: ignore[union-attr]
                assert isinstance(part, fx.Node)
                parts += self._normed(part, place, start)
                start += part.meta["val"].shape[place]
            return parts
        norm = self._norm(source) if place == source.meta["val"].dim() - 1 else None
        if norm is None:
            return []
        gain, bias = norm
        return [_Normed(start, gain, torch.zeros_like(gain) if bias is None else bias)]

    def _passed(self, node: fx.Node, place: int) -> int | None:
        """Which axis of what a value is only passed on from, or summed up along other axes, an axis of it is."""
        if self._is_times_one(node):
            return place
        passes = op_name(node) in LINEAR | {"mean"} and len(node.all_input_nodes) == 1
        return came_from(node, place) if passes else None

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
            gain, bias = (self._weight(source, i) for i in (2, 3))
            return ones if gain is None else gain, bias
        weights = [i for i, a in enumerate(source.args) if isinstance(a, fx.Node) and self._is_vector(a)]
        others = [a for a in source.all_input_nodes if not self._is_vector(a)]
        if op_name(source) == "add" and len(weights) == len(others) == 1:
            norm = self._norm(others[0])
            return None if norm is None or norm[1] is not None else (norm[0], self._weight(source, weights[0]))
        if op_name(source) == "mul" and len(weights) == len(others) == 1 and is_centred(others[0]):
            gain = self._weight(source, weights[0])
            return None if gain is None else (gain, None)
        return (ones, None) if is_centred(source) else None

    def _is_vector(self, node: fx.Node) -> bool:
        return _plain_weight(node)[0] in self.program.parameters and node.meta["val"].dim() == 1

    def _weight(self, node: fx.Node, position: int) -> Tensor | None:
        argument = node.args[position] if len(node.args) > position else None
        if not isinstance(argument, fx.Node):
            return None
        weight, offset = _plain_weight(argument)
        return self.weights[self.program.parameters[weight]] + offset

    # The interpretation.

    def run(self) -> None:
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
        if name in LINEAR or (name in _LINEAR_AT_FIXED_PLACES and self._by_fixed_factor(node, moved)):
            return self._map(node)
        if name in ("mul", "div") and self._by_fixed_factor(node, moved):
            return self._map(node)
        if name == "layer_norm":
            return self._layer_norm(node)
        if name in ("softmax", "log_softmax"):
            return self._softmax(node)
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
        others = [a for a in node.all_input_nodes if a not in moved]
        return len(moved) == 1 and all(a in fixed for a in others)

    def _layer_norm(self, node: fx.Node) -> Tensor | None:
        change, gain, bias = (self._shift_of(node, i) for i in (0, 2, 3))
        if change is not None:
            self._demand(change - change.mean(-1, keepdim=True))
        self._demand(gain)
        return None if bias is None else self._fill(bias, node)

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
        gain, variance = (self._weight(node, i) for i in (1, 4))
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
        classes = self.tables.class_of_places(node)
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


@dataclass(frozen=True)
class _Normed:
    """Entries from `start` of an axis are γ ⊙ n + β, with n of mean zero."""

    start: int
    gain: Tensor
    bias: Tensor

    def matches(self, other: _Normed) -> bool:
        """Whether the same entries have the same gain."""
        return (
            self.start == other.start and self.gain.shape == other.gain.shape and torch.allclose(self.gain, other.gain)
        )


@dataclass(frozen=True)
class LinearReading:
    """output = source · weight (or its transpose, if its rows are outputs) + bias; `matrix` is the weight as it is
    read."""

    source: fx.Node
    matrix: fx.Node
    weight: fx.Node
    rows_out: bool
    bias: fx.Node | None


def linear_reading(node: fx.Node, program: Program) -> LinearReading | None:
    """What a node is as a linear map of one value by a stored matrix, if it is one."""
    places = {"linear": (0, 1, 2), "addmm": (1, 2, 0), "matmul": (0, 1, None), "mm": (0, 1, None)}
    if node.op != "call_function" or op_name(node) not in places:
        return None
    at, weight_at, bias_at = places[op_name(node)]
    source, matrix = operand(node, at), operand(node, weight_at)
    assert source is not None and matrix is not None
    found = stored_matrix(matrix, program)
    if found is None:
        return None
    weight, flipped = found
    bias = operand(node, bias_at) if bias_at is not None else None
    return LinearReading(source, matrix, weight, flipped != (op_name(node) == "linear"), bias)


def _convolved(node: fx.Node, value: Tensor, kernel: Tensor) -> Tensor:
    """What a convolution makes of another value and kernel, without its bias."""
    groups = 1 if kernel.shape[1] == value.shape[1] else node.args[6]
    args = (value, kernel, None, *node.args[3:6])
    return call_wide(node, args if groups == 1 else (*args, groups), node.kwargs)


def _plain_weight(node: fx.Node) -> tuple[fx.Node, float]:
    """What a vector is a cast of, or what one is added to: (w, 1) for a gain written as 1 + w."""
    offset = 0.0
    while op_name(node) in ("to", "_to_copy", "add", "alias") and len(node.all_input_nodes) == 1:
        if op_name(node) == "add":
            offset += next(a for a in node.args if isinstance(a, (int, float)))
        node = node.all_input_nodes[0]
    return node, offset


def leads_to(user: fx.Node, readers: Container[fx.Node]) -> bool:
    """Whether a use of a weight is one of its readers, or only passes it on to them."""
    return user in readers or (op_name(user) in LINEAR and all(leads_to(u, readers) for u in user.users))


def _role(node: fx.Node, program: Program) -> str | None:
    """Whether a weight only ever adds: as a table whose rows the inputs choose, or entry by entry."""
    roles = set()
    for user in node.users:
        name = op_name(user)
        at = user.args.index(node) if node in user.args else None
        if name == "embedding" and at == 0:
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
