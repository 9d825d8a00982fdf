"""Maps that mix units: doubly stochastic ones, and semi-permutations. They are NOT symmetries.

An elementwise function commutes with permutations alone, so a model moved by one of these computes something else; what
they buy is a merge that need not decide between units that are alike. They are found between models that are matched
already, for units by themselves: heads and experts, whose interiors were matched in pairs, stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hf_align.matching.cross import cross
from hf_align.matching.latent import Blend
from hf_align.running.network import Weights
from hf_align.symmetry.elements import Monomial
from hf_align.symmetry.groups.fit import summed
from hf_align.symmetry.spec import SymmetrySpec

_ROUNDS = 200
"""Sinkhorn normalisations of rows and columns at most."""


def sinkhorn(fit: Tensor, temperature: float) -> Tensor:
    """The doubly stochastic matrix [*, n, n] that maximises ⟨S, fit⟩ and temperature times its entropy (Cuturi,
    arXiv 1306.0895), by scaling rows and columns in turn: rows sum to one exactly, columns nearly.

    Args:
        fit: [*, n, n] float64.
        temperature: in units of the fit; towards zero it becomes an assignment.
    """
    logs = fit / temperature
    for _ in range(_ROUNDS):
        logs = logs - logs.logsumexp(-2, keepdim=True)
        logs = logs - logs.logsumexp(-1, keepdim=True)
    return logs.exp()


def favourites(fit: Tensor) -> Tensor:
    """The semi-permutation [*, n, n] in which every unit of A takes the unit of B that fits it best, whoever else does:
    rows with a single one."""
    return torch.nn.functional.one_hot(fit.argmax(-1), fit.shape[-1]).to(fit)


def likeness(spec: SymmetrySpec, a: Weights, b: Weights) -> dict[str, Tensor]:
    """How alike the units of two matched models are: the cosine of all their weights, [*index, n, n] by space."""
    found = {}
    for name in units(spec):
        products = [summed(cross(spec, name, x, y, {})) for x, y in ((a, b), (a, a), (b, b))]
        sizes = [p.diagonal(dim1=-2, dim2=-1).clamp_min(1e-30).sqrt() for p in products[1:]]
        found[name] = products[0] / (sizes[0][..., :, None] * sizes[1][..., None, :])
    return found


def blends(spec: SymmetrySpec, maps: Mapping[str, Tensor]) -> dict[str, Blend]:
    """Matrices [*index, n, n] as elements, which move writers and readers alike."""
    found = {}
    for name, matrix in maps.items():
        still = spec.group(name).identity(spec.index_shape(name))
        assert isinstance(still, Monomial)
        found[name] = Blend(still.order, still.scale, matrix)
    return found


def units(spec: SymmetrySpec) -> Iterator[str]:
    """The permuted spaces with nothing inside."""
    for name, space in spec.spaces.items():
        if space.group is not None and space.group.permutes and not spec.indexed_by(name):
            yield name
