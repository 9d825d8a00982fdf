"""Where a program multiplies a weight by what it reads, and what is added to the result further on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.running.network import in_dtype
from hf_align.runtime.devices import as_double
from hf_align.symmetry.rules.patterns import stored_matrix
from hf_align.tracing.execute import run_node
from hf_align.tracing.ops import Trait, does, factors_of
from hf_align.tracing.program import Program, operand

ORDERS = Trait.SAME | Trait.REORDERS_AXES
LAYS_OUT = ORDERS | Trait.RESHAPES | Trait.ADDS_UNIT_AXES


@dataclass(frozen=True)
class Beside:
    """What is added to the result of a site on its way.

    Attributes:
        value: the other summand.
        way: ops between the result and the sum, each of which only lays the entries out anew.
    """

    value: fx.Node
    way: tuple[fx.Node, ...]


def carried(way: Sequence[fx.Node], value: Tensor, start: fx.Node, lookup: Callable[[fx.Node], Any]) -> Tensor:
    """What ops, one after the other, make of a value in place of that of `start`; all else is looked up.

    Sums between them are no part of the way: behind one, an op takes the value in place of its first operand.
    """
    before = start
    for node in way:
        along = before if before in node.all_input_nodes else node.all_input_nodes[0]
        found = {along: value}
        value, before = run_node(node, lambda n: found[n] if n in found else lookup(n)), node  # noqa: B023
    return value


def brought_back(
    way: Sequence[fx.Node], change: Tensor, value: Tensor, start: fx.Node, lookup: Callable[[fx.Node], Any]
) -> Tensor:
    """A change at the end of a way [as there, or broadcast] that only lays a value out anew, laid out as the value."""
    end, transposed = torch.func.vjp(lambda y: carried(way, y, start, lookup), value)[:2]
    everywhere = change.expand(torch.broadcast_shapes(change.shape, end.shape))
    back: Tensor = transposed(everywhere.sum_to_size(end.shape) * (end.numel() / everywhere.numel()))[0]
    return back


def arrivals(
    way: Sequence[fx.Node], value: Tensor, start: fx.Node, lookup: Callable[[fx.Node], Any]
) -> tuple[Tensor, Tensor]:
    """The factor with which each entry of a value goes into the end of a way that is linear, and the entry of the end,
    counted in row-major order, that it goes into: both [as the value], float64 and int64. Where the factor is zero,
    so is the number.

    Each entry goes into one: of the matrix L of the way, every column has one factor. So Lᵀ 1 has the factors, and Lᵀ
    of the entries' numbers those numbers times the factors.
    """

    value = as_double(value)

    def known(node: fx.Node) -> Any:
        found = lookup(node)
        return in_dtype(found.to(value.device), value.dtype) if isinstance(found, Tensor) else found

    end, transposed = torch.func.vjp(lambda y: carried(way, y, start, known), value)[:2]
    (factors,) = transposed(torch.ones_like(end))
    (numbers,) = transposed(torch.arange(end.numel(), dtype=end.dtype, device=end.device).view_as(end))
    return factors, torch.where(factors == 0, 0, numbers / factors).round().long()


@dataclass(frozen=True)
class Site:
    """An op that is linear in a weight that nothing else reads.

    Attributes:
        value: what it reads.
        parameter: the weight.
        bias: the parameter that it adds, if nothing else reads it.
        beside: what is added to the result, the first sum first.
        positions: where the op takes what it reads, the weight, and the bias.
        is_stored_flipped: whether the weight is [outputs, inputs].
    """

    node: fx.Node
    value: fx.Node
    parameter: str
    bias: str | None
    shape: tuple[int, ...]
    beside: tuple[Beside, ...] = field(compare=False)
    is_stored_flipped: bool

    @property
    def names(self) -> frozenset[str]:
        """The weight, and the bias if there is one."""
        return frozenset((self.parameter,) if self.bias is None else (self.parameter, self.bias))

    @property
    def is_convolution(self) -> bool:
        """Whether it reads patches."""
        return does(self.node, Trait.CONVOLVES)

    @property
    def is_whole(self) -> bool:
        """Whether it gives what the weight and the bias give, and adds nothing else."""
        places = factors_of(self.node)
        assert places is not None
        return places[2] is None or operand(self.node, places[2]) is None or self.bias is not None

    @property
    def groups(self) -> int:
        """Parts of what is read that meet no other part."""
        if not self.is_convolution:
            return 1
        channels: int = self.value.meta["val"].shape[1]
        return channels // self.shape[1]

    @property
    def inputs(self) -> int:
        """n, how many entries each result depends on, without a bias."""
        return math.prod(self.shape[1:]) if self.is_stored_flipped else self.shape[0]

    @property
    def outputs(self) -> int:
        """m, the results of each group."""
        return (self.shape[0] if self.is_stored_flipped else self.shape[1]) // self.groups

    def rows(self, value: Tensor) -> Tensor:
        """What is multiplied by the weight, [groups, rows, n]: of a convolution, the patches."""
        if not self.is_convolution:
            return value.reshape(1, -1, self.inputs)
        eye = torch.eye(self.inputs, dtype=value.dtype, device=value.device).repeat(self.groups, 1)
        how = {k: v for k, v in self.node.kwargs.items() if k != "bias"}
        convolve: Any = self.node.target
        patches: Tensor = convolve(value, eye.reshape(-1, *self.shape[1:]), None, *self.node.args[3:], **how)
        return patches.movedim(1, -1).reshape(-1, self.groups, self.inputs).movedim(1, 0)

    def results(self, result: Tensor) -> Tensor:
        """What the op gives, [groups, rows, m]."""
        if self.is_convolution:
            return result.movedim(1, -1).reshape(-1, self.groups, self.outputs).movedim(1, 0)
        return result.reshape(1, -1, self.outputs)

    def with_ones(self, rows: Tensor) -> Tensor:
        """Rows [*, n], with a column for the bias if there is one."""
        return rows if self.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], -1)

    def stored(self, matrix: Tensor) -> Tensor:
        """[groups, n, m] as the weight is stored."""
        return (matrix.mT.reshape(self.shape) if self.is_stored_flipped else matrix[0]).contiguous()

    def found_in(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The weight [groups, n, m] as `stored` takes it, and the bias below, float32 on the CPU."""
        weight = weights[self.parameter].float().cpu()
        matrix = weight.reshape(self.groups, -1, self.inputs).mT if self.is_stored_flipped else weight[None]
        if self.bias is None:
            return matrix
        return torch.cat([matrix, weights[self.bias].float().cpu().reshape(self.groups, 1, -1)], 1)

    def named(self, found: Tensor) -> dict[str, Tensor]:
        """The weight and the bias by name, of what `found_in` gives."""
        found = found.float().cpu()
        named = {self.parameter: self.stored(found[:, : self.inputs])}
        if self.bias is not None:
            named[self.bias] = found[:, -1].reshape(-1)
        return named


def sites(program: Program) -> list[Site]:
    """All sites in the order of the graph, of weights and biases that are read once."""
    readers = readers_of(program)
    found = []
    for node in program.graph.nodes:
        site = _site(node, program, readers) if node.op == "call_function" else None
        if site is not None:
            found.append(site)
    return found


def readers_of(program: Program) -> Mapping[str, list[fx.Node]]:
    """The ops that read each parameter, behind those that only lay it out."""
    found: dict[str, list[fx.Node]] = {}

    def follow(node: fx.Node, name: str) -> None:
        for user in node.users:
            if does(user, ORDERS) and user.all_input_nodes == [node]:
                follow(user, name)
            else:
                found.setdefault(name, []).append(user)

    for node, name in program.parameters.items():
        follow(node, name)
    return found


def _site(node: fx.Node, program: Program, readers: Mapping[str, list[fx.Node]]) -> Site | None:
    places = factors_of(node) if does(node, Trait.AFFINE | Trait.CONTRACTS) else None
    if places is None or does(node, Trait.BATCHED) or _is_scaled(node):
        return None
    value, weight = operand(node, places[0]), operand(node, places[1])
    if value is None or weight is None or value in program.constants or value in program.parameters:
        return None
    matrix = _stored(weight, program)
    if matrix is None or readers[program.parameters[matrix[0]]] != [node]:
        return None
    stored, flipped = matrix
    shape = tuple(stored.meta["val"].shape)
    if does(node, Trait.CONVOLVES) and value.meta["val"].dim() != len(shape):
        return None
    bias = operand(node, places[2]) if places[2] is not None else None
    added = None if bias is None else _plain_parameter(bias, program)
    if added is not None and (readers[added] != [node] or math.prod(program.shapes[added]) != _width(node)):
        added = None
    flipped_there = does(node, Trait.OUTPUTS_FIRST) != flipped
    return Site(node, value, program.parameters[stored], added, shape, tuple(besides(node, program)), flipped_there)


def _width(node: fx.Node) -> int:
    result: Tensor = node.meta["val"]
    return result.shape[1 if does(node, Trait.CONVOLVES) else -1]


def _is_scaled(node: fx.Node) -> bool:
    return any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))


def _stored(weight: fx.Node, program: Program) -> tuple[fx.Node, bool] | None:
    if weight in program.parameters and weight.meta["val"].dim() > 2:
        return weight, False
    return stored_matrix(weight, program)


def _plain_parameter(node: fx.Node, program: Program) -> str | None:
    while does(node, Trait.SAME):
        node = node.all_input_nodes[0]
    return program.parameters.get(node)


def besides(node: fx.Node, program: Program) -> Iterator[Beside]:
    """The summands that meet a value before anything else happens to it."""
    way: list[fx.Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        if does(user, LAYS_OUT) and user.all_input_nodes[0] is node:
            way.append(user)
        elif does(user, Trait.ADDS) and len(user.all_input_nodes) == 2 and not user.kwargs:
            other = next(n for n in user.all_input_nodes if n is not node)
            if user.meta["val"].shape != node.meta["val"].shape:
                return
            if other not in program.constants:
                yield Beside(other, tuple(way))
        else:
            return
        node = user
