"""The fibres of the canonical form C: directions that fixing the gauges takes off the weights.

C never changes the function, f ∘ C = f, so at canonical weights J = J dC: whatever I - dC makes of a direction is null.
One derivative of C stands for all kinds of gauges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.symmetry.certificate.random_copy import Weights
from hf_align.symmetry.gauges.canonical import CanonicalWeights, Gauge


@dataclass(frozen=True)
class Fibres:
    """e - dC e for every entry e that a gauge may change, at canonical weights.

    Attributes:
        tangents: [entries, parameters], float64; they span the tangents of the fibre, and need not be independent of
            each other.
        entries: which of the parameters the rows are of.
    """

    tangents: Tensor
    entries: Tensor

    def across(self, directions: Tensor) -> Tensor:
        """dC δ for some δ, [directions, parameters]: along these, weights stay canonical."""
        return directions - directions[:, self.entries] @ self.tangents


def fibres(gauges: tuple[Gauge, ...], weights: Weights) -> Fibres:
    """Those of canonical weights, float64, by parameter name."""
    targets = {name for gauge in gauges for name in gauge.targets}
    total, at = sum(w.numel() for w in weights.values()), 0
    changed = {name: w for name, w in weights.items() if name in targets}

    def canonical(some: Weights) -> Tensor:
        fixed = CanonicalWeights(weights | some, gauges)
        return torch.cat([fixed[name].reshape(-1) for name in some])

    if not changed:
        return Fibres(torch.zeros(0, total, dtype=torch.float64), torch.zeros(0, dtype=torch.long))
    shown, pull_back = torch.func.vjp(canonical, changed)  # type: ignore[misc]
    derivative = torch.func.vmap(lambda one: pull_back(one)[0])(torch.eye(len(shown)).to(shown))
    removed = torch.eye(len(shown)).to(shown) - torch.cat([derivative[n].reshape(len(shown), -1) for n in changed], 1)
    rows = torch.zeros(len(shown), total, dtype=torch.float64)
    places = {}
    for name, weight in weights.items():
        places[name], at = torch.arange(at, at + weight.numel()), at + weight.numel()
    entries = torch.cat([places[name] for name in changed])
    rows[:, entries] = removed.T
    return Fibres(rows, entries)
