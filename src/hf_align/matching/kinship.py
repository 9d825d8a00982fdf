"""Whether models share a basis already, as fine-tunes of one base do (Neyshabur et al., arXiv 2008.11687)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.functional import cosine_similarity

_SAMPLED = 16
"""Matrices that are compared: independent ones of thousands of entries are orthogonal to a few hundredths."""
_ALIKE = 0.5


def share_basis(weights: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether the matrices of all models point the same way as those of the first.

    Args:
        weights: of each model, by name in memory; a sample of the matrices is read.

    Returns:
        True if the mean cosine is above one half for every model; models of different seeds are near zero.
    """
    first, *others = weights
    matrices = [name for name in first if first[name].ndim > 1]
    sample = matrices[:: max(1, len(matrices) // _SAMPLED)]
    if not sample:
        return False
    return all(_cosine(first, other, sample) > _ALIKE for other in others)


def _cosine(first: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Sequence[str]) -> float:
    if any(name not in other or other[name].shape != first[name].shape for name in names):
        return 0.0
    found = (cosine_similarity(first[n].flatten().double(), other[n].flatten().double(), dim=0) for n in names)
    return float(sum(found)) / len(names)
