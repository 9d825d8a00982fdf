"""Weight matching: the alignment that brings B's weights closest to A's (Git Re-Basin, arXiv 2209.04836, section 3.2;
Theus et al., 2506.22712, section 4), over whatever groups the spec has.

Both models are put into the canonical gauge and balanced first; then the spaces are visited in turn, each solved
exactly with all others held still, until the objective ⟨A, gB⟩ no longer rises. It never falls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from hf_align.matching.anchors import anchored, start
from hf_align.matching.cross import cross, inner_product
from hf_align.matching.heads import match_heads, trees
from hf_align.matching.kept import KEPT, KeptWeights
from hf_align.matching.match import Match
from hf_align.symmetry.alignment import MovedWeights, balance, compose, distance
from hf_align.symmetry.elements import Element
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.groups import Orthogonal, OrthogonalFixingOnes, Permutation
from hf_align.symmetry.spec import SymmetrySpec

_SWEEPS = 50
_STILL = 1e-7

Progress = Callable[[int, float], None]


def with_permuted_residual(spec: SymmetrySpec) -> SymmetrySpec:
    """The spec with its orthogonal spaces lowered to permutations."""
    lowered = {
        name: replace(s, group=Permutation(s.size)) if type(s.group) in (Orthogonal, OrthogonalFixingOnes) else s
        for name, s in spec.spaces.items()
    }
    return replace(spec, spaces=lowered)


def match_weights(
    spec: SymmetrySpec, a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, progress: Progress | None = None
) -> Match:
    """Match two models of one architecture.

    Args:
        a, b: raw weights by name in memory, any float dtype; read several times.
        progress: called after each sweep with its number and the objective.
    """
    balanced_a, gauge_a = _balanced(spec, a)
    balanced_b, gauge_b = _balanced(spec, b)
    elements, sweeps = descend(spec, balanced_a, balanced_b, progress)
    return Match(
        a=gauge_a,
        b=compose(spec, elements, gauge_b),
        before=distance(balanced_a, balanced_b),
        after=distance(balanced_a, MovedWeights(balanced_b, spec, elements)),
        sweeps=sweeps,
    )


def _balanced(spec: SymmetrySpec, raw: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, Element]]:
    canonical = KeptWeights(CanonicalWeights(raw, spec.gauges), spec.parameters, most=0)
    gauge = balance(spec, canonical)
    return KeptWeights(MovedWeights(canonical, spec, gauge), spec.parameters, KEPT), gauge


def descend(
    spec: SymmetrySpec, a: Mapping[str, Tensor], b: Mapping[str, Tensor], progress: Progress | None = None
) -> tuple[dict[str, Element], int]:
    """Coordinate descent over spaces from the anchors; the elements for B, and the number of sweeps."""
    families = trees(spec)
    grouped = frozenset[str]().union(*(t.spaces for t in families))
    widest_first = sorted(spec.spaces, key=lambda s: -len(list(spec.uses(s))))
    single = [s for s in widest_first if s not in grouped and spec.spaces[s].group is not None]
    elements: dict[str, Element] = {}
    wide = [s for s in single if len(list(spec.uses(s))) > len(anchored(spec, s))]
    if wide and (first := start(spec, wide[0], a, b)) is not None:
        elements[wide[0]] = first
    best = float("-inf")
    sweep = 0
    for sweep in range(1, _SWEEPS + 1):
        for tree in families:
            elements.update(match_heads(spec, tree, a, b, elements))
        for space in reversed(single):
            group = spec.spaces[space].group
            assert group is not None
            elements[space] = group.nearest(cross(spec, space, a, b, elements))
        objective = inner_product(spec, a, b, elements)
        assert objective >= best - 1e-9 * abs(best), "coordinate descent lowered its objective"
        if progress is not None:
            progress(sweep, objective)
        if objective - best <= _STILL * abs(objective):
            break
        best = objective
    return elements, sweep
