"""Reviewed overrides, applied to a derived spec: pin, bound, tie; calls and unused weights, with which it is derived.

A smaller group is always sound, so lowering needs a reason only. What raises a bound is applied to a small copy of the
architecture first, and refused if a random element changes the outputs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from hf_align.errors import HfAlignError
from hf_align.symmetry import groups
from hf_align.symmetry.certificate.random_copy import raise_epsilons, with_eps
from hf_align.symmetry.certificate.rounding import EXACT
from hf_align.symmetry.certificate.soundness import measured_soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.derivation.spec_cache import derived_spec
from hf_align.symmetry.elements import DUAL, PRIMAL
from hf_align.symmetry.groups import Group
from hf_align.symmetry.overrides.override_file import (
    Call,
    Override,
    OverrideFile,
    Pin,
    SetBound,
    SpaceRef,
    Tie,
    Unused,
    matched,
    read_overrides,
)
from hf_align.symmetry.pin import because, pin, space_of, with_factors
from hf_align.symmetry.spec import Factor, SpaceSpec, SymmetrySpec
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.modes import trace_modes
from hf_align.tracing.program import Evidence
from hf_align.tracing.small.reduce import reduced
from hf_align.tracing.small.shrink import shrink

_EPSILON = 1e-2
"""Of the norms in a small copy, so that nothing is nearly a symmetry."""
_BELOW: dict[str, frozenset[str]] = {
    "Permutation": frozenset(["PermutationUpToSign", "SignedPermutation", "PositiveScaledPermutation",
                              "ScaledPermutation", "TorusPermutation", "OrthogonalFixingOnes",
                              "OrthogonalFixingOnesUpToSign", "Orthogonal", "GeneralLinear"]),
    "PermutationUpToSign": frozenset(["SignedPermutation", "ScaledPermutation", "OrthogonalFixingOnesUpToSign",
                                      "Orthogonal", "GeneralLinear"]),
    "SignedPermutation": frozenset(["ScaledPermutation", "Orthogonal", "GeneralLinear"]),
    "PositiveScaledPermutation": frozenset(["ScaledPermutation", "GeneralLinear"]),
    "ScaledPermutation": frozenset(["GeneralLinear"]),
    "OrthogonalFixingOnes": frozenset(["OrthogonalFixingOnesUpToSign", "Orthogonal", "GeneralLinear"]),
    "OrthogonalFixingOnesUpToSign": frozenset(["Orthogonal", "GeneralLinear"]),
    "Orthogonal": frozenset(["GeneralLinear"]),
}  # fmt: skip
"""For each group the groups that contain it."""
_SELF_DUAL = ("Orthogonal", "OrthogonalFixingOnes", "OrthogonalFixingOnesUpToSign", "SignedPermutation",
              "PermutationUpToSign", "Permutation")  # fmt: skip


@dataclass(frozen=True)
class Overridden:
    """A spec with overrides applied.

    Attributes:
        raised: spaces that got a group which is not below the derived one.
    """

    spec: SymmetrySpec
    raised: tuple[str, ...] = ()


def symmetries(config: PretrainedConfig, specs: Path | None = None) -> SymmetrySpec:
    """The spec of an architecture, as derived and then reviewed.

    Args:
        specs: a folder of override files to use before those that ship with the package.

    Raises:
        IncompatibleModels: the architecture cannot be traced.
        HfAlignError: an override names no space, or raises one without the certificate.
    """
    found = read_overrides(config.model_type, specs)
    if found is None:
        return derived_spec(config)
    path, reviewed = found
    result = apply(derived_spec(config, reviewed.calls, reviewed.unused), reviewed, path.name)
    if result.raised:
        _require_sound(config, reviewed, path.name, result)
    return result.spec


@dataclass(frozen=True)
class Review:
    """The overrides of a model type, for any copy of an architecture; bounds that they raise go unchecked."""

    source: str
    reviewed: OverrideFile

    def __call__(self, spec: SymmetrySpec) -> SymmetrySpec:
        return apply(spec, self.reviewed, f"{self.source}, on a small copy").spec


def reviewer(model_type: str, specs: Path | None = None) -> Review:
    """The overrides of a model type; none where it has no file."""
    path, reviewed = read_overrides(model_type, specs) or (Path(), OverrideFile(overrides=()))
    return Review(path.name, reviewed)


def apply(spec: SymmetrySpec, reviewed: OverrideFile, source: str) -> Overridden:
    """The spec with every override, in order; `source` is named as the reason's place."""
    result = Overridden(spec)
    for i, override in enumerate(reviewed.overrides):
        try:
            result = _applied(result, override, source)
        except HfAlignError as error:
            raise HfAlignError(f"{source}: override {i + 1} ({override.action}): {error}") from error
    _require_one_order_of_subheads(spec, result.spec, source)
    return result


def _applied(so_far: Overridden, override: Override, source: str) -> Overridden:
    why = Evidence(f"override ({override.reason})", override.action, "", source)
    spec, raised = so_far.spec, so_far.raised
    match override:
        case Pin():
            for name in _matches(spec, override.space).values():
                spec = pin(spec, name, why)
        case SetBound():
            for name in dict.fromkeys(_matches(spec, override.space).values()):
                group = getattr(groups, override.group)(space_of(spec, name).size)
                raised += () if _is_below(group, space_of(spec, name).group) else (name,)
                spec = _bound(spec, name, group, why)
        case Tie():
            for first, second in _pairs(spec, override):
                spec = _tie(spec, first, second, why)
        case Call() | Unused():
            pass  # derived with it
    return Overridden(spec, raised)


def _require_one_order_of_subheads(before: SymmetrySpec, after: SymmetrySpec, source: str) -> None:
    """Matching pairs heads together with one order of the heads inside them."""
    for name in after.spaces:
        inside = [s for s in after.indexed_by(name) if isinstance(after.spaces[s].group, groups.ScaledPermutation)]
        if len(inside) > 1 and not set(inside) <= set(before.indexed_by(name)):
            raise HfAlignError(f"{source} ties {name}; then what is permuted inside must be tied: {', '.join(inside)}")


def _require_sound(config: PretrainedConfig, reviewed: OverrideFile, source: str, full: Overridden) -> None:
    copy = with_eps(reduced(config) or shrink(config), _EPSILON)
    program = raise_epsilons(trace_modes(build_without_weights(copy), reviewed.calls), _EPSILON)
    small = apply(derive(program), reviewed, f"{source}, on a small copy")
    names = f"{full.raised[0]} and {len(full.raised) - 1} more" if len(full.raised) > 1 else full.raised[0]
    axes = [at for name in small.raised for at in _axes(small.spec, name)]
    if not axes or any(_structure(small.spec, *at) != _structure(full.spec, *at) for at in axes):
        raise HfAlignError(f"{source} raises {names}, which a small copy cannot check: its axes are made otherwise")
    change, _ = measured_soundness(program, small.spec, torch.Generator().manual_seed(0))
    if not change < EXACT:
        raise HfAlignError(f"{source} raises {names}, which changes the function: outputs move by {change:.1e}")


def _axes(spec: SymmetrySpec, name: str) -> Iterator[tuple[str, int]]:
    """Every parameter axis that a space moves."""
    for parameter, axes in spec.parameters.items():
        yield from ((parameter, i) for i, a in enumerate(axes) if any(f.is_moved_by(name) for s in a for f in s))


def _structure(spec: SymmetrySpec, parameter: str, axis: int) -> list[int]:
    """How many spaces each segment is a product of; one head alone, as in a small copy, is no space."""
    return [len(segment) for segment in spec.parameters[parameter][axis]]


def _matches(spec: SymmetrySpec, ref: SpaceRef) -> dict[tuple[str, ...], str]:
    """What the wildcards stand for -> the name of the space."""
    found = {at: _named(spec, n, ref) for n in spec.parameters if (at := matched(ref.parameter, n)) is not None}
    if not found:
        raise HfAlignError(f"no parameter matches {ref.parameter}")
    return found


def _named(spec: SymmetrySpec, parameter: str, ref: SpaceRef) -> str:
    axes = spec.parameters[parameter]
    if ref.axis >= len(axes):
        raise HfAlignError(f"{parameter} has {len(axes)} axes, none is number {ref.axis}")
    factors = [f for segment in axes[ref.axis] for f in segment]
    if ref.factor is None and len({f.space or f.pin for f in factors}) > 1:
        raise HfAlignError(f"axis {ref.axis} of {parameter} carries {len(factors)} spaces; give `factor`")
    if (ref.factor or 0) >= len(factors):
        raise HfAlignError(f"axis {ref.axis} of {parameter} carries {len(factors)} spaces, none is number {ref.factor}")
    chosen = factors[ref.factor or 0]
    name = chosen.space or chosen.pin
    if name is None:
        raise HfAlignError(f"axis {ref.axis} of {parameter} carries no space")
    return name


def _is_below(group: Group | None, other: Group | None) -> bool:
    if group is None or group == other:
        return True
    return other is not None and other.name in _BELOW.get(group.name, ())


def _renamed(factor: Factor, before: str, after: str) -> Factor:
    beside = tuple((after if space == before else space, power) for space, power in factor.beside)
    return replace(factor, space=after if factor.space == before else factor.space, beside=beside)


def _bound(spec: SymmetrySpec, name: str, group: Group, why: Evidence) -> SymmetrySpec:
    space = replace(because(space_of(spec, name), why), group=group)
    if spec.indexed_by(name) and group.name != "Permutation":
        raise HfAlignError(f"other spaces differ along {name}, which can only be permuted or pinned")
    if name in spec.spaces:
        powers = {f.powers[name] for f in spec.factors() if f.is_moved_by(name)}
        if not isinstance(group, groups.ScaledPermutation) and not powers <= {PRIMAL, DUAL}:
            raise HfAlignError(f"{name} acts by other powers than 1 and -1, which only scales have")
        return replace(spec, spaces={**spec.spaces, name: space})
    if group.name not in _SELF_DUAL:
        raise HfAlignError(f"{name} is pinned, so no trace tells its dual: it can only be raised to {_SELF_DUAL}")
    pinned = {n: s for n, s in spec.pinned.items() if n != name}
    raised = replace(spec, spaces=_outer_first({**spec.spaces, name: space}), pinned=pinned)
    return with_factors(raised, name, lambda f: replace(f, space=name, pin=None))


def _pairs(spec: SymmetrySpec, override: Tie) -> Iterator[tuple[str, str]]:
    first, second = (_matches(spec, ref) for ref in override.spaces)
    if first.keys() != second.keys():
        odd = next(iter(first.keys() ^ second.keys()))
        raise HfAlignError(f"the wildcards of the two spaces do not stand for the same: {'.'.join(odd)}")
    return ((first[at], second[at]) for at in first if first[at] != second[at])


def _tie(spec: SymmetrySpec, first: str, second: str, why: Evidence) -> SymmetrySpec:
    one, other = space_of(spec, first), space_of(spec, second)
    if one.size != other.size:
        raise HfAlignError(f"{first} has {one.size} dimensions but {second} {other.size}")
    for still, name in ((one, second), (other, first)):
        if still.name in spec.pinned:
            return pin(spec, name, why)
    if not (_is_below(one.group, other.group) or _is_below(other.group, one.group)):
        raise HfAlignError(f"neither group of {first} and {second} contains the other; give both one with `bound`")
    group = one.group if _is_below(one.group, other.group) else other.group
    shared = tuple(i for i in one.index if i in other.index)
    spaces = {n: replace(s, index=tuple(first if i == second else i for i in s.index))
              for n, s in spec.spaces.items() if n != second}  # fmt: skip
    if any(len(set(s.index)) < len(s.index) for s in spaces.values()):
        raise HfAlignError(f"a space differs along both {first} and {second}")
    reasons = (why, *dict.fromkeys((*one.reasons, *other.reasons)))
    spaces[first] = replace(one, group=group, index=shared, reasons=reasons)
    return with_factors(replace(spec, spaces=_outer_first(spaces)), second, lambda f: _renamed(f, second, first))


def _outer_first(spaces: dict[str, SpaceSpec]) -> dict[str, SpaceSpec]:
    return dict(sorted(spaces.items(), key=lambda item: len(item[1].index)))
