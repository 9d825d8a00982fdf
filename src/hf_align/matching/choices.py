"""Which spaces move, and together or apart: the choices of Verma & Elbayad (arXiv 2403.00986, section 3.2) as specs.

Some leave the function alone (fewer spaces move), two do not: they are the paper's baselines, and say so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hf_align.errors import HfAlignError, OptionError
from hf_align.matching.features import Moments, Site
from hf_align.matching.head_families import head_families, spaces_of_heads
from hf_align.matching.heads import PAIRINGS
from hf_align.matching.stream import residual as residual_stream
from hf_align.symmetry.groups import GeneralLinear, Orthogonal, Permutation
from hf_align.symmetry.spec import AxisActions, Factor, Segment, SpaceSpec, SymmetrySpec

_SHOWN = 8
"""Names in a message."""


def as_chosen(spec: SymmetrySpec, residual: str, heads: str, spaces: Sequence[str]) -> SymmetrySpec:
    """The spec with all choices but "separate", which needs the order of the sites.

    Raises:
        HfAlignError: a choice that this architecture does not have.
    """
    return with_spaces(with_heads(with_residual(spec, residual), heads), spaces)


def with_residual(spec: SymmetrySpec, choice: str) -> SymmetrySpec:
    """The spec with the residual stream's group lowered as chosen; "separate" also needs the order of the sites."""
    if choice == "orthogonal":
        return spec
    if choice == "identity":
        return _without_groups(spec, [s for s in [residual_stream(spec)] if s is not None])
    lowered = {
        name: replace(s, group=Permutation(s.size), allowed=s.group)
        if isinstance(s.group, Orthogonal) and not isinstance(s.group, GeneralLinear)
        else s
        for name, s in spec.spaces.items()
    }
    return replace(spec, spaces=lowered)


def with_heads(spec: SymmetrySpec, choice: str) -> SymmetrySpec:
    """The spec with heads that are paired, that stay in the order they are in, or as if there were none.

    Raises:
        HfAlignError: heads cannot be ignored where several query heads share one.
    """
    if choice in PAIRINGS:
        return spec
    if choice == "monotonic":
        return _without_groups(spec, spaces_of_heads(spec))
    for tree in head_families(spec):
        if tree.subheads is not None:
            raise HfAlignError("--heads ignore-heads needs as many key as query heads")
        spec = _without_heads(spec, tree.heads, (*tree.inner, *tree.held))
    return spec


def with_spaces(spec: SymmetrySpec, patterns: Sequence[str]) -> SymmetrySpec:
    """The spec in which only spaces whose names match a pattern (`*.layers.3.*`, `*.hidden`) move; all without one.

    Raises:
        OptionError: a pattern matches no space.
    """
    for pattern in patterns:
        if not fnmatch.filter(spec.spaces, pattern):
            shown = ", ".join([*spec.spaces][:_SHOWN]) + (", ..." if len(spec.spaces) > _SHOWN else "")
            raise OptionError(f"no space is called {pattern}; there are {shown or 'none'} (hf-align spec lists them)")
    moving = {name for pattern in patterns for name in fnmatch.filter(spec.spaces, pattern)}
    return _without_groups(spec, [s for s in spec.spaces if s not in moving]) if patterns else spec


def chosen_sites(spec: SymmetrySpec, moments: Mapping[Site, Moments], choice: str) -> dict[Site, Moments]:
    """The features to match by: of the residual stream's, only the first or the last where that is the choice."""
    stream = residual_stream(spec)
    reading = [s for s in moments if stream is not None and stream in _spaces(spec.parameters[s.weight][s.axis])]
    kept = {"first": reading[:1], "last": reading[-1:]}.get(choice, reading)
    return {s: m for s, m in moments.items() if s not in reading or s in kept}


def separated(spec: SymmetrySpec, order: Sequence[Site]) -> SymmetrySpec:
    """A space of its own for the residual stream in front of every weight that reads it: what writes the stream writes
    into the next one, and the skip connections between them are ignored.

    Args:
        order: all sites, as they run.
    """
    stream = residual_stream(spec)
    if stream is None:
        return spec
    reads = [s.weight for s in order if stream in _spaces(spec.parameters[s.weight][s.axis])]
    ran = [s.weight for s in order]
    names = {weight: f"{stream} before {weight}" for weight in reads}

    def next_read(weight: str) -> str:
        behind = ran[ran.index(weight) + 1 :] if weight in ran else ran
        return names[next((w for w in behind if w in names), reads[-1])]

    def renamed(weight: str, axis: int, actions: AxisActions) -> AxisActions:
        if stream not in _spaces(actions):
            return actions
        reading = any(s.weight == weight and s.axis == axis for s in order)
        name = names[weight] if reading else next_read(weight)
        return tuple(tuple(replace(f, space=name) if f.space == stream else f for f in s) for s in actions)

    parameters = {
        n: tuple(renamed(n, i, actions) for i, actions in enumerate(axes)) for n, axes in spec.parameters.items()
    }
    apart = {name: replace(spec.spaces[stream], name=name) for name in dict.fromkeys(names.values())}
    rest = {n: s for n, s in spec.spaces.items() if n != stream}
    return replace(spec, parameters=parameters, spaces={**apart, **rest})


def _without_groups(spec: SymmetrySpec, names: Iterable[str]) -> SymmetrySpec:
    still = {n: replace(spec.spaces[n], group=None, allowed=None) for n in names}
    return replace(spec, spaces={**spec.spaces, **still})


def _without_heads(spec: SymmetrySpec, heads: str, inner: Sequence[str]) -> SymmetrySpec:
    """Every entry of all heads of the inner spaces as one unit among h·n; those that no weight reads stand still."""
    flat = {name: f"{name} of all heads" for name in inner}

    def flattened(segment: Segment) -> Segment:
        merged: list[Factor] = []
        for factor in segment:
            if merged and merged[-1].space == heads and factor.space in flat:
                if factor.within is not None:
                    raise HfAlignError("--heads ignore-heads cannot be done where queries, keys and values alternate")
                before = merged.pop()
                size = before.size * factor.size
                factor = Factor(size, flat[factor.space], (1,), before.within)
            merged.append(factor)
        return tuple(merged)

    parameters = {n: tuple(tuple(flattened(s) for s in axis) for axis in axes) for n, axes in spec.parameters.items()}
    units = {
        new: SpaceSpec(new, spec.spaces[heads].size * spec.spaces[old].size,
                       Permutation(spec.spaces[heads].size * spec.spaces[old].size), (), spec.spaces[old].reasons)
        for old, new in flat.items()
    }  # fmt: skip
    rest = {n: s for n, s in spec.spaces.items() if n not in flat and n != heads}
    return replace(spec, parameters=parameters, spaces={**units, **rest})


def _spaces(actions: AxisActions) -> set[str | None]:
    return {f.space for segment in actions for f in segment}
