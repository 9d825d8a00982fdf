"""Over which spaces the element of another may differ: a permutation of units for each expert, a rotation for each
head."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from hf_align.symmetry.derivation.choices import meet_their_own
from hf_align.symmetry.elements import Power
from hf_align.symmetry.gauges.index_provenance import NOBODY
from hf_align.symmetry.groups import Group, ScaledPermutation
from hf_align.symmetry.interpreter.spaces import Axis, Kind
from hf_align.symmetry.interpreter.values import Interpretation, Value, values_of
from hf_align.tracing.program import Evidence


@dataclass(eq=False)
class AtomClass:
    """Atoms that share one permutation (or one atom alone).

    Attributes:
        exponents: by atom, the power of each of the class's scales.
        weights: the parameters that carry it.
        outer: the classes over which its element may differ, outermost first.
        beside: another class that moves the same atoms, and by which power each.
    """

    size: int
    group: Group | None
    evidence: list[Evidence]
    exponents: Mapping[int, Power] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    outer: tuple[AtomClass, ...] = ()
    beside: tuple[AtomClass, Mapping[int, Power]] | None = None
    name: str = ""

    @property
    def moving(self) -> set[AtomClass]:
        """All that moves its atoms."""
        return {self} if self.beside is None else {self, self.beside[0]}


class IndexSets:
    """Finds them for all classes of an interpretation.

    Args:
        of_atom: the class of each atom, by the serial number of its space.
    """

    def __init__(self, found: Interpretation, of_atom: dict[int, AtomClass]) -> None:
        self.found, self.of_atom = found, of_atom
        self._leaves_of = dict[int, list[Counter[AtomClass]]]()

    def outer(self) -> dict[AtomClass, tuple[AtomClass, ...]]:
        """By class, those that accompany it in every tensor, outermost first: over these its element may differ.

        Of a space that occurs several times, the one in the same product is meant. Where several are, or none is,
        nothing says which, and the element must be the same all along it. Activations may lack a space along which
        their entries were looked up by number.
        """
        self._join_stacks()
        values = [*self.found.every_value, *self._looked_up()]
        company, stored = self._company(values), self._company(self.found.weights.values())
        repeated = self._repeated()
        found = dict[AtomClass, tuple[AtomClass, ...]]()
        for klass in (c for c in stored if c.group is not None):
            around = [o for o in stored[klass] - {klass} if o.weights and only_exchanges(o.group)]
            only_together = [o for o in around if klass in company[o] and not (klass in repeated and o not in repeated)]
            outer = [o for o in around if o in company[klass] and o not in only_together]
            others = [o for o in around if o not in company[klass] and (o.group is None or o not in only_together)]
            outer += [o for o in others if self._are_apart(klass, [o], o.size)]
            found[klass] = tuple(sorted(outer, key=lambda o: (len(company[o]), o.weights)))
        return found

    def _looked_up(self) -> Iterator[Value]:
        """What is left of tables whose numbers lie along an axis that moves as the rows do, or as another axis of the
        table: there, where an entry is does not say which row it is of, nor which entry of a row."""
        for lookup in self.found.lookups:
            others = list(lookup.value.axes)
            rows = others.pop(lookup.dim)
            along = set[AtomClass]().union(*map(self._of, lookup.numbers.axes))
            if not along.isdisjoint(self._of(rows)):
                yield Value(tuple(others))
            if any(not along.isdisjoint(self._of(axis)) for axis in others):
                yield Value((rows,))

    def _join_stacks(self) -> None:
        """Axes that stand still count the same, if a loop takes matrices of one stack after the other along them."""
        for klass in dict.fromkeys(c for c in self.of_atom.values() if c.group is not None and c.weights):
            stacks = [self._stacks(self.found.weights[name], klass) for name in klass.weights]
            first, *others = stacks
            for size in [n for n in first if all(n in found for found in others)]:
                one, *more = dict.fromkeys(found[size] for found in stacks)
                if more and self._are_apart(klass, [one, *more], size):
                    one.weights += [name for other in more for name in other.weights]
                    self.of_atom.update({n: one for n, c in self.of_atom.items() if c in more})
                    self._leaves_of.clear()

    def _stacks(self, value: Value, klass: AtomClass) -> dict[int, AtomClass]:
        """By size, the axes of a weight beside a class that stand still, where only one of that size does."""
        beside = [self._of(axis) for axis in value.axes if self._of(axis).isdisjoint(klass.moving)]
        still = Counter(c for axis in beside for c in axis if len(axis) == 1 and c.group is None)
        sizes = Counter(c.size for c in still.elements())
        return {c.size: c for c in still if sizes[c.size] == 1 and c.size > 1}

    def _company(self, values: Iterable[Value]) -> dict[AtomClass, set[AtomClass]]:
        """By class, those that occur once beside it, in every value that it occurs in. What lies along an axis with
        another of its kind belongs to that one."""
        company: dict[AtomClass, set[AtomClass]] = {}
        for value in _unlike(values):
            leaves = [self._leaves(axis.root) for axis in value.axes]
            always = [reduce(and_, counts) if counts else Counter() for counts in leaves]
            for i, counts in enumerate(leaves):
                for present in counts:
                    for klass in {k for p in present for k in p.moving}:
                        others = (a for j, a in enumerate(always) if j != i and not _is_among(klass, leaves[j]))
                        beside = sum(others, Counter[AtomClass]())
                        together = {o for o in present | beside if (present[o] or beside[o]) == 1}
                        company[klass] = company.get(klass, together) & together
        return company

    def _are_apart(self, klass: AtomClass, outer: Collection[AtomClass], count: int) -> bool:
        """Whether entries of a class never meet those of another choice along outer ones, where they do not lie along
        them."""
        places = {n for n, v in self.found.values.items() if any(self._holds(x, klass) for x in values_of(v))}
        stored = {n: self._labels(self.found.values[n], outer) for n in self.found.program.parameters if n in places}
        labels = {n: found for n, found in stored.items() if found is not None}
        return len(labels) == len(stored) and meet_their_own(labels, count, places, self.found)

    def _labels(self, value: Value, outer: Collection[AtomClass]) -> Tensor | None:
        """The number of each entry of a weight along some classes; none if these are not along one axis of it."""
        along = [self._numbers(axis.root, outer) for axis in value.axes]
        at = [i for i, numbers in enumerate(along) if bool((numbers != NOBODY).any())]
        if len(at) != 1 or not all(a.size for a in value.axes):
            return None
        return along[at[0]][(..., *[None] * (len(along) - at[0] - 1))].expand([a.size for a in value.axes])

    def _numbers(self, axis: Axis, outer: Collection[AtomClass]) -> Tensor:
        """The same for the entries of one axis; nobody's where they do not lie along the class."""
        if axis.space.kind is Kind.SUM:
            return torch.cat([self._numbers(s.root, outer) for s in axis.segments])
        numbers = torch.full((1,), NOBODY)
        for factor in axis.factors:
            along = self._of(factor) <= set(outer)
            own = torch.arange(factor.size) if along else torch.full((factor.size,), NOBODY)
            inner = self._numbers(factor.root, outer) if factor.root.space.kind is Kind.SUM else own
            numbers = torch.maximum(numbers[:, None], inner).flatten()
        return numbers

    def _holds(self, value: Value, klass: AtomClass) -> bool:
        return any(klass in present.moving for axis in value.axes for present in self._of(axis))

    def _repeated(self) -> set[AtomClass]:
        """The classes that meet themselves in one tensor. Of two that only come together, one that does has an element
        for each entry of one that does not: a matrix for each block."""
        found = set[AtomClass]()
        for value in _unlike(self.found.every_value):
            together = [[self._of(x) for x in value.axes]]
            together += [[self._of(f) for f in s.factors] for x in value.axes for s in x.segments]
            found.update(*(x & y for parts in together for x, y in itertools.combinations(parts, 2)))
        return found

    def _of(self, axis: Axis) -> set[AtomClass]:
        return set[AtomClass]().union(*self._leaves(axis))

    def _leaves(self, axis: Axis) -> list[Counter[AtomClass]]:
        """How often each class occurs in each segment of an axis."""
        axis = axis.root
        key = axis.space.serial
        if key not in self._leaves_of:
            if axis.space.kind is Kind.ATOM:
                self._leaves_of[key] = [Counter({self.of_atom[key]} if key in self.of_atom else ())]
            elif axis.space.kind is Kind.PRODUCT:
                parts = [self._leaves(f) for f in axis.factors]
                self._leaves_of[key] = [sum(grid, Counter()) for grid in itertools.product(*parts)]
            else:
                self._leaves_of[key] = [leaf for s in axis.segments for leaf in self._leaves(s)]
        return self._leaves_of[key]


def _unlike(values: Iterable[Value]) -> Iterable[Value]:
    """One value of all that have the same axes."""
    return {tuple(axis.root.space.serial for axis in value.axes): value for value in values}.values()


def _is_among(klass: AtomClass, leaves: Iterable[Counter[AtomClass]]) -> bool:
    """Whether something that moves as a class does lies along an axis."""
    return any(klass in present_class.moving for present in leaves for present_class in present)


def only_exchanges(group: Group | None) -> bool:
    """Whether a space stands still, or its entries change places and lengths, so that each has its number."""
    return group is None or isinstance(group, ScaledPermutation)
