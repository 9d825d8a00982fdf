"""What the interpreter knows of activations and weights: their axes, and what one pass over a graph finds out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from hf_align.symmetry.interpreter.linear_regions import LinearRegion
from hf_align.symmetry.interpreter.spaces import Axis, fresh
from hf_align.tracing.program import Program


@dataclass(frozen=True)
class Value:
    """An activation or a weight, seen through its axes.

    Attributes:
        parameter: the weight that it is, while it is nothing else than a view of one (plus `offset`).
        points_to: for integers, the axis whose entries they number.
    """

    axes: tuple[Axis, ...]
    parameter: str | None = None
    offset: float = 0.0
    points_to: Axis | None = None


@dataclass(frozen=True)
class Product:
    """An elementwise product whose use is not known yet: summed it is a contraction, else it ties its factors."""

    left: Value
    right: Value


@dataclass(frozen=True)
class Rows:
    """A value of which only runs along one axis are ever used: each run has spaces of its own."""

    pieces: tuple[Value, ...]
    dim: int

    def between(self, start: int, stop: int) -> list[Value]:
        """The pieces from one entry to another; none if these lie inside of pieces."""
        chosen, at = list[Value](), 0
        for piece in self.pieces:
            size = piece.axes[self.dim].size
            if start <= at and at + size <= stop:
                chosen.append(piece)
            at += size
        return chosen if sum(piece.axes[self.dim].size for piece in chosen) == stop - start else []


@dataclass(frozen=True)
class Gain:
    """target = diag(parameter + offset) · source: foldable into the readers of target where target is theirs alone.

    Attributes:
        through: the link by which the parameter is read, if it is one of `linked_gains`.
    """

    parameter: str
    weight: Axis
    source: Axis
    target: Axis
    node: fx.Node
    offset: float = 0.0
    through: fx.Node | None = None


@dataclass(frozen=True)
class Statistics:
    """The four stored vectors of a BatchNorm, by name, and its ε."""

    gain: str
    bias: str
    mean: str
    variance: str
    eps: float


@dataclass(frozen=True)
class LinearUse:
    """A weight that maps an activation linearly: output = input · weight (+ bias).

    Attributes:
        out_axis: of the output, that the bias lies along; of the input, that the weight reads, too.
    """

    node: fx.Node
    input: fx.Node
    weight: str
    in_axis: int
    bias: str | None
    out_axis: int = -1


@dataclass(frozen=True)
class Relation:
    """Permutations agree, and the scales multiply: scale(product) = scale(left) · scale(right), by atoms."""

    product: Axis
    left: Axis
    right: Axis


@dataclass(frozen=True)
class Lookup:
    """Entries of a value along one axis, chosen by numbers."""

    value: Value
    dim: int
    numbers: Value


@dataclass
class Interpretation:
    """What one pass over the graph found; `spec.py` turns it into a SymmetrySpec.

    Attributes:
        vanishing: of the products that were asked, what they give for a text for which some of it is zero.
    """

    program: Program
    values: dict[fx.Node, Any] = field(default_factory=dict)
    weights: dict[str, Value] = field(default_factory=dict)
    gains: list[Gain] = field(default_factory=list)
    linked_gains: list[Gain] = field(default_factory=list)
    relations: list[Relation] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)
    linear_uses: dict[fx.Node, LinearUse] = field(default_factory=dict)
    grouped_uses: dict[fx.Node, LinearUse] = field(default_factory=dict)
    unknown_ops: dict[str, str] = field(default_factory=dict)
    resolved: dict[int, Value] = field(default_factory=dict)
    inner: list[Value] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    regions: dict[fx.Node, LinearRegion] = field(default_factory=dict)
    vanishing: dict[fx.Node, Tensor | None] = field(default_factory=dict)

    @property
    def every_value(self) -> Iterable[Value]:
        """Of weights, of activations, and of what is left where entries meet."""
        yield from self.weights.values()
        for value in self.values.values():
            yield from values_of(value)
        yield from self.resolved.values()
        yield from self.inner

    def reading(self, user: fx.Node, value: fx.Node) -> LinearUse | None:
        """How an op maps a value linearly by a weight, if it does."""
        found = self.linear_uses.get(user)
        return found if found is not None and found.input is value else None

    def reading_by_matrix(self, user: fx.Node, value: fx.Node) -> LinearUse | None:
        """The same, if the weight is a matrix."""
        found = self.reading(user, value)
        return found if found is not None and len(self.weights[found.weight].axes) == 2 else None

    def withdraw(self, node: fx.Node, gains: int, statistics: int) -> None:
        """Forget what a rule found out before it gave up: all gains and statistics but the first so many, and what
        the node reads."""
        del self.gains[gains:], self.statistics[statistics:]
        self.linear_uses.pop(node, None)
        self.grouped_uses.pop(node, None)


def aligned(left: tuple[Axis, ...], right: tuple[Axis, ...]) -> list[tuple[Axis, Axis]]:
    """The axes of two operands as broadcasting pairs them."""
    rank = max(len(left), len(right))
    pad = [fresh(1)] * rank
    return list(zip([*pad[len(left) :], *left], [*pad[len(right) :], *right], strict=True))


def members(found: Any) -> Iterable[Any]:
    """The values that a node stands for: the results of an op that has several, the runs of one taken apart."""
    if isinstance(found, Rows):
        return found.pieces
    return found if isinstance(found, tuple) else (found,)


def values_of(found: Any) -> Iterable[Value]:
    """The same, and the factors of open products."""
    for part in members(found):
        if isinstance(part, Product):
            yield from (part.left, part.right)
        elif isinstance(part, Value):
            yield part
