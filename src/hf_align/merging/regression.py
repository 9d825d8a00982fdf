"""Sequential regression: weight by weight in the order of the graph, the least squares towards what the models compute.

Each weight is fitted on the merged model's own activations, so that what the weights before it got wrong is seen and
made up for (RegMean++, arXiv 2508.03121, reads the same activations). The target of a weight is the mean of what it
gives in all models. Where the result is added to something, as blocks write into the residual stream, the target is
such that the sum becomes the mean of the sums. A ridge draws every weight to the mean of the models' weights, so that
what is never read is averaged, and copies of one model merge to it.

Where units (of MLPs, or heads) are permuted and one weight reads them, they are not averaged but chosen out of both
models (`selection.py`, `choice.py`): between two seeds, many units have no counterpart.

Of experts (`experts.py`), those of a layer are found together, for what they add up to.

The program is run once, in stages, with all models side by side. What is held is the values that some later node
reads, and the statistics of the weights of one stage.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, fx

from hf_align.checkpoints.checkpoint import is_finite
from hf_align.checkpoints.ondemand import Computed, OnDemand
from hf_align.errors import HfAlignError
from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.choice import Candidates, Choice
from hf_align.merging.experts import ExpertFit, expert_sites
from hf_align.merging.fits import Fit
from hf_align.merging.lockstep import ROWS, Lockstep, divided, program_of, require_same
from hf_align.merging.readings import fits_of
from hf_align.merging.samples import Samples, Taught
from hf_align.merging.selection import Units, disjoint, independent, units
from hf_align.merging.sites import Site, sites
from hf_align.merging.tensors import linear
from hf_align.running.network import Weights
from hf_align.symmetry.spec import SymmetrySpec

_SHOWN = 12
"""Kinds of weights that a line names."""

_PARTS = 4
"""Of the inputs at least, if there are as many: what is asked of the graph beforehand is asked on one."""

Solved = MutableMapping[str, Tensor]
"""Weights that were found, by name in memory, float32 on the CPU."""


def sequential_regression(models: Aligned, samples: Samples) -> Mix:
    """The regression of two models on samples of both, computed when the first weight is asked for."""

    @cache
    def at(weight: float) -> Regressed:
        return regression_of((models.a, models.b), (1 - weight, weight), samples, models.spec)

    return lambda name, weight: at(weight)[name]


def regression_of(
    models: Sequence[Weights], shares: Sequence[float], samples: Samples, spec: SymmetrySpec
) -> Regressed:
    """The regression of models in one basis on samples of all, in memory.

    Args:
        shares: of each of them, 1 in sum.

    Raises:
        HfAlignError: as `regress`.
    """
    mean, found = mean_of(models, shares), dict[str, Tensor]()
    regress(models, shares, samples, mean, found, choosing=spec)
    return Regressed(mean, found)


class Regressed(OnDemand):
    """A merge of models, by name in memory: the weights that were solved, in the dtypes of the mean, and the mean of
    all others."""

    def __init__(self, mean: Weights, solved: Mapping[str, Tensor]) -> None:
        super().__init__(mean)
        self.mean, self.solved = mean, solved

    def __getitem__(self, name: str) -> Tensor:
        mean = self.mean[name]
        return self.solved[name].to(mean) if name in self.solved else mean

    @property
    def note(self) -> str:
        """One line on the weights that keep the mean, those of all layers taken together."""
        names = list(self)
        mean = [n for n in names if n not in self.solved]
        kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", n) for n in mean))
        more = f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else ""
        kept = f"; the mean is kept of {', '.join(kinds[:_SHOWN])}{more}" if kinds else ""
        return f"regression solves {len(names) - len(mean)} of {len(names)} weights{kept}"


def mean_of(models: Sequence[Weights], shares: Sequence[float]) -> Weights:
    """Σ s·w of two models or more, in the dtypes of the first; the shares s are 1 in sum."""

    def mean(name: str) -> Tensor:
        first, *others = (model[name] for model in models)
        if len(others) == 1:
            return linear(first, others[0], shares[1])
        terms = (share * (other.float() - first.float()) for share, other in zip(shares[1:], others, strict=True))
        return sum(terms, first.float()).to(first)

    return Computed(models[0], mean)


def regress(
    models: Sequence[Weights],
    shares: Sequence[float],
    samples: Samples,
    start: Weights,
    solved: Solved,
    *,
    others: Sequence[Taught] = (),
    ranks: Mapping[str, int | None] | None = None,
    choosing: SymmetrySpec | None = None,
) -> None:
    """Find every weight that `solved` does not have yet and that can be regressed.

    Args:
        models: that run beside their merge.
        shares: of each of them in what is aimed at on the samples; 1 in sum, and negative for what is subtracted.
        start: where the ridge draws the weights to, and what those that are not fitted remain.
        others: further inputs, of the same arguments and lengths, on which something else is aimed at.
        ranks: that the changes of those weights may have that are fitted, None for any; without it all are fitted.
        choosing: the spaces whose units are chosen out of the models; without it every weight is fitted.

    Raises:
        HfAlignError: the model has no graph, or one that does not compute what it computes.
    """
    network, taught = samples.network, (Taught(samples.all, shares), *others)
    rows = min(ROWS, *(-(-each.count // _PARTS) for each in taught))
    parts = [(part, each.shares) for each in taught for part in divided(each.inputs, rows)]
    program = program_of(network, parts[0][0])
    require_same(program, network, models[0], parts[0][0])
    merged = Computed(start, lambda n: solved[n] if n in solved else start[n])
    single = sites(program) if ranks is None else [_within(s, ranks) for s in sites(program) if s.parameter in ranks]
    experts = expert_sites(program) if ranks is None else ()
    together: list[Units] = []
    if choosing is not None:
        apart = independent(units(program, choosing, single), models, program, network, parts[0][0])
        together = disjoint(apart, program)
    found: dict[fx.Node, Fit] = {s.choosing: ExpertFit(s, network, merged) for s in experts}
    alone = {s.node: s for s in single}
    for chosen in together:
        candidates = Candidates(chosen, network, models)
        for site in chosen.sites:
            del alone[site.node]
        found[chosen.writers[0].node] = candidates
        found[chosen.reader.node] = Choice(chosen, candidates, program, network, models, shares, start)
    found |= fits_of(alone.values(), network, models, merged, ranks or {})
    left = [found.pop(n) for n in program.graph.nodes if n in found]  # each has the statistics of its weights
    for half in (fit.names for fit in left if not fit.names <= solved.keys()):  # a run was killed between two
        for name in half & solved.keys():
            del solved[name]
    steps = Lockstep(program, network, [part for part, _ in parts], (*models, merged), _looked_up(left))
    while left:
        stage = steps.stage({name for fit in left for name in fit.names})
        ready = _next(left, steps)
        wanted = _looked_up(left)
        left = [fit for fit in left if fit not in ready]
        fits = [fit for fit in ready if not fit.names <= solved.keys()]
        ran = steps.run(stage, {n for fit in fits for n in fit.asked}, wanted)
        for lookups, (_, aim) in zip(ran, parts, strict=True):
            for fit in fits:
                fit.add(lookups, steps, aim)
        for fit in fits:
            for name, weight in _solution(fit).items():
                solved[name] = weight


def _solution(fit: Fit) -> dict[str, Tensor]:
    """What a fit has found.

    Raises:
        HfAlignError: there is none: what the models compute is beyond the range of numbers.
    """
    beyond = f"no regression finds {min(fit.names)}: numbers that the models compute are not finite, or too large"
    try:
        found = fit.solved()
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise HfAlignError(beyond) from error
    if not all(map(is_finite, found.values())):
        raise HfAlignError(beyond)
    return found


def _within(site: Site, names: Collection[str]) -> Site:
    """A site whose bias is fitted only if it is among some weights."""
    return site if site.bias in names else replace(site, bias=None)


def _looked_up(left: Sequence[Fit]) -> set[fx.Node]:
    """The values that fits depend on."""
    return {n for fit in left for n in fit.asked}


def _next(left: Sequence[Fit], steps: Lockstep) -> list[Fit]:
    """What is fitted now: the first fit whose inputs are known, and all others of which none makes up for the errors
    of another."""
    ready = [fit for fit in left if all(steps.is_known(v) for v in fit.reads)]
    if ready[0].makes_up:
        return ready[:1]
    return [fit for fit in ready if not fit.makes_up]
