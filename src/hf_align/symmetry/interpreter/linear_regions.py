"""Regions of the graph that apply one known matrix to one axis, such as rotary embedding in any of its spellings.

Slices, negations, concatenations and products with constants can permute, mix and rotate the coordinates of an axis
in ways that no single op shows. Between a value and the ops that all its paths come together in (its dominator in the
graph), such a region is one linear map with constant coefficients, so it is *evaluated* on a basis, position by
position, and its commutant is read off the matrices. Half-split, interleaved, partial and complex-valued rotary
embedding are the same thing here. What the matrices are at other positions than those of the trace says `positions`.
Coefficients that depend on weights alone (learned frequencies) are taken at random
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from hf_align.symmetry.interpreter.positions import Places, with_other_numbers
from hf_align.symmetry.interpreter.rotations import Rotations, reordering, reordering_of_planes
from hf_align.tracing.execute import run_node
from hf_align.tracing.layer_code import digest
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program

T = TypeVar("T")
_REACH = 6
"""Steps to look back from where a rotation surely starts."""
_LARGE = 2**20
"""Entries from which on a weight is no coefficient of a rotation."""


class _Known(Mapping[fx.Node, Any]):
    """What no input reaches: the constants of a program and, at random weights, what is made of weights alone."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._values: dict[fx.Node, Any] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._numbered: dict[Hashable, int] = {}
        self.of_weights: set[fx.Node] = set()
        for node in program.graph.nodes:
            value = node.meta.get("val")
            parts = value if isinstance(value, (list, tuple)) else (value,)
            small = all(isinstance(part, Tensor) and part.numel() <= _LARGE for part in parts)
            made = node.op == "call_function" and all(a in self for a in node.all_input_nodes)
            if small and node not in program.constants and (made or node in program.parameters):
                self.of_weights.add(node)

    def __contains__(self, node: object) -> bool:
        return node in self.program.constants or node in self.of_weights

    def __getitem__(self, node: fx.Node) -> Any:
        if node in self.program.constants:
            return self.program.constants[node]
        if node not in self._values:
            if node in self.program.parameters:
                rng = torch.Generator().manual_seed(len(self._values))
                self._values[node] = torch.randn(node.meta["val"].shape, generator=rng, dtype=torch.float64)
            else:
                self._values[node] = run_node(node, self.__getitem__)
        return self._values[node]

    def number(self, node: fx.Node) -> int:
        """The same for constants of one value that are made alike, and for no others."""
        if node not in self._numbers:
            constant = node in self.program.constants
            key = (digest(self.program.constants[node]), *_written(node, self.number)) if constant else node
            self._numbers[node] = self._numbered.setdefault(key, len(self._numbered))
        return self._numbers[node]

    def __iter__(self) -> Iterator[fx.Node]:
        return (n for n in self.program.graph.nodes if n in self)

    def __len__(self) -> int:
        return len(self.program.constants) + len(self.of_weights)


@dataclass(frozen=True)
class LinearRegion:
    """A constant linear map from `base` to `output` along their last axis; `inner` are the nodes it replaces.

    `order` says which coordinate of the base each entry of the output shows, if they are shown in another order;
    `uneven` are the axes along which the map is not the same everywhere: positions, or heads of which some turn;
    `coefficients` are the values made of weights alone that take part.
    """

    base: fx.Node
    output: fx.Node
    inner: frozenset[fx.Node]
    rotations: Rotations
    order: tuple[int, ...] = ()
    uneven: tuple[int, ...] = ()
    coefficients: frozenset[fx.Node] = frozenset()


Found = tuple[Rotations, tuple[int, ...], tuple[int, ...]]
"""What a region does to the last axis, the order in which it leaves the coordinates, and the axes along which it does
so unevenly."""
Region = tuple[list[fx.Node], fx.Node, fx.Node]
"""Nodes, the base that they start from, and the output, which is the last of them."""


def find_rotations(program: Program) -> dict[fx.Node, LinearRegion]:
    """Every maximal region that is a rotation of the last axis of its base, by output node."""
    known = _Known(program)
    parent = _dominators(program, known)
    mixing = [n for n in program.graph.nodes if n in parent and _joins_coordinates(n, known)]
    regions: dict[fx.Node, LinearRegion] = {}
    replaced: set[fx.Node] = set()
    rotations, passes_by = _remembered(_rotations, known), _remembered(_passes_by, known)
    widest = cache(lambda node: _widest(_regions(node, parent, known), known, rotations))

    def has_turning_part(inner: Collection[fx.Node]) -> bool:
        return any((r := widest(n)) is not None and not r.rotations.still for n in mixing if n in inner)

    for node in reversed(mixing):
        if node in replaced:
            continue
        if all(passes_by(*region) and has_turning_part(region[0][:-1]) for region in _regions(node, parent, known)):
            continue  # as below, and all positions need not be looked at
        region = widest(node)
        if region is not None and not (region.rotations.still and has_turning_part(region.inner)):
            regions[node] = region
            replaced |= region.inner
    return regions


def _joins_coordinates(node: fx.Node, known: _Known) -> bool:
    """Whether a region may end here: several values meet, or the coordinates of pairs that were stacked, or of complex
    numbers, are laid out one behind the other again."""
    operands = _operands(node, known)
    stacked = does(node, Trait.RESHAPES) and does(operands[0], Trait.STACKS)
    return len(operands) > 1 or stacked or does(operands[0], Trait.AS_PAIRS)


def _regions(output: fx.Node, parent: Mapping[fx.Node, fx.Node], known: _Known) -> Iterator[Region]:
    """All that end here and may turn what they start from, those that start farther up behind the others."""
    base = output
    for _ in range(_REACH):
        if base not in parent:
            return
        base = parent[base]
        if _may_turn(base.meta["val"], output.meta["val"]):
            yield _between(base, output, known), base, output


def _may_turn(value: Any, result: Any) -> bool:
    """Whether a value has the shape of what it is turned into, and there is something to turn."""
    if not isinstance(value, Tensor) or not value.is_floating_point():  # the pieces of a split
        return False
    return value.shape == result.shape and len(value.shape) > 1 and value.shape[-1] > 1 and bool(value.numel())


def _widest(regions: Iterable[Region], known: _Known, rotations: Callable[..., Found | None]) -> LinearRegion | None:
    """The rotation that starts farthest up: coordinates may be reordered before they are rotated."""
    widest = None
    for nodes, base, output in regions:
        if (found := rotations(nodes, base, output)) is not None:
            made = frozenset(a for n in nodes for a in n.all_input_nodes if a in known.of_weights)
            widest = LinearRegion(base, output, frozenset(nodes) - {output}, *found, made)
    return widest


def _operands(node: fx.Node, known: _Known) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if a not in known]


def _dominators(program: Program, known: _Known) -> dict[fx.Node, fx.Node]:
    """For each linear op with constant coefficients, the nearest single value that it is a function of."""
    parent: dict[fx.Node, fx.Node] = {}
    depth: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        operands = _operands(node, known)
        depth[node] = 0
        if not does(node, Trait.LINEAR) or not operands:
            continue
        if does(node, Trait.MULTIPLIES | Trait.DIVIDES) and len(operands) > 1:
            continue
        meeting: fx.Node | None = operands[0]
        for other in operands[1:]:
            meeting = _meet(meeting, other, parent, depth)
        if meeting is not None:
            parent[node], depth[node] = meeting, depth[meeting] + 1
    return parent


def _meet(
    a: fx.Node | None, b: fx.Node | None, parent: Mapping[fx.Node, fx.Node], depth: Mapping[fx.Node, int]
) -> fx.Node | None:
    while a is not b:
        if a is None or b is None:
            return None
        if depth[a] >= depth[b]:
            a = parent.get(a)
        else:
            b = parent.get(b)
    return a


def _remembered(look: Callable[..., T], known: _Known) -> Callable[..., T]:
    """As `look`; layers, queries and keys, and calls of one length turn alike, and are looked at once."""
    found: dict[Hashable, T] = {}

    def looked(nodes: list[fx.Node], base: fx.Node, output: fx.Node) -> T:
        places = {base: "base"} | {node: f"op {i}" for i, node in enumerate(nodes)}
        ops = [_written(node, lambda n: places.get(n) or known.number(n)) for node in nodes]
        value = base.meta["val"]
        key = *ops, str(value.dtype), tuple(value.shape)
        if key not in found:
            found[key] = look(nodes, base, output, known)
        return found[key]

    return looked


def _written(node: fx.Node, name: Callable[[fx.Node], Any]) -> tuple[str, str]:
    """An op and its arguments, those that are values under other names."""
    return str(node.target) if node.op == "call_function" else "", repr(fx.node.map_arg((node.args, node.kwargs), name))


def _rotations(nodes: list[fx.Node], base: fx.Node, output: fx.Node, known: _Known) -> Found | None:
    """The rotations that a region applies to the last axis of its base, in which order it leaves the coordinates, and
    along which axes unevenly; verified on random input."""
    shape = base.meta["val"].shape
    alike = _alike_axes(lambda value: _run(nodes, base, output, value, known), shape)
    places = Places(lambda values: _maps(lambda value: _run(nodes, base, output, value, values), shape, alike), known,
                    _coefficients(nodes, known))  # fmt: skip
    if (read := _read_off(places)) is None:
        return None
    return *read, tuple(i for i in range(len(shape) - 1) if i not in alike)


def _passes_by(nodes: list[fx.Node], base: fx.Node, output: fx.Node, known: _Known) -> bool:
    """Whether some coordinates come out as they went in, and would with any coefficients."""
    value = torch.randn(base.meta["val"].shape, generator=torch.Generator().manual_seed(0)).double()
    others = with_other_numbers(known, _coefficients(nodes, known))
    kept = [_run(nodes, base, output, value, numbers) == value for numbers in (known, others)]
    return bool((kept[0] & kept[1]).flatten(0, -2).all(0).any())


def _coefficients(nodes: list[fx.Node], known: _Known) -> set[fx.Node]:
    return {a for n in nodes for a in n.all_input_nodes if a in known}


def _read_off(places: Places) -> tuple[Rotations, tuple[int, ...]] | None:
    """The rotations of all places, and the order of the coordinates behind them."""
    maps = places.maps(places.known)
    if maps is None:
        return None
    size = maps.shape[-1]
    distinct = torch.unique(maps.reshape(-1, size, size), dim=0)
    order = reordering(distinct) or reordering_of_planes(distinct[0]) or tuple(range(size))
    unchanged = torch.eye(size, dtype=torch.float64)
    back = unchanged[:, list(order)]
    here = back @ distinct
    here = here[(here - unchanged).abs().amax((-1, -2)).argsort()]
    if Rotations.from_maps(here) is None:
        return None
    far = [back @ turned for turned in places.far()]
    plain = len(distinct) == 1 and reordering(distinct.abs()) is not None  # signs and places, as at the origin of one
    if plain and all(torch.equal(turned, here.expand_as(turned)) for turned in far):
        return None
    everywhere = torch.cat([here, *far])
    rotations = Rotations.from_maps(everywhere, _in_doubt(everywhere, back, places))
    if rotations is None:
        return None
    return rotations, () if order == tuple(range(size)) else order


def _in_doubt(maps: Tensor, back: Tensor, places: Places) -> Tensor:
    """[n, n] bool: what a table couples with coordinates that stand still at all places, but perhaps not at others.

    They stand still everywhere if no table reaches them, or if their frequency is zero: with any other they would turn.
    """
    size = maps.shape[-1]
    unchanged = torch.eye(size, dtype=torch.float64)
    still = (maps / maps[0].diagonal()[:, None] == unchanged).all(0).all(-1)
    if not still.any():
        return torch.zeros(size, size, dtype=torch.bool)
    other, turned = places.with_other_coefficients(), places.with_other_frequencies()
    if other is None:
        return still[:, None] & still
    reached = (back @ other != maps[:1]).any(0)
    doubt = still & reached.any(-1)
    if turned is not None:
        doubt &= ~(back @ turned != maps[:1]).any(0).any(-1)
    return (back @ other != 0).any(0) & doubt[:, None]


def _maps(function: Callable[[Tensor], Tensor], shape: torch.Size, alike: list[int]) -> Tensor | None:
    """[*rest, n, n], the linear maps of the last axis by all the others along which they differ; None if it is no such
    function.

    Heads and contexts turn alike, so each of them shows another column in one run.

    Args:
        alike: the axes along which they did not differ where the function was looked at before.
    """
    rest = [i for i in range(len(shape) - 1) if i not in alike]
    order = [*alike, *rest, len(shape) - 1]
    there, back = [shape[i] for i in order], torch.tensor(order).argsort().tolist()
    copies, size = math.prod(shape[i] for i in alike), shape[-1]

    def run(values: Tensor) -> Tensor:
        """From [copies, *rest, n] to [copies, *rest, n]."""
        return function(values.reshape(there).permute(back)).permute(order).reshape(values.shape)

    rng = torch.Generator().manual_seed(0)
    columns = []
    for units in torch.eye(size, dtype=torch.float64).split(copies):
        values = torch.zeros(copies, *(shape[i] for i in rest), size, dtype=torch.float64)
        values[: len(units)] = units.reshape(len(units), *[1] * len(rest), size)
        columns.append(run(values)[: len(units)])
    maps = torch.cat(columns).movedim(0, -1)
    probe = torch.randn(copies, *maps.shape[:-1], generator=rng).double()
    mixed = torch.randn(1, copies, generator=rng).double()  # tells copies apart as well as each alone would
    before, after = ((mixed @ values.reshape(copies, -1)).reshape(maps.shape[:-1]) for values in (probe, run(probe)))
    mapped = (maps @ before[..., None])[..., 0]
    if torch.allclose(mapped, after, rtol=1e-6, atol=1e-7):
        return maps
    others = _alike_axes(function, shape)
    return None if others == alike else _maps(function, shape, others)


def _alike_axes(function: Callable[[Tensor], Tensor], shape: torch.Size) -> list[int]:
    """The axes, but for the last, along which a function acts everywhere alike."""
    rng = torch.Generator().manual_seed(0)
    return [i for i in range(len(shape) - 1) if _acts_alike(function, shape, i, rng)]


def _acts_alike(function: Callable[[Tensor], Tensor], shape: torch.Size, axis: int, rng: torch.Generator) -> bool:
    """Whether a function of values that are the same along an axis is so, too."""
    probe = torch.randn([1 if i == axis else n for i, n in enumerate(shape)], generator=rng).double()
    result = function(probe.expand(shape).contiguous())
    return torch.equal(result, result.narrow(axis, 0, 1).expand_as(result))


def _between(base: fx.Node, output: fx.Node, known: _Known) -> list[fx.Node]:
    needed, stack = set(), [output]
    while stack:
        node = stack.pop()
        if node is base or node in needed or node in known:
            continue
        needed.add(node)
        stack.extend(node.all_input_nodes)
    return sorted(needed)


def _run(nodes: list[fx.Node], base: fx.Node, output: fx.Node, value: Tensor, known: Mapping[fx.Node, Any]) -> Tensor:
    values: dict[fx.Node, Any] = {base: value}
    for node in nodes:
        values[node] = run_node(node, lambda n: values[n] if n in values else known[n])
    result = values[output]
    assert isinstance(result, Tensor)
    return result.double()
