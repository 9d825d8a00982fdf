"""Scales of whole values: what some weights gain others lose, and a length or a product in between passes it on.

A third interpretation of the graph at given weights: every value carries its degree, what an infinitesimal scale of
each index of each weight adds to the logarithm of every entry. Products add degrees, sums ask for equal ones, a length
passes them on, and an op that would see a scale asks for degree zero. So the states of a recurrence that are added to a
skipped input have one scale together, and what is divided by its own length has one for itself. Entries that are zero
may have any degree; it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.certificate.readings import LINEAR, MOVES
from hf_align.tracing.execute import call_wide
from hf_align.tracing.trace import Program, op_name, operand

_POWERS = {"relu": 1.0, "relu_": 1.0, "leaky_relu": 1.0, "abs": 1.0, "neg": 1.0, "sqrt": 0.5, "rsqrt": -0.5,
           "reciprocal": -1.0, "square": 2.0}  # fmt: skip
"""By how much an op multiplies degrees, entry by entry."""
_KEEPS = (LINEAR - {"neg"}) | MOVES
"""What every entry keeps its degree through."""
_SUMS = frozenset(("sum", "mean", "linalg_vector_norm", "linalg_norm", "norm", "amax", "cumsum"))
_FUNCTIONS = frozenset(("exp", "expm1", "log", "log1p", "softplus", "tanh", "sigmoid", "silu", "gelu", "sin", "cos",
                        "add", "sub"))  # fmt: skip
"""Whose derivatives are taken where they are of weights alone."""
_TINY = 1e-5
"""A length is kept from zero by no more than this."""
_ZERO = 1e-9


def degrees(program: Program, weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """A basis of the scales of whole values at these weights, each as changes of some parameters.

    Args:
        weights: float64, by parameter name.
    """
    system = _System(program, weights)
    system.run()
    return system.kernel()


class _System:
    """The unknowns (one for each index of each axis of each weight), the degrees, and the demands so far."""

    def __init__(self, program: Program, weights: Mapping[str, Tensor]) -> None:
        self.program = program
        self.weights = weights
        self.size = sum(sum(weights[name].shape) or 1 for name in program.parameters.values())
        self.degree: dict[fx.Node, Any] = {}
        self.known: dict[fx.Node, Any] = {}
        self.demands: list[Tensor] = []
        start = 0
        for node, name in program.parameters.items():
            self.degree[node] = self._of_weight(weights[name], start)
            self.known[node] = weights[name]
            start += sum(weights[name].shape) or 1

    def _of_weight(self, weight: Tensor, start: int) -> Tensor:
        """[unknowns, *shape]: the sum of those of all axes."""
        total = torch.zeros(self.size, *weight.shape, dtype=torch.float64)
        if not weight.dim():
            total[start] = 1.0
        for axis, size in enumerate(weight.shape):
            one = torch.zeros(self.size, size, dtype=torch.float64)
            one[start : start + size] = torch.eye(size, dtype=torch.float64)
            total += one.reshape(self.size, *(size if i == axis else 1 for i in range(weight.dim())))
            start += size
        return total

    def run(self) -> None:
        interface = self.program.interface
        last = {a: node for node in self.program.graph.nodes for a in node.all_input_nodes}
        for node in self.program.graph.nodes:
            if node.op == "output":
                for result in interface:
                    self._demand(self.degree.get(result))
            elif node.op == "call_function" and node not in self.program.constants:
                found = self._step(node)
                if found is not None:
                    self.degree[node] = found if isinstance(found, (tuple, list)) else _compressed(found)
                for operand_ in node.all_input_nodes:
                    if last[operand_] is node and operand_ not in interface:
                        self.degree.pop(operand_, None)

    def _step(self, node: fx.Node) -> Any:
        name, moved = op_name(node), [a for a in node.all_input_nodes if a in self.degree]
        if not moved:
            return None
        if all(a in self.known or a in self.program.constants for a in node.all_input_nodes):
            self._evaluate(node)
        if name in _POWERS:
            return _POWERS[name] * self._of(node, node.args[0])
        if name in _KEEPS and (name in LINEAR or self._is_alone(node, moved)):
            return self._rearranged(node, moved)
        if name in ("mul", "div"):
            return self._product(node)
        if node in self.known and name in _FUNCTIONS:
            return self._function_of_weights(node, moved)
        if name in ("add", "sub"):
            return self._same(*(self._of(node, a) for a in node.args[:2]))
        if name == "where" and node.args[0] not in self.degree:
            return self._same(*(self._of(node, a) for a in node.args[1:3]))
        if name == "masked_fill" and node.args[1] in self.program.constants:
            return self._same(*(self._of(node, node.args[i]) for i in (0, 2)))
        if name == "pow" and isinstance(node.args[1], (int, float)):
            return node.args[1] * self._of(node, node.args[0])
        if name in _SUMS:
            return self._sum(node)
        if name == "clamp_min" and self._is_length(node):
            return self._of(node, node.args[0])
        if name in ("linear", "matmul", "mm", "bmm", "addmm"):
            return self._matrix_product(node)
        if name in ("conv1d", "conv2d", "conv3d"):
            return self._convolution(node)
        if name == "layer_norm":
            return self._norm(node)
        if name == "_weight_norm":
            return self._weight_norm(node)
        if name == "embedding" and node.args[1] not in self.degree:
            return self._ranked(self._uniform(self._degree(node.args[0]), [1])[:, 0], node)
        self._demand_all(moved)
        return None

    def _is_alone(self, node: fx.Node, moved: list[fx.Node]) -> bool:
        return len(moved) == 1 and all(a in moved or a in self.program.constants for a in node.all_input_nodes)

    def _is_length(self, node: fx.Node) -> bool:
        """max(|x|, tiny): a length, where it is not zero."""
        source, least = operand(node, 0), node.args[1]
        return isinstance(least, float) and 0 < least <= _TINY and source is not None and op_name(source) in (
            "linalg_vector_norm", "linalg_norm", "norm")  # fmt: skip

    def _of(self, node: fx.Node, argument: Any) -> Tensor:
        """The degree of an operand, with the dimensions of the result; of a constant nought, NaN at zeros."""
        if isinstance(argument, fx.Node) and argument in self.degree:
            return self._ranked(self.degree[argument], node)
        value = self.program.constants.get(argument) if isinstance(argument, fx.Node) else argument
        if isinstance(argument, fx.Node) and value is None:
            return self._nought(node)
        tensor = torch.as_tensor(value)
        nothing = torch.where(tensor == 0, math.nan, 0.0).double()
        return self._ranked(nothing.expand(self.size, *nothing.shape), node)

    def _nought(self, node: fx.Node) -> Tensor:
        return torch.zeros(self.size, *(1,) * node.meta["val"].dim(), dtype=torch.float64)

    def _ranked(self, degree: Tensor, node: fx.Node) -> Tensor:
        """With as many dimensions as a value, new ones in front."""
        return _beside(degree, 1 + node.meta["val"].dim())

    # Rules.

    def _product(self, node: fx.Node) -> Tensor:
        left, right = (self._of(node, a) for a in node.args[:2])
        return left + right if op_name(node) == "mul" else left - right

    def _same(self, first: Tensor, second: Tensor) -> Tensor:
        """Summands have one degree."""
        self._demand(first - second)
        return torch.where(first.isnan(), second, first)

    def _uniform(self, degree: Tensor, dims: list[int]) -> Tensor:
        """One degree along some dimensions, which are kept."""
        one = degree.nanmean(dims, keepdim=True)
        self._demand(degree - one)
        return one

    def _sum(self, node: fx.Node) -> Tensor | None:
        source = operand(node, 0)
        assert source is not None
        degree = self.degree[source]
        place = 2 if "norm" in op_name(node) else 1
        dims: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
        rank = degree.dim() - 1
        if isinstance(dims, torch.dtype) or dims is None:
            dims = list(range(rank))
        chosen = [1 + int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
        one = self._uniform(degree, chosen)
        return one if node.meta["val"].dim() == rank else one.squeeze(chosen)

    def _matrix_product(self, node: fx.Node) -> Tensor:
        """y_ab = Σ_k x_ak w_kb (+ c_b): the degrees of x and w add up to the same for all k."""
        at = 1 if op_name(node) == "addmm" else 0
        x, w = (self._degree(a) for a in node.args[at : at + 2])
        w = w.mT if op_name(node) == "linear" and w.dim() == 3 else w
        x, w = (x[:, None] if x.dim() == 2 else x), (w[..., None] if w.dim() == 2 else w)
        rank = max(x.dim(), w.dim())
        total = self._uniform(_beside(x, rank).unsqueeze(-1) + _beside(w, rank).unsqueeze(-3), [-2]).squeeze(-2)
        for dim, argument in ((-1, node.args[at + 1]), (-2, node.args[at])):
            if len(argument.meta["val"].shape) == 1:  # type: ignore[union-attr]
                total = total.squeeze(dim)
        result = self._ranked(total, node)
        bias = node.args[0] if at else (node.args[2] if len(node.args) > 2 else None)
        return result if bias is None else self._same(result, self._of(node, bias))

    def _degree(self, argument: Any) -> Tensor:
        """Of an operand, with its own dimensions."""
        if argument in self.degree:
            return self.degree[argument]
        return self._of(argument, argument)

    def _convolution(self, node: fx.Node) -> Tensor | None:
        """As a matrix product, over channels and cells; each channel by itself where there is one group for each."""
        value, weight = (self._degree(a) for a in node.args[:2])
        spatial = list(range(3, weight.dim()))
        x = self._uniform(value, [d - weight.dim() for d in spatial])
        w = self._uniform(weight, spatial)
        channels = node.args[0].meta["val"].shape[-len(spatial) - 1]  # type: ignore[union-attr]
        groups = node.args[6] if len(node.args) > 6 else 1
        if groups == channels == node.meta["val"].shape[-len(spatial) - 1]:
            result = x + w.squeeze(2).unsqueeze(1)
        elif groups == 1:
            total = x.unsqueeze(2) + w.unsqueeze(1)  # [unknowns, batch, out, in, 1…]
            result = self._uniform(total, [3]).squeeze(3)
        else:
            self._demand_all([a for a in node.all_input_nodes if a in self.degree])
            return None
        bias = operand(node, 2)
        if bias is None:
            return result
        added = self._degree(bias)
        return self._same(result, self._ranked(added.reshape(*added.shape, *(1,) * len(spatial)), node))

    def _weight_norm(self, node: fx.Node) -> Tensor:
        """g v / |v|, the length over all but one axis."""
        direction, length = (self._of(node, a) for a in node.args[:2])
        rank = node.meta["val"].dim()
        kept = int(node.args[2]) % rank if len(node.args) > 2 else 0  # type: ignore[arg-type]
        return direction - self._uniform(direction, [1 + d for d in range(rank) if d != kept]) + length

    def _norm(self, node: fx.Node) -> Tensor:
        """What comes out of a norm with an ε of its own has the degree of the gain."""
        self._demand(self.degree.get(node.args[0]))  # type: ignore[arg-type]
        gain, bias = operand(node, 2), operand(node, 3)
        result = self._of(node, gain) if gain is not None else self._nought(node)
        return result if bias is None else self._same(result, self._of(node, bias))

    def _function_of_weights(self, node: fx.Node, moved: list[fx.Node]) -> Tensor:
        """d log u of a value u that depends on weights alone."""

        def function(*values: Tensor) -> Any:
            chosen = dict(zip(moved, values, strict=True))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: chosen.get(a, self._value(a)))
            return call_wide(node, args, kwargs)

        values = tuple(self.known[a] for a in moved)

        def change(*degree: Tensor) -> Tensor:
            return torch.func.jvp(function, values, tuple(d * v for d, v in zip(degree, values, strict=True)))[1]

        return torch.func.vmap(change)(*(self._whole(a).nan_to_num(0.0) for a in moved)) / self.known[node]

    def _whole(self, node: fx.Node) -> Any:
        """The degree of every entry."""
        degree = self.degree[node]
        return degree.expand(self.size, *node.meta["val"].shape) if isinstance(degree, Tensor) else degree

    def _evaluate(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        self.known[node] = call_wide(node, args, kwargs)

    def _value(self, node: fx.Node) -> Any:
        value = self.known[node] if node in self.known else self.program.constants[node]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def _rearranged(self, node: fx.Node, moved: list[fx.Node]) -> Any:
        """An op that moves entries, applied to the degrees."""
        if op_name(node) == "getitem":
            return self.degree[moved[0]][node.args[1]]

        def one(*degree: Tensor) -> Any:
            chosen = dict(zip(moved, degree, strict=True))

            def lookup(a: fx.Node) -> Any:
                value = self.program.constants.get(a)
                if a in chosen:
                    return chosen[a]
                if isinstance(value, Tensor) and value.is_floating_point():
                    return torch.where(value == 0, math.nan, 0.0).double()
                return torch.zeros(a.meta["val"].shape, dtype=torch.float64) if value is None else value

            args: Any
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lookup)
            return _padded(*args) if op_name(node) == "pad" else call_wide(node, args, kwargs)

        return torch.func.vmap(one)(*(self._whole(a) for a in moved))

    # Demands.

    def _demand_all(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self._demand(self.degree[node])

    def _demand(self, degree: Any) -> None:
        for part in degree if isinstance(degree, (list, tuple)) else [degree]:
            if part is not None:
                columns = _compressed(part).reshape(self.size, -1)
                columns = columns[:, ~columns[0].isnan()]
                self.demands.append(torch.unique(columns[:, columns.abs().amax(0) > _ZERO], dim=1))

    def kernel(self) -> list[dict[str, Tensor]]:
        """Combinations of the unknowns that meet every demand, as far as they change a weight."""
        demands = torch.unique(torch.cat([*self.demands, torch.zeros(self.size, 1, dtype=torch.float64)], 1), dim=1)
        squares, vectors = torch.linalg.eigh(demands @ demands.T)
        null = vectors[:, squares < _ZERO * squares[-1].clamp_min(1e-300)].T
        null = null[(null @ demands).abs().amax(1) < _ZERO]
        if not len(null):
            return []
        changes = self._changes(null)
        rows = torch.cat([change.reshape(len(null), -1) for change in changes.values()], 1)
        # What one axis gains and another loses is nothing: its rounding must not be made a direction.
        _, size, basis = torch.linalg.svd(rows, full_matrices=False)
        real = basis[size > _ZERO * size[0].clamp_min(1.0)]
        parts = real.split([self.weights[n].numel() for n in changes], 1)
        shaped = {n: p.unflatten(1, self.weights[n].shape or (1,)) for n, p in zip(changes, parts, strict=True)}
        return [{n: p[i].reshape(self.weights[n].shape) for n, p in shaped.items()} for i in range(len(real))]

    def _changes(self, coefficients: Tensor) -> dict[str, Tensor]:
        """What the unknowns change, [combinations, *shape] for each weight; from [combinations, unknowns]."""
        names = self.program.parameters.values()
        rates = coefficients.split([sum(self.weights[name].shape) or 1 for name in names], 1)
        return {n: _rate(r, self.weights[n].shape) * self.weights[n] for n, r in zip(names, rates, strict=True)}


def _rate(coefficients: Tensor, shape: torch.Size) -> Tensor:
    """The sum of what every axis says of its indices, [combinations, *shape]."""
    count = len(coefficients)
    if not shape:
        return coefficients[:, 0]
    parts = coefficients.split(list(shape), 1)
    return sum((p.reshape(count, *(n if i == axis else 1 for i, n in enumerate(shape)))
                for axis, p in enumerate(parts)), torch.zeros(count, *shape, dtype=coefficients.dtype))  # fmt: skip


def _compressed(degree: Tensor) -> Tensor:
    """One entry along every dimension along which nothing differs."""
    for dim in range(1, degree.dim()):
        first = degree.narrow(dim, 0, 1) if degree.shape[dim] else degree
        same = torch.equal(degree.nan_to_num(math.inf), first.expand_as(degree).nan_to_num(math.inf))
        degree = first if same else degree
    return degree


def _beside(degree: Tensor, rank: int) -> Tensor:
    """With dimensions of size one behind the first, up to a rank."""
    return degree.reshape(degree.shape[0], *(1,) * (rank - degree.dim()), *degree.shape[1:])


def _padded(value: Tensor, widths: list[int], mode: str = "constant", filling: float | None = None) -> Tensor:
    if mode != "constant":
        return torch.nn.functional.pad(value, widths, mode)
    return torch.nn.functional.pad(value, widths, value=0.0 if filling else math.nan)
