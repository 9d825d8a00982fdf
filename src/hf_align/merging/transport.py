"""A fine-tune carried to another base: it answers as the fine-tune where that speaks, and as B where B does.

All models are in one basis. What is added to B's weights is F − A (task arithmetic, arXiv 2212.04089), which knows
nothing of how B's activations differ from A's. From there every weight is fitted in the order of the graph
(`regression.py`), or all of them are trained, towards what the models compute on two kinds of text.

On what the fine-tune writes the aim is B + (F − A) + g (A − B). With g = 0 that is the arithmetic of logits of proxy
tuning (arXiv 2401.08565): right for a fine-tune that changed little, since what B does better than A is kept. With
g = 1 it is F: right for one that learned a text of which neither base knows anything, since A's and B's errors there
have nothing in common. g is measured, 1 − exp(−KL(F ‖ A)). On what B writes the aim is B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.checkpoints.ondemand import Computed
from hf_align.merging.aligned import Weights
from hf_align.merging.distil import Together, TowardsMix
from hf_align.merging.regression import Solved, regress
from hf_align.merging.samples import Samples, Taught
from hf_align.running.generate import own_inputs, writes
from hf_align.running.network import Batch, Network, batches, predictions
from hf_align.tracing.build import build_without_weights

MOST, LENGTH = 512, 64
"""Examples that the models are run on, and tokens of those that the fine-tune writes."""
_OF_TEXT = {"input_ids", "attention_mask"}
"""Arguments that are known of a text that a model wrote."""
_ASKED = 128
"""Examples on which it is measured how far a fine-tune is from its base."""


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
    def models(self) -> tuple[Weights, Weights, Weights]:
        """B, A and F."""
        return self.onto, self.base, self.finetuned

    @property
    def by_vector(self) -> Weights:
        """B + λ (F − A), tensor by tensor, in the dtype of B's."""

        def moved(name: str) -> Tensor:
            onto, base, finetuned = (weights[name] for weights in self.models)
            if not onto.is_floating_point():
                return onto
            wide = torch.promote_types(onto.dtype, torch.float32)
            return (onto.to(wide) + self.strength * (finetuned.to(wide) - base.to(wide))).to(onto.dtype)

        return Computed(self.onto, moved)

    def shares(self, apart: float = 0.0) -> tuple[float, float, float]:
        """Of B, A and F in what is aimed at on the fine-tune's text: B + λ (F − A + g (A − B)).

        Args:
            apart: g, from 0 for a fine-tune that hardly differs from its base to 1.
        """
        return 1 - apart * self.strength, (apart - 1) * self.strength, self.strength

    def solve(self, texts: Texts, solved: Solved, ranks: Mapping[str, int | None] | None = None) -> None:
        """Fit every weight that can be fitted, and that `solved` does not have yet.

        Args:
            ranks: that the changes of those weights of B may have that are fitted, None for any; all others stay.

        Raises:
            HfAlignError: as `regress`.
        """
        others = () if texts.known is None else (Taught(texts.known, _ONTO),)
        start = self.by_vector if ranks is None else self.onto
        regress(self.models, self.shares(texts.apart), Samples(texts.network, texts.learned), start, solved,
                others=others, ranks=ranks)  # fmt: skip


_ONTO = (1.0, 0.0, 0.0)
"""Of B, A and F in B."""


@dataclass(frozen=True)
class Texts:
    """What the models are run on.

    Attributes:
        learned: what the fine-tune was trained on, or writes: one batch or more, without labels.
        known: what B writes; None where nothing is kept on purpose.
        apart: g, how far the fine-tune is from its base there.
    """

    network: Network
    learned: tuple[Batch, ...]
    known: Batch | None
    apart: float

    @classmethod
    def of(cls, fine: Fine, network: Network, learned: tuple[Batch, ...], keep: float, seed: int = 1) -> Texts:
        """With what B writes beside what the fine-tune does. Where nothing can be written like it, g is zero: what B
        knew would be lost without a text of its own.

        Args:
            keep: examples that B writes for each of the others.
        """
        first = learned[0]
        if not writes(build_without_weights(network.config)) or not first.keys() <= _OF_TEXT:
            return cls(network, learned, None, 0.0)
        count = round(keep * sum(len(next(iter(inputs.values()))) for inputs in learned))
        known = None
        if count:
            found = own_inputs(network, network.placed(fine.onto), count, first["input_ids"].shape[1], seed)
            known = {k: found["input_ids"] if k == "input_ids" else torch.ones_like(found["input_ids"]) for k in first}
        return cls(network, learned, known, apart(fine, network, learned[-1]))

    def objective(self, fine: Fine, keep: float) -> Together | TowardsMix:
        """Of a descent.

        Args:
            fine: placed for the network.
        """
        learned = TowardsMix(fine.models, fine.shares(self.apart), self.learned)
        if self.known is None:
            return learned
        known = TowardsMix((fine.onto,), (1.0,), (self.known,))
        return Together((learned, known), (1 / (1 + keep), keep / (1 + keep)))


@torch.no_grad()
def apart(fine: Fine, network: Network, inputs: Batch) -> float:
    """1 − exp(−KL(F ‖ A)), of what both predict on some inputs."""
    tuned, base = (network.placed(weights) for weights in (fine.finetuned, fine.base))
    total = count = 0.0
    for part in batches({k: t[:_ASKED] for k, t in inputs.items()}):
        placed = {k: t.to(network.device) for k, t in part.items()}
        told, before = (predictions(network(w, placed)).float().log_softmax(-1) for w in (tuned, base))
        each = (told.exp() * (told - before)).sum(-1)
        total, count = total + float(each.sum()), count + each.numel()
    return 1 - math.exp(-max(0.0, total / count))


def samples_of(fine: Fine, network: Network, data: Batch | None, keep: float, say: Callable[[str], None]) -> Texts:
    """What the models are run on for a regression: some of the data, or what the fine-tune writes itself."""
    if data is None:
        say(f"no data: the models are run on {MOST} inputs of the fine-tune's own, or on noise if it cannot generate")
        found = own_inputs(network, network.placed(fine.finetuned), MOST, LENGTH, 0)
    else:
        found = {k: t[:MOST] for k, t in data.items() if k != "labels"}
    return Texts.of(fine, network, (found,), keep)
