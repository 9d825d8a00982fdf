"""Gauges: choices of the weights that the function does not see, and one canonical choice for each.

Raw weights of two models differ in these for no reason; fixed, the models become comparable and the groups larger.
Every gauge rewrites single tensors, from a few others, so that a checkpoint is canonicalised tensor by tensor.

* the gain of a norm moves into its readers, and its bias into theirs; a gain on what one weight writes, into that;
* a constant that only biases and softmaxes see, such as the bias of keys, of values, or of a norm whose gain stays,
  is dropped, or moves into these;
* the readers of a norm whose gain stays, or of what a narrower value was mapped to, lose what they never see, or carry
  what its bias gave them;
* the statistics of a BatchNorm move into its gain and bias;
* what writes a LayerNorm stream, or a head that is normalised, loses its mean, and so do the readers of its output,
  and what a softmax reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from hf_align.checkpoints.ondemand import OnDemand

Get = Callable[[str], Tensor]
Shape = Callable[[str], Sequence[int]]
"""Of a parameter, by its name."""


class Gauge(ABC):
    """One choice, fixed: new values for `targets`, from the old values of some tensors.

    Attributes:
        said: what a report says of a weight that it changes.
        counts_on_others: whether it may hold only for what others have made canonical: a norm's bias that has left, or
            constants that readers of such a norm keep.
    """

    said: str = "a free choice, fixed"
    counts_on_others: bool = True

    @property
    @abstractmethod
    def targets(self) -> tuple[str, ...]: ...

    @property
    def summary(self) -> str:
        """Its kind, and what it changes."""
        return f"{type(self).__name__}: {', '.join(self.targets)}"

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        """The sizes of the activations that change, and not only the weights around them: a stream's mean, what a norm
        gives. All sizes of the targets may be, unless a gauge knows better."""
        return {size for name in self.targets for size in shape(name)}

    @abstractmethod
    def fix(self, name: str, get: Get) -> Tensor:
        """The new value of one target; `get` reads tensors as they were before this gauge."""


Slices = tuple[tuple[int, int], ...]
"""Entries of a vector as consecutive [start, stop) runs."""


def along(tensor: Tensor, axis: int, factors: Tensor) -> Tensor:
    """A tensor times one factor for each entry of an axis."""
    shape = [1] * tensor.dim()
    shape[axis] = -1
    return tensor * factors.reshape(shape)


def root_mean_squares(tensor: Tensor) -> Tensor:
    """The root mean square of each row."""
    rows = tensor.double().flatten(1)
    largest = rows.detach().abs().amax(1)
    unit = torch.where(largest > 0, largest, 1.0)
    squares = (rows / unit[:, None]).square().mean(1)
    return torch.where(largest > 0, unit * torch.where(largest > 0, squares, 1.0).sqrt(), 0.0)


class CanonicalWeights(OnDemand):
    """Weights with every gauge fixed, computed from `raw` tensor by tensor as they are asked for."""

    def __init__(self, raw: Mapping[str, Tensor], gauges: tuple[Gauge, ...]) -> None:
        super().__init__(raw)
        self._raw = raw
        self._gauges = gauges
        self._moves: dict[str, list[int]] = {}
        for i, gauge in enumerate(gauges):
            for name in gauge.targets:
                self._moves.setdefault(name, []).append(i)

    def __getitem__(self, name: str) -> Tensor:
        return self._before(name, len(self._gauges))

    def _before(self, name: str, stage: int) -> Tensor:
        earlier = [i for i in self._moves.get(name, ()) if i < stage]
        if not earlier:
            return self._raw[name]
        last = earlier[-1]
        return self._gauges[last].fix(name, lambda other: self._before(other, last))
