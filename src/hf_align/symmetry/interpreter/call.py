"""One call of an op, as the rule of the op sees it, and the table of all rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from hf_align.symmetry.interpreter.bounds import FIXED, FREE, ONES, Bound, Scalars, monomial
from hf_align.symmetry.interpreter.spaces import (
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
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse, Product, Relation, Rows, Value, aligned
from hf_align.tracing.amounts import BY_ARGUMENT
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.ops import NO_TRAITS, Factors, Trait, describe, op_name
from hf_align.tracing.program import Evidence, evidence


class Call:
    """One node under interpretation: what a rule sees."""

    def __init__(self, node: fx.Node, found: Interpretation) -> None:
        self.node = node
        self.found = found
        self._arguments = Arguments(node)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result; of the first, where there are several."""
        results = self.node.meta["val"]
        return tuple((results if isinstance(results, Tensor) else results[0]).shape)

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
        """The axes of a tensor argument; of a constant, they allow what leaves it as it is."""
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
                     points_to=self._counted_by_all(pieces))  # fmt: skip

    def _counted_by_all(self, pieces: Sequence[Value]) -> Axis | None:
        """What the numbers of several values count; where that is not one thing for all, all of it is pinned."""
        counted = [piece.points_to for piece in pieces]
        first = counted[0]
        if first is not None and all(axis is not None and axis.root == first.root for axis in counted):
            return first
        self.lower_all((axis for axis in counted if axis is not None), FIXED, "number read")
        return None

    def raw(self, argument: fx.Node) -> Any:
        """As `value`, but an elementwise product may still be open."""
        if argument in self.found.values:
            return self.found.values[argument]
        tensor, is_zero = self.found.program.constants[argument], self.found.program.is_always(argument, 0)
        bounds = (FREE if is_zero and tensor.is_floating_point() else self._left_by(argument, tensor, i)
                  for i in range(tensor.dim()))  # fmt: skip
        return Value(tuple(map(fresh, tensor.shape, bounds)))

    def _left_by(self, argument: fx.Node, constant: Tensor, dim: int) -> Bound:
        """Elements along an axis that leave a constant as it is: where all along the axis it is the same, any with
        g 1 = 1."""
        is_vector = constant.is_floating_point() and constant.shape[dim] > 1
        return ONES if is_vector and not self.found.program.varies(argument, dim) else FIXED

    def unify(self, a: Axis, b: Axis, role: str) -> None:
        unify(a, b, evidence(self.node, role))

    def lower(self, axis: Axis, bound: Bound, role: str) -> None:
        lower(axis, bound, evidence(self.node, role))

    def lower_all(self, axes: Iterable[Axis], bound: Bound, role: str) -> None:
        for axis in axes:
            self.lower(axis, bound, role)

    def keep_if_asked(self, dims: Iterable[int]) -> None:
        """Pin axes of the first operand that are cut where an argument of the model's call says: another one cuts them
        elsewhere."""
        if BY_ARGUMENT in self.node.meta:
            axes = self.value(self.argument(0)).axes
            self.lower_all((axes[i] for i in dims), FIXED, BY_ARGUMENT)

    def note(self, axis: Axis, role: str) -> None:
        """Remember what an axis is for without bounding it."""
        for atom in axis.atoms:
            atom.space.evidence.append(evidence(self.node, role))

    def mixes(self, value: Value, dims: Iterable[int]) -> None:
        """Entries along some axes meet in one number, such as a length: no other element may differ over those axes."""
        mixed = {i % len(value.axes) for i in dims}
        self.found.inner.append(Value(tuple(a for i, a in enumerate(value.axes) if i not in mixed)))

    def contracts(self, axes: Iterable[Axis]) -> None:
        """Axes along which a sum of products runs, those of the result with it: the element of one that is summed over
        may differ over a class only if that class runs once, so that both factors take the same entry."""
        self.found.inner.append(Value(tuple(axes)))

    def stored(self, operand: fx.Node) -> str | None:
        """The parameter that an operand is, along the axes along which it is stored; a kernel may have units behind."""
        found = self.found.values.get(operand)
        name = found.parameter if isinstance(found, Value) and not found.offset else None
        shape = operand.meta["val"].shape
        stored = self.found.program.shapes[name] if name is not None else ()
        return name if stored[: len(shape)] == shape and all(n == 1 for n in stored[len(shape) :]) else None

    def is_known_bias(self, bias: fx.Node | None, size: int) -> bool:
        """Whether what an op adds in the end is nothing, or a vector of some size as it is stored. Gauges look for no
        other: a map or a norm that adds something else is none of those that they know."""
        if bias is None or bias in self.found.program.constants:
            return bias is None or self.found.program.is_always(bias, 0)
        name = self.stored(bias)
        return name is not None and self.found.program.shapes[name] == (size,)

    def reads(self, source: fx.Node, weight: fx.Node, in_axis: int, bias: fx.Node | None, out_axis: int = -1, *,
              groups: int = 1) -> None:  # fmt: skip
        """This node maps `source` linearly: noted if by a weight as it is stored, with no other bias than a known one.
        Each group of outputs reads a group of inputs."""
        name, shape = self.stored(weight), weight.meta["val"].shape
        if name is not None and self.is_known_bias(bias, shape[1 - in_axis]):
            uses = self.found.linear_uses if groups == 1 else self.found.grouped_uses
            added = self.stored(bias) if bias is not None else None
            uses[self.node] = LinearUse(self.node, source, name, in_axis, added, out_axis)

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
                _require_one_structure(*axes)
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


def _require_one_structure(result: Axis, left: Axis, right: Axis) -> None:
    """Refuse where a result meets a factor in other atoms than the factors meet each other in: (1 + 1) ⊗ n is as large
    as n + n, and shows n once."""

    def atoms(other: Axis) -> tuple[list[int], int]:
        met: list[Axis] = []
        pair_atoms(left, other, lambda x, _: met.append(x.root))
        turning = [x.space.serial for x in met if x.size > 1 and not x.space.bound.fixed]
        return turning, sum(x.size for x in met)

    if atoms(right) != atoms(result):
        raise SpaceMismatchError("a product has another structure than its factors")


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
