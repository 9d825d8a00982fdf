"""Sequential regression: weight by weight in the order of the graph, the least squares towards what the models compute.

Each weight is fitted on the merged model's own activations, so that what the weights before it got wrong is seen and
made up for (RegMean++, arXiv 2508.03121, reads the same activations). The target of a weight is the mean of what it
gives in all models. Where the result is added to something, as blocks write into the residual stream, the target is
such that the sum becomes the mean of the sums. A ridge draws every weight to the mean of the models' weights, so that
what is never read is averaged, and copies of one model merge to it.

The program is run once, in stages, with all models side by side. What is held is the values that some later node
reads, and the statistics of the weights of one stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.lockstep import Lockstep, Lookup, divided, program_of, require_same
from hf_align.merging.samples import Samples
from hf_align.merging.sites import Site, sites
from hf_align.merging.tensors import linear
from hf_align.ondemand import Computed
from hf_align.running.network import Network, Weights
from hf_align.tracing.execute import call_wide

RIDGE = 1e-3
"""Against the mean of the diagonal of the Gram matrix."""

_SHOWN = 12
"""Kinds of weights that a line names."""

Solved = MutableMapping[str, Tensor]
"""Weights that were found, by name in memory, float32 on the CPU."""


def sequential_regression(models: Aligned, samples: Samples) -> Mix:
    """The regression of two models on samples of both, computed when the first weight is asked for."""
    found: dict[float, Solved] = {}

    def mix(name: str, weight: float) -> Tensor:
        if weight not in found:
            found[weight] = {}
            regress((models.a, models.b), (1 - weight, weight), samples, mean_of(models, weight), found[weight])
        return Regressed(models, found[weight])(name, weight)

    return mix


@dataclass(frozen=True)
class Regressed:
    """The merge of a parameter by its name: the weights that were solved, and the mean of all others.

    Attributes:
        solved: by name in memory.
    """

    models: Aligned
    solved: Mapping[str, Tensor]

    def __call__(self, name: str, weight: float) -> Tensor:
        """In the dtype of A's."""
        a = self.models.a[name]
        return self.solved[name].to(a) if name in self.solved else linear(a, self.models.b[name], weight)

    @property
    def note(self) -> str:
        """One line on the weights that keep the mean, those of all layers taken together."""
        names = self.models.spec.parameters
        mean = [n for n in names if n not in self.solved]
        kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", n) for n in mean))
        more = f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else ""
        kept = f"; the mean is kept of {', '.join(kinds[:_SHOWN])}{more}" if kinds else ""
        return f"regression solves {len(names) - len(mean)} of {len(names)} weights{kept}"


def mean_of(models: Aligned, weight: float) -> Weights:
    """The mean of all weights, with a share of B's."""
    mean = Regressed(models, {})
    return Computed(models.spec.parameters, lambda name: mean(name, weight))


def regress(
    models: Sequence[Weights], shares: Sequence[float], samples: Samples, start: Weights, solved: Solved
) -> None:
    """Find every weight that `solved` does not have yet and that can be regressed.

    Args:
        models: that run beside their merge.
        shares: of each of them in what is aimed at; 1 in sum, and negative for what is subtracted.
        start: where the ridge draws the weights to, and what those that are not fitted remain.

    Raises:
        HfAlignError: the model has no graph, or one that does not compute what it computes.
    """
    network, parts = samples.network, divided(samples.all)
    program = program_of(network, parts[0])
    require_same(program, network, models[0], parts[0])
    merged = Computed(start, lambda n: solved[n] if n in solved else start[n])
    left = sites(program)
    for half in (names for names in map(_names, left) if not names <= solved.keys()):  # a run was killed between two
        for name in half & solved.keys():
            del solved[name]
    steps = Lockstep(program, network, parts, (*models, merged), _looked_up(left))
    while left:
        stage = steps.stage([site.node for site in left])
        chosen = _next(left, steps)
        left = [site for site in left if site not in chosen]
        fits = [_Fit(site, network) for site in chosen if not _names(site) <= solved.keys()]
        for lookups in steps.run(stage, [fit.site.node for fit in fits], _looked_up(left)):
            for fit in fits:
                fit.add(lookups, steps, shares)
        for fit in fits:
            for name, step in fit.steps().items():
                solved[name] = merged[name].float().cpu() + step


def _looked_up(left: Sequence[Site]) -> set[fx.Node]:
    """The values that fits depend on."""
    return {n for site in left for n in (site.value, *(b.value for b in site.beside))}


def _names(site: Site) -> set[str]:
    return {site.parameter} | ({site.bias} if site.bias is not None else set())


def _next(left: Sequence[Site], steps: Lockstep) -> list[Site]:
    """What is fitted now: the first weight whose inputs are known, and all others of which none makes up for the
    errors of another."""
    ready = [site for site in left if steps.is_known(site.value)]
    if ready[0].beside:
        return ready[:1]
    return [site for site in ready if not site.beside]


class _Fit:
    """The least squares of one weight."""

    def __init__(self, site: Site, network: Network) -> None:
        self.site = site
        self._grams = [network.gram() for _ in range(site.groups)]
        self._products = [network.gram() for _ in range(site.groups)]

    def add(self, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float]) -> None:
        """Count one part of the inputs, looked up in the models and in their merge, which is the last."""
        site, (*models, merged) = self.site, lookups
        args, kwargs = fx.node.map_arg((site.node.args, site.node.kwargs), merged)
        result = call_wide(site.node, args, kwargs)
        missing = _mean([lookup(site.node) for lookup in models], shares) - result
        for beside in site.beside:
            if steps.is_known(beside.value):
                apart = _mean([lookup(beside.value) for lookup in models], shares) - merged(beside.value)
                missing = missing + beside.brought_back(apart, result, merged)
        rows, missing = site.rows(merged(site.value)).double(), site.results(missing).double()
        if site.bias is not None:
            rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
        for gram, product, x, y in zip(self._grams, self._products, rows, missing, strict=True):
            gram.add(x, x)
            product.add(x, y)

    def steps(self) -> dict[str, Tensor]:
        """By how much the weight, and the bias, differ from where they are, by name; float32 on the CPU."""
        found = torch.stack([ridge(g.value, p.value) for g, p in zip(self._grams, self._products, strict=True)])
        steps = {self.site.parameter: self.site.stored(found[:, : self.site.inputs]).float()}
        if self.site.bias is not None:
            steps[self.site.bias] = found[:, -1].reshape(-1).float()
        return steps


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Σ s·x, which is x where all are."""
    first, *others = values
    return sum((s * (x - first) for s, x in zip(shares[1:], others, strict=True)), first)


def ridge(gram: Tensor, product: Tensor, share: float = RIDGE) -> Tensor:
    """(XᵀX + λ)⁻¹ XᵀY, [n, m], with λ a share of the mean of the diagonal of XᵀX [n, n]; zero where X is."""
    held = share * gram.diagonal().mean().clamp_min(1e-30)
    return torch.linalg.solve(gram + held * torch.eye(len(gram), dtype=gram.dtype), product)
