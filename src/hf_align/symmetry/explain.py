"""Why a parameter moves as it does: in terms of the modules and lines of the modelling code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from hf_align.symmetry.spec import Factor, SymmetrySpec, format_axis
from hf_align.tracing.program import Evidence


def explain(spec: SymmetrySpec, parameter: str) -> dict[str, Any]:
    """The spaces of a parameter's axes, what bounds or pins each, and the gauges that touch it; plain data.

    Raises:
        KeyError: there is no such parameter.
    """
    axes = spec.parameters[parameter]
    factors = [[f for segment in axis for f in segment] for axis in axes]
    moving = dict.fromkeys(space for axis in factors for f in axis for space in f.powers)
    return {
        "parameter": parameter,
        "axes": [format_axis(axis) for axis in axes],
        "spaces": {name: _described(spec, name, parameter) for name in moving},
        "pinned": {f"axis {i}": why for i, axis in enumerate(factors) if (why := _why_pinned(spec, axis, parameter))},
        "gauges": _gauges(spec, parameter),
    }


def _described(spec: SymmetrySpec, name: str, parameter: str) -> dict[str, Any]:
    space = spec.spaces[name]
    return {
        "size": space.size,
        "group": space.group_name,
        "differs_over": list(space.index),
        "because": _by_line(space.reasons, parameter),
    }


def _why_pinned(spec: SymmetrySpec, axis: list[Factor], parameter: str) -> list[str]:
    """What pins the parts of an axis that nothing moves; empty if all of it moves."""
    still = [f for f in axis if f.space is None and f.size > 1]
    reasons = [e for f in still if f.pin for e in spec.pinned[f.pin].reasons]
    if still and not reasons:
        return [f"fixed by {g}" for g in _gauges(spec, parameter)] or ["its parts do not separate into spaces"]
    return _by_line(reasons, parameter)


def _gauges(spec: SymmetrySpec, parameter: str) -> list[str]:
    return [gauge.summary for gauge in spec.gauges if parameter in gauge.targets]


def _by_line(reasons: Iterable[Evidence], parameter: str) -> list[str]:
    """One entry for each line of the code, in the module nearest to the parameter; layers repeat the rest."""
    modules: dict[tuple[str, str, str], list[str]] = {}
    for e in reasons:
        modules.setdefault((e.role, e.op, e.line), []).append(e.module)
    lines = []
    for (role, op, line), found in modules.items():
        nearest = max(found, key=lambda module: _shared_levels(module, parameter))
        others = f" and {len(set(found)) - 1} more modules" if len(set(found)) > 1 else ""
        where = f" at {line} in {nearest or 'the model'}{others}" if line else ""  # what no call reads has no line
        lines.append(f"{role}: {op}{where}")
    return lines


def _shared_levels(module: str, parameter: str) -> int:
    pairs = zip(module.split("."), parameter.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
