"""The abstract interpreter: reads operands, looks up the rule of the op, writes the result.

A value is the tuple of its axes. Rules say what their op demands of them: unify, lower, split; everything that may
differ between architectures is in the rules (`rules/`), and nothing here or there knows a class or a module by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import SymFloat, Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hf_align.errors import IncompatibleModels
from hf_align.symmetry.bounds import FIXED, FREE, ONES, PERMUTATION, Bound, Scalars, monomial
from hf_align.symmetry.linear_regions import LinearRegion, find_rotations
from hf_align.symmetry.spaces import (
    Axis,
    Kind,
    SpaceMismatchError,
    bind,  # fmt: skip
    cut,
    direct_sum,
    fresh,
    lower,
    pair_atoms,
    product,
    require_same_order,
    unify,
)
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.ops import NO_TRAITS, Factors, Trait, describe, does, op_name
from hf_align.tracing.program import Evidence, Program, evidence
from hf_align.tracing.reasons import NEEDS_NUMBERS


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
        """The pieces from one entry to another."""
        chosen, at = [], 0
        for piece in self.pieces:
            size = piece.axes[self.dim].size
            if start <= at and at + size <= stop:
                chosen.append(piece)
            at += size
        return chosen


@dataclass(frozen=True)
class Gain:
    """target = diag(parameter + offset) · source: foldable into the readers of target where target is theirs alone."""

    parameter: str
    weight: Axis
    source: Axis
    target: Axis
    node: fx.Node
    offset: float = 0.0


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
        out_axis: of the output, that the bias lies along.
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


@dataclass
class Interpretation:
    """What one pass over the graph found; `spec.py` turns it into a SymmetrySpec."""

    program: Program
    values: dict[fx.Node, Any] = field(default_factory=dict)
    weights: dict[str, Value] = field(default_factory=dict)
    gains: list[Gain] = field(default_factory=list)
    relations: list[Relation] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)
    linear_uses: dict[fx.Node, LinearUse] = field(default_factory=dict)
    grouped_uses: dict[fx.Node, LinearUse] = field(default_factory=dict)
    unknown_ops: dict[str, str] = field(default_factory=dict)
    resolved: dict[int, Value] = field(default_factory=dict)
    inner: list[Value] = field(default_factory=list)

    def withdraw(self, node: fx.Node, gains: int, statistics: int) -> None:
        """Forget what a rule found out before it gave up: all gains and statistics but the first so many, and what
        the node reads."""
        del self.gains[gains:], self.statistics[statistics:]
        self.linear_uses.pop(node, None)
        self.grouped_uses.pop(node, None)


class Call:
    """One node under interpretation: what a rule sees."""

    def __init__(self, node: fx.Node, found: Interpretation) -> None:
        self.node = node
        self.found = found
        self._arguments = Arguments(node)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node.meta["val"].shape)

    def argument(self, which: int | str, default: Any = None) -> Any:
        """A literal or node argument, by place or by its name in the op's schema; `default` if the op has none such.

        A rule asks only for what it knows how to read: of what it has not asked for, see `_step`.
        """
        return self._arguments.ask(which, default)

    def expect(self, name: str, value: object) -> None:
        """Know what an argument does, if it is this value and no other."""
        if self._arguments.given.get(name) == value:
            self.argument(name)

    def operands(self) -> list[fx.Node]:
        """All values that the op reads, whatever they are to it."""
        self._arguments.ask_for_all_with(self.node.all_input_nodes)
        return self.node.all_input_nodes

    def unseen(self) -> list[str]:
        """The arguments that differ from the op's defaults, and that its rule knows nothing of."""
        return self._arguments.unseen(_HARMLESS.get(op_name(self.node), frozenset()))

    def constant(self, argument: Any) -> Any:
        """The value of an argument that depends on neither inputs nor weights, else None."""
        if isinstance(argument, fx.Node):
            return self.found.program.constants.get(argument)
        return argument

    def value(self, argument: Any) -> Value:
        """The axes of a tensor argument; the axes of a constant tensor are pinned, but of zeros: any g leaves them."""
        found = self.raw(argument)
        if isinstance(found, Product):
            return self.resolve(found)
        if isinstance(found, Rows):
            return self.joined(found.pieces, found.dim)
        if isinstance(found, Value) and found.offset:
            self.lower_all(found.axes, ONES, "constant added")
            return replace(found, parameter=None, offset=0.0)
        return found

    def joined(self, pieces: Sequence[Value], dim: int) -> Value:
        """Values one behind the other along an axis, all others shared."""
        first = pieces[0].axes
        for other in pieces[1:]:
            for i, (x, y) in enumerate(zip(first, other.axes, strict=True)):
                if i != dim and x.size > 1:
                    self.unify(x, y, "cat")
        return Value((*first[:dim], direct_sum([p.axes[dim] for p in pieces]), *first[dim + 1 :]),
                     points_to=pieces[0].points_to)  # fmt: skip

    def raw(self, argument: fx.Node) -> Any:
        """As `value`, but an elementwise product may still be open."""
        if argument in self.found.values:
            return self.found.values[argument]
        tensor = self.found.program.constants[argument]
        nothing = tensor.is_floating_point() and not tensor.any()
        return Value(tuple(fresh(n, FREE if nothing else FIXED) for n in tensor.shape))

    def unify(self, a: Axis, b: Axis, role: str) -> None:
        unify(a, b, evidence(self.node, role))

    def lower(self, axis: Axis, bound: Bound, role: str) -> None:
        lower(axis, bound, evidence(self.node, role))

    def lower_all(self, axes: Iterable[Axis], bound: Bound, role: str) -> None:
        for axis in axes:
            self.lower(axis, bound, role)

    def note(self, axis: Axis, role: str) -> None:
        """Remember what an axis is for without bounding it."""
        for atom in axis.atoms:
            atom.space.evidence.append(evidence(self.node, role))

    def mixes(self, value: Value, dims: Iterable[int]) -> None:
        """Entries along some axes meet in one number, such as a length: no other element may differ over those axes."""
        mixed = {i % len(value.axes) for i in dims}
        self.found.inner.append(Value(tuple(a for i, a in enumerate(value.axes) if i not in mixed)))

    def reads(self, source: fx.Node, weight: str, in_axis: int, bias: str | None, out_axis: int = -1, *,
              groups: int = 1) -> None:  # fmt: skip
        """This node maps `source` linearly by a weight; each group of outputs reads a group of inputs."""
        uses = self.found.linear_uses if groups == 1 else self.found.grouped_uses
        uses[self.node] = LinearUse(self.node, source, weight, in_axis, bias, out_axis)

    def resolve(self, pending: Product) -> Value:
        """Decide that a product is used elementwise: both factors and the product share one permutation."""
        if id(pending) not in self.found.resolved:
            axes = aligned(pending.left.axes, pending.right.axes)
            self.found.resolved[id(pending)] = Value(tuple(
                y if x.size == 1 else x if y.size == 1 else self.tie(x, y) for x, y in axes))  # fmt: skip
        return self.found.resolved[id(pending)]

    def tie(self, left: Axis, right: Axis) -> Axis:
        """The axis of an elementwise product: monomial, one permutation, scales multiply."""
        return tie(left, right, self.found, self.node)


def tie(left: Axis, right: Axis, found: Interpretation, node: fx.Node) -> Axis:
    """See `Call.tie`; of sums, segment by segment."""
    require_same_order(left, right)
    sizes = _common_segments(left, right)
    if len(sizes) > 1:
        return direct_sum(tie(x, y, found, node) for x, y in zip(cut(left, sizes), cut(right, sizes), strict=True))
    _correspond(left, right)
    atoms: list[tuple[Axis, Axis]] = []
    pair_atoms(left, right, lambda x, y: atoms.append((x, y)))
    by_left: dict[int, Axis] = {}
    why = evidence(node, "elementwise")
    for x, y in atoms:
        lower(x, monomial(Scalars.NONZERO), why)
        lower(y, monomial(Scalars.NONZERO), why)
        pinned = x.root.space.bound.fixed and y.root.space.bound.fixed
        result = fresh(x.size, FIXED if pinned else monomial(Scalars.NONZERO))
        result.space.evidence.append(why)
        found.relations.append(Relation(result, x, y))
        unify(result, by_left.setdefault(x.root.space.serial, result))
    return _rebuild(left, by_left)


def _common_segments(left: Axis, right: Axis) -> list[int]:
    """The sizes of the segments of two axes, cut where either is."""
    ends = {end for axis in (left, right) for end in itertools.accumulate(s.size for s in axis.segments)}
    return [b - a for a, b in itertools.pairwise(sorted(ends | {0}))]


def refine(relations: list[Relation]) -> None:
    """Give the three axes of every relation one structure, so that their atoms correspond; later unifications may
    have refined one of them. What cannot correspond any more stands still, and its relation is gone."""
    before = None
    while before != (before := [len(x.atoms) for r in relations for x in (r.product, r.left, r.right)]):
        for relation in list(relations):
            axes = relation.product, relation.left, relation.right
            try:
                for x, y in itertools.combinations(axes, 2):
                    _correspond(x, y)
            except SpaceMismatchError as mismatch:
                relations.remove(relation)
                for axis in axes:
                    lower(axis, FIXED, Evidence(str(mismatch), "", "", ""))


def _correspond(left: Axis, right: Axis) -> None:
    """Refine two axes until their atoms correspond: an atom that occurs twice may be cut where it occurs again."""
    while True:
        before = len(left.atoms), len(right.atoms)
        pair_atoms(left, right, _mould)
        if before == (len(left.atoms), len(right.atoms)):
            return


def _mould(left: Axis, right: Axis) -> None:
    """Give an atom the structure of the compound axis that it meets, with parts of its own."""
    left, right = left.root, right.root
    kinds = (left.space.kind, right.space.kind)
    if Kind.ATOM in kinds and kinds != (Kind.ATOM, Kind.ATOM):
        atom, compound = (left, right) if kinds[0] is Kind.ATOM else (right, left)
        if compound.space.kind is Kind.SUM:  # one space may fill several segments, but need not in the atom
            parts = [fresh(s.size) for s in compound.segments]
            bind(atom, direct_sum(parts))
            for part, segment in zip(parts, compound.segments, strict=True):
                _mould(part, segment)
        else:
            bind(atom, _rebuild(compound, {a.root.space.serial: fresh(a.size) for a in compound.atoms}))


def _rebuild(axis: Axis, replacement: dict[int, Axis]) -> Axis:
    """The same structure with other atoms."""
    axis = axis.root
    if axis.space.kind is Kind.ATOM:
        return replacement[axis.space.serial]
    if axis.space.kind is Kind.PRODUCT:
        return product([_rebuild(f, replacement) for f in axis.factors])
    return direct_sum([_rebuild(s, replacement) for s in axis.segments])


def aligned(left: tuple[Axis, ...], right: tuple[Axis, ...]) -> list[tuple[Axis, Axis]]:
    """The axes of two operands as broadcasting pairs them."""
    rank = max(len(left), len(right))
    pad = [fresh(1)] * rank
    return list(zip([*pad[len(left) :], *left], [*pad[len(right) :], *right], strict=True))


Rule = Callable[[Call], Any]
RULES: dict[str, Rule] = {}


_HARMLESS: dict[str, frozenset[str]] = {}


def rule(
    *ops: str, harmless: str = "", traits: Trait = NO_TRAITS, factors: Factors | None = None
) -> Callable[[Rule], Rule]:
    """Register a rule for aten ops by name, all overloads, and what else is known of them.

    Args:
        harmless: names of arguments by which a rule holds whatever they are, or which the shape of the result tells.
        traits, factors: as `describe` takes them.
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            if op in RULES:
                raise ValueError(f"two rules for {op}")
            RULES[op] = function
            _HARMLESS[op] = frozenset(harmless.split())
        describe(*ops, traits=traits, factors=factors)
        return function

    return register


def rule_for_numbers(*ops: str, harmless: str = "", traits: Trait = NO_TRAITS) -> Callable[[Rule], Rule]:
    """As `rule`, for ops that move entries or look them up: a number that points to an axis may go through.

    Any other op sees which number it is, and so pins the order of that axis.
    """
    return rule(*ops, harmless=harmless, traits=traits | Trait.PASSES_NUMBERS)


def interpret(program: Program) -> Interpretation:
    """Run the rules over the graph.

    Ops without a rule pin every axis they touch and are named in `unknown_ops`.
    """
    found = Interpretation(program)
    for name, shape in program.shapes.items():
        found.weights[name] = Value(tuple(fresh(n) for n in shape), name)
    read = set(program.parameters.values())
    for name in found.weights.keys() - read:
        for axis in found.weights[name].axes:
            lower(axis, FIXED, Evidence("unread", "no traced call reads it", name.rpartition(".")[0], ""))
    found.values.update({node: found.weights[name] for node, name in program.parameters.items()})
    for node in program.inputs:
        found.values[node] = Value(tuple(fresh(n, FIXED) for n in node.meta["val"].shape))
    regions = find_rotations(program)
    replaced = frozenset[fx.Node]().union(*(r.inner for r in regions.values()))
    for node in program.graph.nodes:
        if node.op == "call_function" and node not in program.constants and node not in replaced:
            if isinstance(node.meta.get("val"), SymFloat):  # taken out of a tensor
                raise IncompatibleModels(f"{evidence(node, '').line or op_name(node)} {NEEDS_NUMBERS}")
            try:
                found.values[node] = _rotate(regions[node], found) if node in regions else _step(node, found)
            except GuardOnDataDependentSymNode as error:
                raise IncompatibleModels(f"{evidence(node, '').line or op_name(node)} {NEEDS_NUMBERS}") from error
    _pin_outputs(found)
    return found


def _step(node: fx.Node, found: Interpretation) -> Any:
    result = node.meta.get("val")
    if isinstance(result, Tensor) and not result.numel():  # what has no entries shows nothing of what it is made of
        return Value(tuple(fresh(n) for n in result.shape))
    call = Call(node, found)
    apply = RULES.get(op_name(node))
    if not does(node, Trait.PASSES_NUMBERS):
        _pin_what_numbers_point_to(call)
    resolved = _is_resolved(call)
    if apply is None:
        return _unknown(call, op_name(node), resolved)
    before = len(found.gains), len(found.statistics)
    try:
        result = apply(call)
        unseen = call.unseen()
        if not unseen:
            return result
    except SpaceMismatchError as mismatch:
        found.withdraw(node, *before)
        return _pin(call, str(mismatch))
    found.withdraw(node, *before)
    return _unknown(call, f"{op_name(node)} with {' and '.join(unseen)}", resolved)


def _unknown(call: Call, name: str, resolved: bool) -> Any:
    """Pin what an op touches, and say so unless all of it was pinned before."""
    if not resolved:
        call.found.unknown_ops.setdefault(name, evidence(call.node, "").line)
    return _pin(call, "unknown op")


def members(found: Any) -> Iterable[Any]:
    """The values that a node stands for: the results of an op that has several, the runs of one taken apart."""
    if isinstance(found, Rows):
        return found.pieces
    return found if isinstance(found, tuple) else (found,)


def _pin_what_numbers_point_to(call: Call) -> None:
    for operand in call.node.all_input_nodes:
        found = call.found.values.get(operand)
        if isinstance(found, Value) and found.points_to is not None:
            call.lower(found.points_to, FIXED, "number read")


def _is_resolved(call: Call) -> bool:
    """Whether everything that an op reads is pinned already, so that no rule could say more."""
    for operand in call.node.all_input_nodes:
        found = call.found.values.get(operand)
        for part in members(found):
            if isinstance(part, Product) or (isinstance(part, Value) and part.points_to is not None):
                return False
            if isinstance(part, Value) and any(a.root.size > 1 and not a.root.space.bound.fixed
                                               for x in part.axes for a in x.atoms):  # fmt: skip
                return False
    return True


def _pin(call: Call, role: str) -> Any:
    _pin_what_numbers_point_to(call)
    for operand in call.node.all_input_nodes:
        found = call.found.values.get(operand)
        for part in members(found):
            if isinstance(part, (Value, Product)):
                axes = call.resolve(part).axes if isinstance(part, Product) else part.axes
                call.lower_all(axes, FIXED, role)
    results = call.node.meta["val"]
    if isinstance(results, Tensor):
        return Value(tuple(fresh(n, FIXED) for n in results.shape))
    if not isinstance(results, (tuple, list)):
        return Value(())
    return tuple(Value(tuple(fresh(n, FIXED) for n in r.shape) if isinstance(r, Tensor) else ()) for r in results)


def _rotate(region: LinearRegion, found: Interpretation) -> Value:
    """y = R(position) x: what is left is the commutant of the rotations."""
    call = Call(region.output, found)
    value = call.value(region.base)
    last = value.axes[-1].root
    call.lower(last, FIXED if last.order else Bound(rotations=region.rotations), "rotary")
    call.lower_all(value.axes[:-2], PERMUTATION, "batch")
    call.lower_all((value.axes[i] for i in region.uneven), FIXED, "rotary")
    call.lower_all((a for c in region.coefficients for a in call.value(c).axes), FIXED, "rotary")
    if not region.order:
        return Value(value.axes)
    return Value((*value.axes[:-1], Axis(last.space, last.is_dual, region.order)))


def _pin_outputs(found: Interpretation) -> None:
    """What the model returns is its interface."""
    for node in found.program.interface:
        if isinstance(found.values.get(node), (Value, Product, Rows)):
            call = Call(node, found)
            for axis in call.value(node).axes:
                lower(axis, FIXED, evidence(node, "output"))
