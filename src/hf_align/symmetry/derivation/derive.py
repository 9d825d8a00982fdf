"""From what the interpreter found to the symmetry spec: gains, permutation classes, scales, index sets, names."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import hf_align.symmetry.rules  # noqa: F401  (fills the registry of rules)
from hf_align.errors import IncompatibleModels
from hf_align.symmetry.derivation.domains import positive_parameters
from hf_align.symmetry.derivation.gains import between_streams, resolve_gains
from hf_align.symmetry.derivation.index_sets import AtomClass, IndexSets
from hf_align.symmetry.derivation.nested_scales import without_repeated_scales
from hf_align.symmetry.derivation.torus import AtomicRelation, Torus, torus
from hf_align.symmetry.derivation.unread_parts import pin_constant_parts, pin_unread_parts
from hf_align.symmetry.elements import PRIMAL, dual
from hf_align.symmetry.gauges.find import find_gauges
from hf_align.symmetry.groups import Group, QuarterTurns, Scaling, TorusPermutation, group_of
from hf_align.symmetry.interpreter.bounds import Scalars, monomial
from hf_align.symmetry.interpreter.call import refine
from hf_align.symmetry.interpreter.interpret import interpret
from hf_align.symmetry.interpreter.rotations import Rotations
from hf_align.symmetry.interpreter.spaces import Axis, Kind, SpaceMismatchError, pair_atoms
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.spec import AxisActions, Factor, SpaceSpec, SymmetrySpec
from hf_align.tracing.program import Program


def derive(program: Program) -> SymmetrySpec:
    """All symmetries of an architecture that the rules know of.

    Raises:
        IncompatibleModels: its axes are cut in ways that do not fit together.
    """
    try:
        return _derive(program)
    except SpaceMismatchError as mismatch:
        raise IncompatibleModels(
            f"the axes of {program.config.model_type} do not separate into spaces ({mismatch}); "
            "--match none merges such models as they are"
        ) from mismatch


def _derive(program: Program) -> SymmetrySpec:
    found = interpret(program)
    pin_unread_parts(found)
    pin_constant_parts(found)
    between = between_streams(found)
    folded = resolve_gains(found)
    classes = _Classes(found)
    spaces = classes.spaces()
    parameters = {n: tuple(classes.actions(a) for a in v.axes) for n, v in found.weights.items()}
    spec = SymmetrySpec(
        model_type=program.config.model_type,
        spaces=spaces,
        parameters=parameters,
        gauges=find_gauges(found, folded, between),
        gains={g.parameter: g.offset for g in found.gains},
        ties=program.ties,
        buffers=tuple(program.buffers),
        unknown_ops=found.unknown_ops,
        pinned=classes.pinned(),
        positive=positive_parameters(program),
        modes=program.modes,
        unread=program.unread,
        untried=program.untried,
    )
    return without_repeated_scales(spec)


class _Classes:
    """The atoms of an interpretation, by class."""

    def __init__(self, found: Interpretation) -> None:
        self.found = found
        refine(found.relations)
        self.relations = list(_atomic_relations(found))
        self.of_atom: dict[int, AtomClass] = {}
        for connected in self._connected():
            for atoms, klass in self._parted(connected):
                self.of_atom.update((a.space.serial, klass) for a in atoms)
        self._collect_weights()
        for klass, outer in IndexSets(found, self.of_atom).outer().items():
            klass.outer = outer
        self._join_what_differs_alike()
        self._name()

    def _connected(self) -> Iterable[list[Axis]]:
        """Groups of atoms that relations join."""
        atoms = {a.space.serial: a.root for v in self.found.every_value for x in v.axes for a in x.atoms}
        for relation in self.relations:
            atoms.update((a.root.space.serial, a.root) for a in relation)
        label = {serial: serial for serial in atoms}

        def top(serial: int) -> int:
            while label[serial] != serial:
                serial = label[serial]
            return serial

        for relation in self.relations:
            for atom in relation[1:]:
                label[top(atom.space.serial)] = top(relation[0].space.serial)
        groups: dict[int, list[Axis]] = defaultdict(list)
        for serial, atom in atoms.items():
            groups[top(serial)].append(atom)
        return groups.values()

    def _class(self, atoms: list[Axis]) -> AtomClass:
        evidence = list(dict.fromkeys(e for a in atoms for e in a.space.evidence))
        size = atoms[0].size
        if len(atoms) == 1 and not any(atoms[0].space is r[0].space for r in self.relations):
            return AtomClass(size, group_of(atoms[0].space.bound, size), evidence, {atoms[0].space.serial: PRIMAL})
        serials = {a.space.serial for a in atoms}
        relations = [r for r in self.relations if r[0].space.serial in serials]
        scales = _apart_from_what_turns(atoms, torus(atoms, relations))
        return AtomClass(size, _monomial_group(atoms, scales), evidence, scales.exponents)

    def _parted(self, atoms: list[Axis]) -> Iterable[tuple[list[Axis], AtomClass]]:
        """One class; two where nothing moves but scales, for these need not be shared: gains with theirs, and what they
        multiply with signs, which then may differ over the heads that share the gains. Both are turned together where
        that is possible. (That the sign of a gain may go into what it multiplies is left out: gains are positive.)"""
        whole = self._class(atoms)
        gains = {a.root.space.serial for g in self.found.gains for a in g.weight.atoms} & set(whole.exponents)
        if not isinstance(whole.group, Scaling) or not gains or len(gains) == len(atoms):
            return [(atoms, whole)]
        rest = [a for a in atoms if a.space.serial not in gains]
        signs = torus(rest, [r for r in self.relations if r[0].space.serial in whole.exponents])
        stored = {a.root.space.serial for v in self.found.weights.values() for x in v.axes for a in x.atoms}
        powers = [whole.exponents[a.space.serial] for a in rest if a.space.serial in stored]
        own = [k for k in range(len(whole.group.kinds)) if not any(power[k] for power in powers)]
        apart = _monomial_group(rest, signs)
        if signs.kinds != (Scalars.SIGN,) or not own or (apart is not None and apart.permutes):
            return [(atoms, whole)]  # what would go into another order without the gains keeps theirs
        kinds = tuple(whole.group.kinds[k] for k in own)
        exponents = {n: tuple(power[k] for k in own) for n, power in whole.exponents.items()}
        between = replace(whole, group=replace(whole.group, kinds=kinds), exponents=exponents)
        own_signs = replace(whole, group=apart, exponents=signs.exponents)
        if rotations := _rotations_to_turn(atoms, signs):
            between.group = QuarterTurns(whole.size, whole.group.classes, (*kinds, Scalars.SIGN), rotations)
            between.exponents = {n: (*power, 0) for n, power in exponents.items()}
            own_signs.beside = between, {n: (*(0 for _ in kinds), *sign) for n, sign in signs.exponents.items()}
        return [([a for a in atoms if a.space.serial in gains], between), (rest, own_signs)]

    def _all(self) -> list[AtomClass]:
        return list(dict.fromkeys(self.of_atom.values()))

    def _collect_weights(self) -> None:
        for name, value in self.found.weights.items():
            for klass in dict.fromkeys(self.of_atom[a.space.serial] for x in value.axes for a in x.atoms):
                klass.weights.append(name)

    def _join_what_differs_alike(self) -> None:
        """Where the gains are a head's own too, all of it is one class: turned twice, a plane has the other sign."""
        for klass in self._all():
            if klass.beside is None or klass.beside[0].outer != klass.outer:
                continue
            joined, powers = klass.beside
            joined.exponents = {**joined.exponents, **powers}
            joined.weights += [name for name in klass.weights if name not in joined.weights]
            self.of_atom.update(dict.fromkeys(powers, joined))

    def _name(self) -> None:
        """Label classes by where their weights live; labels decide nothing."""
        taken: set[str] = set()
        for klass in self._all():
            if not klass.weights:
                continue
            stem = _common_module(klass.weights)
            name = f"{stem}.{_role(klass)}" if stem else _role(klass)
            while name in taken:
                name += "_"
            taken.add(name)
            klass.name = name

    def _indexing(self) -> set[AtomClass]:
        return {o for k in self._all() if k.weights and k.group is not None for o in k.outer}

    def spaces(self) -> dict[str, SpaceSpec]:
        """Named spaces that move, and pinned ones over which others differ; outer ones first."""
        indexing = self._indexing()
        kept = [k for k in self._all() if k.weights and (k.group is not None or k in indexing)]
        return {
            k.name: SpaceSpec(k.name, k.size, k.group, tuple(o.name for o in k.outer), tuple(k.evidence))
            for k in sorted(kept, key=lambda k: len(k.outer))
        }

    def pinned(self) -> dict[str, SpaceSpec]:
        """Why the rest stands still."""
        rest = [k for k in self._all() if k.weights and k.group is None and k not in self._indexing()]
        return {k.name: SpaceSpec(k.name, k.size, None, (), tuple(k.evidence)) for k in rest}

    def actions(self, axis: Axis) -> AxisActions:
        """How the spaces move one parameter axis."""
        axis = axis.root
        if axis.space.kind is Kind.ATOM:
            return ((self._factor(axis),),)
        if axis.space.kind is Kind.PRODUCT:
            return self._product(axis.factors)
        starts = itertools.accumulate((s.size for s in axis.segments[:-1]), initial=0)
        return tuple(
            (replace(leaf[0], within=(start + (leaf[0].within or (0, 0))[0], axis.size)), *leaf[1:])
            for start, segment in zip(starts, axis.segments, strict=True)
            for leaf in self.actions(segment)
        )

    def _product(self, factors: tuple[Axis, ...]) -> AxisActions:
        """Products distribute over sums: one segment for every choice of a part of each factor."""
        choices = []
        for i, factor in enumerate(factors):
            behind = math.prod(f.size for f in factors[i + 1 :])
            choices.append([[_stretched(f, behind) for f in leaf] for leaf in self.actions(factor)])
        return tuple(tuple(f for leaf in grid for f in leaf) for grid in itertools.product(*choices))

    def _factor(self, atom: Axis) -> Factor:
        klass = self.of_atom[atom.root.space.serial]
        if klass.group is None:
            return Factor(atom.size, klass.name) if klass in self._indexing() else Factor(atom.size, pin=klass.name)
        serial = atom.root.space.serial
        power = klass.exponents[serial]
        beside = () if klass.beside is None else ((klass.beside[0].name, klass.beside[1][serial]),)
        return Factor(atom.size, klass.name, dual(power) if atom.root.is_dual else power, beside=beside)


def _stretched(factor: Factor, behind: int) -> Factor:
    """A factor with `behind` entries for each of its own."""
    if factor.within is None:
        return factor
    return replace(factor, within=(factor.within[0] * behind, factor.within[1] * behind))


def _apart_from_what_turns(atoms: list[Axis], scales: Torus) -> Torus:
    """The scales that leave rotating coordinates alone, where the others are only signs: they may differ in a plane."""
    turning = [a.space.serial for a in atoms if a.space.bound.rotations is not None]
    apart = [k for k in range(len(scales.kinds)) if not any(scales.exponents[t][k] for t in turning)]
    lost = {s for k, s in enumerate(scales.kinds) if k not in apart}
    if not turning or not apart or lost - {Scalars.SIGN, Scalars.COMMON_SIGN, Scalars.ONE}:
        return scales
    exponents = {serial: tuple(power[k] for k in apart) for serial, power in scales.exponents.items()}
    return Torus(tuple(scales.kinds[k] for k in apart), exponents)


def _rotations_to_turn(atoms: list[Axis], signs: Torus) -> Rotations | None:
    """The rotations whose planes may be exchanged: the same for all that rotates, which has signs, no order fixed."""
    turning = [a for a in atoms if a.space.bound.rotations is not None]
    rotations = {a.space.bound.rotations for a in turning}
    if len(rotations) != 1 or any(a.space.bound.fixed for a in atoms):
        return None
    if any(signs.exponents.get(a.space.serial) != (1,) for a in turning):
        return None
    found = rotations.pop()
    return found if found is not None and any(len(planes) == 1 for planes in found.planes) else None


def _monomial_group(atoms: list[Axis], scales: Torus) -> Group | None:
    """Permutations with factors; factors alone if any atom has its order fixed, one for each plane of what turns."""
    size, kinds = atoms[0].size, scales.kinds
    if size <= 1:  # as in `group_of`
        return None
    if not any(a.space.bound.fixed or a.space.bound.rotations for a in atoms):
        return TorusPermutation(size, kinds) if len(kinds) > 1 else group_of(monomial(kinds[0]), size)
    rotations = {a.space.bound.rotations for a in atoms if any(scales.exponents[a.space.serial])} - {None}
    if kinds == (Scalars.ONE,) or len(rotations) > 1:
        return None
    classes = next((r.classes for r in rotations if r is not None), tuple(range(size)))
    return Scaling(size, classes, kinds)


def _atomic_relations(found: Interpretation) -> Iterable[AtomicRelation]:
    for relation in found.relations:
        pairs: list[tuple[Axis, Axis]] = []
        pair_atoms(relation.left, relation.right, lambda x, y, into=pairs: into.append((x, y)))  # type: ignore[misc]
        results: list[tuple[Axis, Axis]] = []
        pair_atoms(relation.product, relation.left, lambda x, y, into=results: into.append((x, y)))  # type: ignore[misc]
        yield from _by_atoms(pairs, results)


def _by_atoms(pairs: list[tuple[Axis, Axis]], results: list[tuple[Axis, Axis]]) -> Iterable[AtomicRelation]:
    """The atoms of products beside those of their factors. What stands still may be cut anywhere without being split:
    then one atom is beside several."""
    factors, products = (list(itertools.accumulate(first.size for first, _ in atoms)) for atoms in (pairs, results))
    assert factors[-1:] == products[-1:], "a product is of another size than its factors"
    for end in sorted({*factors, *products}):
        (x, y), (z, _) = pairs[bisect_left(factors, end)], results[bisect_left(products, end)]
        yield z.root, x.root, y.root


def _common_module(names: list[str]) -> str:
    """The longest module path that all parameters share."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return ".".join(level[0] for level in shared)


_ROLES = {
    "rotary": "qk",
    "norm": "residual",
    "score": "qk",
    "mix": "value",
    "batch": "heads",
    "softmax": "heads",
    "pointwise": "hidden",
    "elementwise": "hidden",
}


def _role(klass: AtomClass) -> str:
    roles = {e.role for e in klass.evidence}
    label = "signs" if klass.beside else next((label for role, label in _ROLES.items() if role in roles), "space")
    return f"sub{label}" if label == "heads" and klass.outer else label
