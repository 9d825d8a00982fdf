"""What every weight reads: activations of two models on the same inputs, compared in one pass.

The features of a space are the values that some weight contracts along it: what the MLP's last matrix reads, what the
output projection reads of attention, the normalised residual stream before every block. They are seen as the model
runs, by the op (`linear`, `addmm`, …) that takes a weight as its operand, so nothing needs to know a module. In them a
space acts as a primal axis, and so the cross-correlation of two models is one more tensor to match: activation
matching (Verma & Elbayad, arXiv 2403.00986, section 3.1) is weight matching on these tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_align.checkpoints.ondemand import Computed
from hf_align.running.network import Batch, Gram, Network, Weights
from hf_align.runtime.devices import as_double
from hf_align.symmetry.elements import dual
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.spec import AxisActions, Factor, SymmetrySpec
from hf_align.tracing.ops import Trait, factors_named, traits_of


@dataclass(frozen=True)
class Reads:
    """Where an op takes an activation and a weight, and which axes it contracts."""

    value: int
    weight: int
    value_axis: int
    weight_axis: int


@cache
def _reads(func: Any) -> Reads | None:
    """How an op reads a weight; None if it multiplies no matrix that all rows share."""
    name = getattr(func, "__name__", "")
    factors, traits = factors_named(name), traits_of(name)
    if factors is None or not traits & (Trait.AFFINE | Trait.CONTRACTS) or traits & Trait.BATCHED:
        return None
    if traits & Trait.CONVOLVES:
        return Reads(*factors[:2], 1, 1)
    return Reads(*factors[:2], -1, 1 if traits & Trait.OUTPUTS_FIRST else 0)


@dataclass(frozen=True)
class Site:
    """What a weight reads along one of its axes."""

    weight: str
    axis: int

    @property
    def name(self) -> str:
        return f"{self.weight} reads"


class Watch(TorchFunctionMode):
    """Collects what weights read while a model runs, [rows, n] by site; weights are known by identity -> name."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.seen: dict[Site, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = _reads(func)
        if reads is not None and len(args) > reads.weight and id(args[reads.weight]) in self._names:
            self._note(reads, args[reads.value], args[reads.weight])
        return func(*args, **(kwargs or {}))

    def _note(self, reads: Reads, value: Tensor, weight: Tensor) -> None:
        size = weight.shape[reads.weight_axis]
        if value.shape[reads.value_axis] != size:  # a convolution in groups
            return
        site = Site(self._names[id(weight)], reads.weight_axis)
        rows = value.detach().movedim(reads.value_axis, -1).reshape(-1, size)
        self.seen[site] = torch.cat([self.seen[site], rows]) if site in self.seen else rows


@dataclass
class Moments:
    """Sums over samples of what a site reads in two models, float64, in one pass; x, y [rows, n]."""

    count: int = 0
    sum_a: Tensor | float = 0.0
    sum_b: Tensor | float = 0.0
    square_a: Tensor | float = 0.0
    square_b: Tensor | float = 0.0
    product: Gram = field(default_factory=Gram)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count more samples."""
        x, y = as_double(x), as_double(y)
        self.count += len(x)
        self.sum_a, self.sum_b = self.sum_a + x.sum(0), self.sum_b + y.sum(0)
        self.square_a, self.square_b = self.square_a + x.square().sum(0), self.square_b + y.square().sum(0)
        self.product.add(x, y)

    @property
    def width(self) -> int:
        """n."""
        return len(torch.as_tensor(self.sum_a))

    @property
    def second_moment(self) -> Tensor:
        """E[x yᵀ] / √(E|x|² E|y|²), [n, n]; zero where one of them is always zero."""
        size = torch.sqrt(torch.as_tensor(self.square_a).sum() * torch.as_tensor(self.square_b).sum())
        return self.product.total.cpu() / size.cpu().clamp_min(1e-300)

    @property
    def correlation(self) -> Tensor:
        """The correlation of every entry of x with every entry of y, [n, n]; zero for an entry that is constant."""
        sums = (self.sum_a, self.sum_b, self.square_a, self.square_b)
        mean_a, mean_b, square_a, square_b = (torch.as_tensor(s).cpu() / self.count for s in sums)
        covariance = self.product.total.cpu() / self.count - mean_a[:, None] * mean_b
        variances = (square_a - mean_a.square())[:, None] * (square_b - mean_b.square())
        return torch.where(variances > 1e-24, covariance / variances.clamp_min(1e-24).sqrt(), 0.0)


def compare(network: Network, a: Weights, b: Weights, batches: Iterable[Batch]) -> dict[Site, Moments]:
    """What two models read on the same inputs, site by site, in the order in which they run.

    Args:
        a, b: weights by name in memory, placed for the network.
    """
    found: dict[Site, Moments] = {}
    for batch in batches:
        seen = [watch(network, weights, batch) for weights in (a, b)]
        for site, x in seen[0].items():
            if site not in found:
                found[site] = Moments(product=network.gram())
            found[site].add(x, seen[1][site])
    return found


@torch.no_grad()
def watch(network: Network, weights: Weights, batch: Batch) -> dict[Site, Tensor]:
    """What every weight reads on a batch, [rows, n] by site, in the order in which they run."""
    eye = Watch(network.names(weights))
    with eye:
        network(weights, {name: t.to(network.device) for name, t in batch.items()})
    return eye.seen


def as_weights(spec: SymmetrySpec, moments: Mapping[Site, Moments]) -> tuple[SymmetrySpec, Weights, Weights]:
    """Features as weights to match: a spec whose parameters are the sites, and a tensor for each of both models.

    A tensor, computed as it is asked for, is [n, n], its first axis pinned; the two are such that their product over it
    is the cross-correlation of the features (its second moment where the space turns, for turning mixes entries of
    different size).
    """
    parameters: dict[str, tuple[AxisActions, ...]] = {}
    turning: dict[str, bool] = {}
    by_name = {site.name: found for site, found in moments.items()}
    for site, found in moments.items():
        axis = tuple(tuple(replace(f, power=dual(f.power)) for f in segment)
                     for segment in spec.parameters[site.weight][site.axis])  # fmt: skip
        turning[site.name] = any(_turns(spec, f) for segment in axis for f in segment)
        parameters[site.name] = (((Factor(found.width),),), axis)

    def cross(name: str) -> Tensor:
        found = by_name[name]
        return (found.second_moment if turning[name] else found.correlation).T

    a = Computed(by_name, cross)
    b = Computed(by_name, lambda name: torch.eye(by_name[name].width, dtype=torch.float64))
    used = {f.space for axes in parameters.values() for segment in axes[1] for f in segment}
    spaces = {n: s for n, s in spec.spaces.items() if n in used}
    return replace(spec, parameters=parameters, spaces=spaces, gains={}, ties={}), a, b


def _turns(spec: SymmetrySpec, factor: Factor) -> bool:
    group = spec.spaces[factor.space].group if factor.space else None
    return group is not None and not isinstance(group, ScaledPermutation)
