"""A LayerNorm between two streams that turn, each for itself: what is seen of its gain is a spectrum.

Of γ ⊙ n + β the stream behind sees P (γ ⊙ n + β), P = 1 - 11ᵀ/d, and n = Pn. So M = P diag(γ) P may become R M Rᵀ if n
becomes Rn, and the stream behind turns by R, too. The eigenvalues of M are the critical points of p(x) = Π (x - γ_j):
those of p + c are the same, and its roots are another gain, as long as all of them are real.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape, along
from hf_align.symmetry.gauges.folds import Carried, all_carriers
from hf_align.symmetry.gauges.index_provenance import LosesMean
from hf_align.symmetry.gauges.shears import ShearAlongMean, is_nearly_orthogonal_to_ones
from hf_align.symmetry.interpreter.values import Gain, Interpretation

_APART = 1e-9
"""Of the largest gain: two that are nearer to each other than that are taken for one, which no c takes apart."""
_STILL = 1e-9
"""Of the way to the next critical point: a root that moves less is found by steps of Newton's."""
_HALVINGS = 32
"""A step of Newton's doubles the digits."""


@dataclass(frozen=True)
class LevelSpectrum(Gauge):
    """The roots of p + c replace γ, and both streams turn, for the c in the middle of all that leave the roots real.

    The mean of γ ⊙ n + β changes, too. Where linear maps W see that of the stream behind, x becomes (I + 1vᵀ) Rx, and
    W (I - 1vᵀ) Rᵀ replaces W, for the v with v·1 = 0 that does to Rγ ⊙ n what the new gain does.

    Attributes:
        carried: all weights along one of the streams, but the gain.
        writers: what writes the stream behind, and the axis along which it does, if something sees its mean.
        readers: each W, and the axis along which it reads.
    """

    gain: str
    offset: float
    carried: tuple[Carried, ...]
    writers: tuple[tuple[str, int], ...] = ()
    readers: tuple[tuple[str, int], ...] = ()

    said = "turned until the gain between two streams is the middle one of those that do the same"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.gain, *dict.fromkeys(c.weight for c in self.carried))

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.gain)[-1]}

    def fix(self, name: str, get: Get) -> Tensor:
        gain = get(self.gain).double() + self.offset
        found = _levelled_once(gain)
        if found is None:
            return get(name)
        levelled, turn = found
        lean = _lean(gain, levelled, turn) if self.readers else torch.zeros_like(gain)
        if lean is None:
            return get(name)
        if name == self.gain:
            return (levelled - self.offset).to(get(name).dtype)
        turned = get(name).double()
        for carried in self.carried:
            if carried.weight == name:
                turned = carried.turned(turned, turn)
        for weight, axis in self.writers:
            if weight == name:
                turned = turned + torch.tensordot(lean, turned, ([0], [axis])).unsqueeze(axis)
        for weight, axis in self.readers:
            if weight == name:
                turned = turned - along(turned.sum(axis, keepdim=True).expand_as(turned), axis, lean)
        return turned.to(get(name).dtype)


def _lean(gain: Tensor, levelled: Tensor, turn: Tensor) -> Tensor | None:
    """The v with v·1 = 0 for which 1vᵀRγ ⊙ n is the change of the mean of all n of mean zero; none if there is none."""
    unseen = 1 / gain
    if bool((gain == 0).any()) or is_nearly_orthogonal_to_ones(unseen):
        return None
    mean = (levelled @ turn / gain - 1) / len(gain)
    return turn @ (mean - mean.sum() / unseen.sum() * unseen)


def level_spectra(
    found: Interpretation,
    between: Collection[Gain],
    gone: Collection[str],
    shears: Collection[ShearAlongMean],
    loses_mean: LosesMean,
) -> Iterator[LevelSpectrum]:
    """The gauges of such norms, if nothing but the one gain keeps their streams from turning.

    Args:
        between: gains between streams that could turn without them.
        gone: gains that have gone into other weights.
        shears: the gauges of streams of which something sees the mean.
    """
    staying = [gain for gain in found.gains if gain.parameter not in gone]
    for name in dict.fromkeys(gain.parameter for gain in between):
        alike = [gain for gain in found.gains if gain.parameter == name]
        sides = {(gain.source.root.space, gain.target.root.space) for gain in alike}
        is_vector = len(found.weights[name].axes) == 1
        if name in gone or not is_vector or len(sides) > 1 or not all(gain in between for gain in alike):
            continue
        ((source, target),) = sides
        met = [g for g in staying if g not in alike and {g.source.root.space, g.target.root.space} & {source, target}]
        before, behind = (all_carriers(axis, found) for axis in (alike[0].source, alike[0].target))
        if met or source.bound.fixed or target.bound.fixed or before is None or behind is None:
            continue
        turned = before if source is target else (*before, *behind)
        shear = next((s for s in shears if s.gain == name and not s.shifted), None)
        if all(loses_mean(user, gain.node) for gain in alike for user in gain.node.users):
            yield LevelSpectrum(name, alike[0].offset, turned)
        elif shear is not None:
            yield LevelSpectrum(name, alike[0].offset, turned, shear.writers, shear.readers)


def _levelled_once(gain: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `_levelled`; what was found last is used again, for every weight along a stream asks for the same."""
    if gain.requires_grad or is_functorch_wrapped_tensor(gain):
        return _levelled(gain)
    found = _levelled_of(tuple(gain.tolist()))
    return None if found is None else (found[0].to(gain.device), found[1].to(gain.device))


@lru_cache(maxsize=4)
def _levelled_of(gain: tuple[float, ...]) -> tuple[Tensor, Tensor] | None:
    return _levelled(torch.tensor(gain, dtype=torch.float64))


def _levelled(gain: Tensor) -> tuple[Tensor, Tensor] | None:
    """The roots of p + c, and R."""
    order = gain.argsort()
    roots = gain[order]
    if len(roots) < 3 or bool((roots.diff() <= _APART * roots.abs().max()).any()):
        return None
    middles = _critical_points(roots)
    heights = (middles[:, None] - roots).abs().log().sum(1)
    last = len(roots) - 1 - torch.arange(len(middles), device=roots.device)  # p is positive right of all its roots
    above, below = heights[last % 2 == 0].min(), heights[last % 2 == 1].min()
    unit = torch.maximum(above, below).detach()
    levelled = _moved_roots(roots, middles.detach(), ((below - unit).exp() - (above - unit).exp()) / 2, unit)
    before, after = _eigenvectors(roots, middles), _eigenvectors(levelled, middles)
    turn = after.mT @ before + 1 / len(roots)
    back = order.argsort()
    return levelled[back], turn[back][:, back]


def _eigenvectors(roots: Tensor, middles: Tensor) -> Tensor:
    """Of P diag(γ) P, [middles, entries]: u with (γ - μ) ⊙ u = 1."""
    vectors = 1 / (roots - middles[:, None])
    return vectors / vectors.norm(dim=1, keepdim=True)


def _critical_points(roots: Tensor) -> Tensor:
    """Where Σ 1 / (x - γ_j) is zero, one between two neighbours."""

    def newton(x: Tensor, roots: Tensor) -> Tensor:
        slope = -(x[:, None] - still).square().reciprocal().sum(1)
        return x - (1 / (x[:, None] - roots)).sum(1) / slope

    still = roots.detach()
    found = _halved(still[:-1], still[1:], lambda x: (1 / (x[:, None] - still)).sum(1) > 0)
    return newton(newton(found, still), roots)  # exact before it is differentiated


def _moved_roots(roots: Tensor, middles: Tensor, shift: Tensor, unit: Tensor) -> Tensor:
    """The roots of p + c, c = shift · exp(unit): x = γ_j - c / q_j(x) for q_j = p / (x - γ_j)."""
    still, constant, size = roots.detach(), shift.detach(), len(roots)
    alone = torch.eye(size, dtype=torch.bool, device=roots.device)
    every = torch.arange(size, device=roots.device)
    signs = torch.where((size - 1 - every) % 2 == 0, 1.0, -1.0).to(still)  # of q_j between the neighbours of γ_j

    def step(x: Tensor, which: Tensor, roots: Tensor, shift: Tensor) -> Tensor:
        """c / q_j(x)."""
        others = torch.where(alone[which], 1.0, (x[:, None] - roots).abs()).log().sum(1)
        return shift * signs[which] * (unit - others).exp()

    outside = (unit / size).exp()  # |p| is larger than |c| there
    left, right = torch.cat([still[:1] - outside, middles]), torch.cat([middles, still[-1:] + outside])
    far = torch.where(constant * signs > 0, left, right)
    found = still.clone()
    (moving,) = torch.where(step(still, every, still, constant).abs() > _STILL * (far - still).abs())
    found[moving] = _halved(
        still[moving], far[moving],
        lambda x: (x - still[moving]).abs() < step(x, moving, still, constant).abs(),
    )  # fmt: skip

    def newton(x: Tensor, roots: Tensor, shift: Tensor) -> Tensor:
        slope = torch.where(alone, 0.0, 1 / torch.where(alone, 1.0, x[:, None] - still)).sum(1)
        return x - ((x - roots) + step(x, every, roots, shift)) / (1 + (x - still) * slope)

    return newton(newton(found, still, constant), roots, shift)


def _halved(near: Tensor, far: Tensor, goes_on: Callable[[Tensor], Tensor]) -> Tensor:
    """Where something ends that holds from one end of each interval on."""
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        further = goes_on(middle)
        near, far = torch.where(further, middle, near), torch.where(further, far, middle)
    return (near + far) / 2
