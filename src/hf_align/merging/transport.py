"""A fine-tune carried to another base: B does on top of its own what the fine-tune does on top of A.

All models are in one basis. What is added to B's weights is F − A (task arithmetic, arXiv 2212.04089), which knows
nothing of how B's activations differ from A's. From there every weight is fitted in the order of the graph
(`regression.py`) such that what it gives is B's + λ (F's − A's); at the output that is the arithmetic of logits of
proxy tuning (arXiv 2401.08565), held by the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.checkpoints.ondemand import Computed
from hf_align.merging.aligned import Weights
from hf_align.merging.regression import Solved, regress
from hf_align.merging.samples import Samples
from hf_align.running.generate import own_inputs
from hf_align.running.network import Batch, Network

MOST, LENGTH = 512, 64
"""Examples that the models are run on, and tokens of those that the fine-tune writes."""


@dataclass(frozen=True)
class Fine:
    """A fine-tune, what it was tuned from, and what it is carried to, in one basis.

    Attributes:
        onto, base, finetuned: weights by name in memory: B's, A's and F's.
        strength: λ, how much of the change is carried over.
    """

    onto: Weights
    base: Weights
    finetuned: Weights
    strength: float = 1.0

    @property
    def by_vector(self) -> Weights:
        """B + λ (F − A), tensor by tensor, in the dtype of B's."""

        def moved(name: str) -> Tensor:
            onto, base, finetuned = (weights[name] for weights in (self.onto, self.base, self.finetuned))
            if not onto.is_floating_point():
                return onto
            wide = torch.promote_types(onto.dtype, torch.float32)
            return (onto.to(wide) + self.strength * (finetuned.to(wide) - base.to(wide))).to(onto.dtype)

        return Computed(self.onto, moved)

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of B, A and F in what is aimed at."""
        return 1.0, -self.strength, self.strength

    def solve(self, samples: Samples, solved: Solved) -> None:
        """Fit every weight that can be fitted, and that `solved` does not have yet.

        Raises:
            HfAlignError: as `regress`.
        """
        regress((self.onto, self.base, self.finetuned), self.shares, samples, self.by_vector, solved)


def samples_of(finetuned: Weights, network: Network, data: Batch | None, say: Callable[[str], None]) -> Samples:
    """What the models are run on: some of the data, or what the fine-tune writes itself."""
    if data is None:
        say(f"no data: the models are run on {MOST} inputs of the fine-tune's own, or on noise if it cannot generate")
        found = own_inputs(network, network.placed(finetuned), MOST, LENGTH, 0)
    else:
        found = {k: t[:MOST] for k, t in data.items() if k != "labels"}
    return Samples(network, (found,))
