"""The symmetry spec: all spaces, their groups, and how each parameter axis is moved by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from hf_align.symmetry.elements import PRIMAL, Power
from hf_align.symmetry.gauges.canonical import Gauge
from hf_align.symmetry.groups import Group
from hf_align.tracing.given import GivenCall
from hf_align.tracing.program import Evidence


@dataclass(frozen=True)
class Factor:
    """One factor of a segment: the space that moves it and by which power (one for each of its scales);
    pinned if None.

    Attributes:
        within: (start, extent) where this and the factors behind it are only a part of what is left of the axis.
        pin: where nothing moves it, the entry of the spec's `pinned` that says why.
        beside: other spaces that move it too, and by which powers; their elements commute with those of the first.
    """

    size: int
    space: str | None = None
    power: Power = PRIMAL
    within: tuple[int, int] | None = None
    pin: str | None = None
    beside: tuple[tuple[str, Power], ...] = ()

    def is_moved_by(self, space: str) -> bool:
        """Whether a space moves it."""
        return self.space == space or any(space == other for other, _ in self.beside)

    @property
    def powers(self) -> dict[str, Power]:
        """The power by which each space moves it."""
        own = () if self.space is None else ((self.space, self.power),)
        return dict((*self.beside, *own))


Segment = tuple[Factor, ...]
AxisActions = tuple[Segment, ...]
"""A sum (in order) of products (row-major) of factors."""


def extent(segment: Segment) -> int:
    """How many entries of an axis a segment is laid out over: more than it has where it is only a part."""
    size = 1
    for factor in reversed(segment):
        size = factor.within[1] if factor.within is not None else factor.size * size
    return size


def size_of(axis: AxisActions) -> int:
    """How many entries an axis has."""
    return sum(math.prod(f.size for f in segment) for segment in axis)


@dataclass(frozen=True)
class Move:
    """How a space moves an axis of a block.

    Attributes:
        axis: of the factored view.
        index: the axes over which the element of the space varies there, in the order of its index.
    """

    space: str
    axis: int
    index: tuple[int, ...]
    power: Power


@dataclass(frozen=True)
class Block:
    """A part of a tensor, regularly spaced, in which every axis is one product of factors.

    Attributes:
        spaces: those of its spec.
    """

    segments: tuple[Segment, ...]
    spaces: Mapping[str, SpaceSpec] = field(repr=False, compare=False)

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all axes in order; their sizes are the shape of the factored view."""
        return tuple(f for s in self.segments for f in s)

    def factored(self, tensor: Tensor) -> Tensor:
        """The block of a tensor with one axis for each factor: a view."""
        at = 0
        for segment in self.segments:
            for i, factor in enumerate(segment):
                behind = extent(segment[i + 1 :])
                if factor.within is not None:
                    tensor = tensor.narrow(at, factor.within[0], factor.size * behind)
                tensor = tensor.unflatten(at, (factor.size, behind))
                at += 1
            tensor = tensor.squeeze(at)
        return tensor

    def occurrences(self, space: str) -> Iterator[int]:
        """The axes of the factored view that a space moves."""
        return (i for i, f in enumerate(self.factors) if f.is_moved_by(space))

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All that may move it. Outer spaces come first: an inner element belongs to the new position of its head."""
        return tuple(
            Move(space, axis, self.index_axes(axis, space), self.factors[axis].powers[space])
            for space in self.spaces
            for axis in self.occurrences(space)
        )

    def index_axes(self, axis: int, space: str) -> tuple[int, ...]:
        """The axes of the factored view over which the element of `space` at `axis` varies, in the order of its index.

        Where an outer space occurs twice, the one beside the inner is meant: each head's values are read with the
        element of that head, whatever other heads the weight writes to.
        """
        of_tensor = [i for i, segment in enumerate(self.segments) for _ in segment]
        chosen = []
        for outer in self.spaces[space].index:
            places = list(self.occurrences(outer))
            chosen.append(next((i for i in places if of_tensor[i] == of_tensor[axis]), places[0]))
        return tuple(chosen)


@dataclass(frozen=True)
class SpaceSpec:
    """A space: its group, the spaces over which its element may differ, and what bounds it.

    Attributes:
        allowed: the group that the architecture allows, where a smaller one was chosen.
    """

    name: str
    size: int
    group: Group | None
    index: tuple[str, ...]
    reasons: tuple[Evidence, ...]
    allowed: Group | None = None

    @property
    def group_name(self) -> str:
        """Of its group, or what is said of a space that does not move."""
        return self.group.name if self.group else "Identity"


@dataclass(frozen=True)
class SymmetrySpec:
    """Everything that a trace says about an architecture.

    Attributes:
        spaces: by name; outer index spaces come before the spaces they index.
        parameters: name in memory -> the actions on its axes.
        gauges: the moves of canonicalisation, in order.
        gains: parameters that multiply an activation entry by entry -> what the architecture adds to them first.
        ties: other names of tied weights -> the name in `parameters`.
        buffers: saved tensors that are no parameters; copied.
        unknown_ops: op -> line of the modelling code; everything that it touches is pinned.
        pinned: spaces that nothing moves, for the reasons.
        positive: parameters whose root or logarithm is taken.
        modes: the calls that it is the meet of, by name.
        unread: parameters that none of them reads, so that they stand still.
        untried: lines of the model's own code that none of them could send another way, and other arguments may.
        given: those of the calls that an override has added.
    """

    model_type: str
    spaces: Mapping[str, SpaceSpec]
    parameters: Mapping[str, tuple[AxisActions, ...]]
    gauges: tuple[Gauge, ...]
    gains: Mapping[str, float]
    ties: Mapping[str, str]
    buffers: tuple[str, ...]
    unknown_ops: Mapping[str, str]
    pinned: Mapping[str, SpaceSpec] = field(default_factory=dict)
    positive: frozenset[str] = frozenset()
    modes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    given: tuple[GivenCall, ...] = ()

    def shape(self, parameter: str) -> tuple[int, ...]:
        """The shape of a parameter, [axes]."""
        return tuple(map(size_of, self.parameters[parameter]))

    def index_shape(self, space: str) -> tuple[int, ...]:
        """The leading shape of the element of a space."""
        return tuple(self.spaces[i].size for i in self.spaces[space].index)

    def indexed_by(self, space: str) -> tuple[str, ...]:
        """The spaces whose element may differ along this one."""
        return tuple(s.name for s in self.spaces.values() if space in s.index)

    def factors(self) -> Iterator[Factor]:
        """Those of all axes of all parameters."""
        return (f for axes in self.parameters.values() for axis in axes for segment in axis for f in segment)

    def uses(self, space: str) -> tuple[str, ...]:
        """The parameters that carry a space."""
        return self._users.get(space, ())

    def carried(self, name: str) -> list[str]:
        """The spaces that a parameter carries, as often as it does."""
        return [s for axis in self.parameters[name] for segment in axis for f in segment for s in f.powers]

    @cached_property
    def _users(self) -> dict[str, tuple[str, ...]]:
        """What carries each space: sweeps of matching ask for it over and over."""
        found: dict[str, dict[str, None]] = {}
        for name in self.parameters:
            for space in self.carried(name):
                found.setdefault(space, {})[name] = None
        return {space: tuple(names) for space, names in found.items()}

    def blocks(self, parameter: str) -> tuple[Block, ...]:
        """The blocks of a parameter: the grid of the segments of its axes."""
        if parameter not in self._blocks:
            grid = itertools.product(*self.parameters[parameter])
            self._blocks[parameter] = tuple(Block(segments, self.spaces) for segments in grid)
        return self._blocks[parameter]

    @cached_property
    def _blocks(self) -> dict[str, tuple[Block, ...]]:
        """Those that were asked for: sweeps of matching ask for them over and over."""
        return {}

    def group(self, space: str) -> Group:
        """The group of a space that moves."""
        group = self.spaces[space].group
        assert group is not None
        return group

    def dimensions(self) -> int:
        """Continuous dimensions of all groups together: what untying a head may enlarge."""
        moving = [s for s in self.spaces.values() if s.group is not None]
        return sum(s.group.dimension * math.prod(self.index_shape(s.name)) for s in moving if s.group is not None)

    def as_json(self) -> dict[str, object]:
        """The spec as plain data, for `hf-align spec`.

        Axes read as sums of products of `size:space^power`; a bare size is pinned.
        """
        return {
            "model_type": self.model_type,
            "modes": list(self.modes),
            "unread": list(self.unread),
            "untried": list(self.untried),
            "spaces": {n: _describe(s) for n, s in self.spaces.items()},
            "parameters": {n: [format_axis(a) for a in axes] for n, axes in self.parameters.items()},
            "gauges": [gauge.summary for gauge in self.gauges],
            "ties": dict(self.ties),
            "unknown_ops": dict(self.unknown_ops),
        }


def _describe(space: SpaceSpec) -> dict[str, object]:
    why = dict.fromkeys(f"{e.role}: {e.op}" + (f" at {e.line} in {e.module or 'the model'}" if e.line else "")
                        for e in space.reasons)  # fmt: skip
    return {
        "size": space.size,
        "group": space.group_name,
        "differs_over": list(space.index),
        "because": list(why)[:4],
    }


def format_axis(axis: AxisActions) -> str:
    """`4:heads^1 * 32:value^1 + …`."""

    def factor(f: Factor) -> str:
        moves = (f"{space}^{p[0] if len(p) == 1 else p}" for space, p in reversed(f.powers.items()))
        return str(f.size) if f.space is None else f"{f.size}:{' '.join(moves)}"

    return " + ".join(" * ".join(factor(f) for f in segment) for segment in axis)
