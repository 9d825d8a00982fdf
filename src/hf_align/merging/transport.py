"""Fine-tunes carried to another base: it answers as each fine-tune where that speaks, and as B where B does.

All models are in one basis. What is added to B's weights is F − A (task arithmetic, arXiv 2212.04089), which knows
nothing of how B's activations differ from A's. From there every weight is fitted in the order of the graph
(`regression.py`), or all of them are trained, towards what the models compute on two kinds of text.

On what the fine-tune writes the aim is B + (F − A) + g (A − B). With g = 0 that is the arithmetic of logits of proxy
tuning (arXiv 2401.08565): right for a fine-tune that changed little, since what B does better than A is kept. With
g = 1 it is F: right for one that learned a text of which neither base knows anything, since A's and B's errors there
have nothing in common. g is measured, 1 − exp(−KL(F ‖ A)). On what B writes the aim is B. Of several fine-tunes, of one
base or of several, all changes are added, and each has its own text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_align.checkpoints.ondemand import Computed
from hf_align.matching.objectives import Objective
from hf_align.merging.distil import WRITTEN, Together, TowardsMix, written_by
from hf_align.merging.regression import Solved, regress
from hf_align.merging.samples import Samples, Taught
from hf_align.running.decoder_inputs import unlabelled
from hf_align.running.generate import own_inputs, writes
from hf_align.running.network import Batch, Network, Weights, batches, predictions
from hf_align.tracing.build import build_without_weights

MOST, LENGTH = 512, 64
"""Examples that the models are run on, and tokens of those that the fine-tune writes."""
_OF_TEXT = {"input_ids", "attention_mask"}
"""Arguments that are known of a text that a model wrote."""
_ASKED = 128
"""Examples on which it is measured how far a fine-tune is from its base."""


@dataclass(frozen=True)
class Change:
    """What a fine-tune learned.

    Attributes:
        base, finetuned: weights by name in memory: A's and F's.
        strength: λ, how much of the change is carried over.
    """

    base: Weights
    finetuned: Weights
    strength: float = 1.0


@dataclass(frozen=True)
class Carried:
    """Fine-tunes, what each was tuned from, and what they are carried to, in one basis.

    Attributes:
        onto: B's weights by name in memory.
    """

    onto: Weights
    changes: tuple[Change, ...]

    @property
    def models(self) -> tuple[Weights, ...]:
        """B, and of each fine-tune A and F."""
        return self.onto, *(model for change in self.changes for model in (change.base, change.finetuned))

    @property
    def by_vector(self) -> Weights:
        """B + Σ λ (F − A), tensor by tensor, in the dtype of B's."""

        def moved(name: str) -> Tensor:
            onto = self.onto[name]
            if not onto.is_floating_point():
                return onto
            wide = torch.promote_types(onto.dtype, torch.float32)
            found = onto.to(wide)
            for change in self.changes:
                found = found + change.strength * (change.finetuned[name].to(wide) - change.base[name].to(wide))
            return found.to(onto.dtype)

        return Computed(self.onto, moved)

    def start(self, ranks: Mapping[str, int | None] | None) -> Weights:
        """The weights of which `solve`, with these ranks, fits some."""
        return self.by_vector if ranks is None else self.onto

    def placed(self, network: Network) -> Carried:
        """The same, as the network runs with them."""
        changes = (replace(c, base=network.placed(c.base), finetuned=network.placed(c.finetuned)) for c in self.changes)
        return Carried(network.placed(self.onto), tuple(changes))

    def is_tuned(self, number: int) -> bool:
        """Whether a fine-tune, in a basis of its own, has its weights from its base: it is nearer to that than to B,
        and more like it than models of another seed are."""
        change = self.changes[number]
        from_base, from_onto, of_both = 0.0, 0.0, 0.0
        for name in self.onto:
            tuned, base, onto = (w[name].double() for w in (change.finetuned, change.base, self.onto))
            if tuned.shape == base.shape == onto.shape:
                from_base += float((tuned - base).square().sum())
                from_onto += float((tuned - onto).square().sum())
                of_both += float(tuned.square().sum() + base.square().sum())
        return from_base <= from_onto and from_base <= of_both / 2

    def shares(self, number: int, apart: float = 0.0) -> tuple[float, ...]:
        """Of the models in what is aimed at on the text of one fine-tune: B + λ (F − A + g (A − B)).

        Args:
            apart: g, from 0 for a fine-tune that hardly differs from its base to 1.
        """
        found, strength = [0.0] * len(self.models), self.changes[number].strength
        found[0], found[1 + 2 * number], found[2 + 2 * number] = 1 - apart * strength, (apart - 1) * strength, strength
        return tuple(found)

    def teacher(self, number: int, apart: float) -> tuple[tuple[Weights, ...], tuple[float, ...]]:
        """The models that have a share in what is aimed at there, and their shares."""
        found = [(model, share) for model, share in zip(self.models, self.shares(number, apart), strict=True) if share]
        return tuple(model for model, _ in found), tuple(share for _, share in found)

    def solve(self, texts: Texts, solved: Solved, ranks: Mapping[str, int | None] | None = None) -> None:
        """Fit every weight that can be fitted, and that `solved` does not have yet.

        Args:
            ranks: that the changes of those weights of B may have that are fitted, None for any; all others stay.

        Raises:
            HfAlignError: as `regress`.
        """
        first, *others = texts.taught(self)
        regress(self.models, first.shares, Samples(texts.network, (first.inputs,)), self.start(ranks), solved,
                others=others, ranks=ranks)  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """What the models are run on.

    Attributes:
        learned: what each fine-tune was trained on, or writes: one batch or more, without labels.
        known: what B writes; None where nothing is kept on purpose.
        apart: g, how far each fine-tune is from its base there.
    """

    network: Network
    learned: tuple[tuple[Batch, ...], ...]
    known: Batch | None
    apart: tuple[float, ...]

    @classmethod
    def of(cls, carried: Carried, network: Network, learned: Sequence[tuple[Batch, ...]], keep: float) -> Texts:
        """With what B writes beside what the fine-tunes do. Where nothing can be written like it, g is zero: what B
        knew would be lost without a text of its own.

        Args:
            keep: examples that B writes for each of the others.
        """
        batches, first = [inputs for each in learned for inputs in each], learned[0][0]
        if not writes(build_without_weights(network.config)) or not first.keys() <= _OF_TEXT:
            return cls(network, tuple(learned), None, (0.0,) * len(learned))
        count = round(keep * sum(len(next(iter(inputs.values()))) for inputs in batches))
        known = None
        if count:
            found = own_inputs(network, network.placed(carried.onto), count, first["input_ids"].shape[1], 1)
            known = {k: found["input_ids"] if k == "input_ids" else torch.ones_like(found["input_ids"]) for k in first}
        far = (apart(change, network, each[-1]) for change, each in zip(carried.changes, learned, strict=True))
        return cls(network, tuple(learned), known, tuple(far))

    def taught(self, carried: Carried) -> list[Taught]:
        """Inputs, and what is aimed at on them."""
        found = [Taught(inputs, carried.shares(number, far))
                 for number, (each, far) in enumerate(zip(self.learned, self.apart, strict=True))
                 for inputs in each]  # fmt: skip
        of_onto = (1.0,) + (0.0,) * (len(carried.models) - 1)
        return found if self.known is None else [*found, Taught(self.known, of_onto)]

    def objective(self, carried: Carried, keep: float) -> Objective:
        """Of a descent.

        Args:
            carried: placed for the network.
        """
        each: list[Objective] = [
            TowardsMix(*carried.teacher(number, far), inputs)
            for number, (inputs, far) in enumerate(zip(self.learned, self.apart, strict=True))
        ]
        rows = [1 / len(each)] * len(each)
        if self.known is not None:
            each = [*each, TowardsMix((carried.onto,), (1.0,), (self.known,))]
            rows = [*(share / (1 + keep) for share in rows), keep / (1 + keep)]
        return Together(each, rows)


def descent_towards(carried: Carried, network: Network, data: Batch | None, keep: float) -> Objective:
    """The objective of a descent, on the data of the only fine-tune and on what each writes.

    Args:
        carried: placed for the network.
    """
    learned = [tuple(written_by(network, (change.finetuned,), data, WRITTEN)) for change in carried.changes]
    return Texts.of(carried, network, learned, keep).objective(carried, keep)


@torch.no_grad()
def apart(change: Change, network: Network, inputs: Batch) -> float:
    """1 − exp(−KL(F ‖ A)), of what both predict on some inputs."""
    tuned, base = (network.placed(weights) for weights in (change.finetuned, change.base))
    total = count = 0.0
    for part in batches({k: t[:_ASKED] for k, t in inputs.items()}):
        placed = {k: t.to(network.device) for k, t in part.items()}
        told, before = (predictions(network(w, placed)).float().log_softmax(-1) for w in (tuned, base))
        each = (told.exp() * (told - before)).sum(-1)
        total, count = total + float(each.sum()), count + each.numel()
    return 1 - math.exp(-max(0.0, total / count))


def samples_of(
    carried: Carried, network: Network, data: Batch | None, keep: float, say: Callable[[str], None]
) -> Texts:
    """What the models are run on for a regression: some of the data of the only fine-tune, or what each writes."""
    if data is not None:
        return Texts.of(carried, network, [(unlabelled(data, network.config, MOST),)], keep)
    say(f"no data: the models are run on {MOST} inputs of the fine-tune's own, or on noise if it cannot generate")
    written = [(own_inputs(network, network.placed(change.finetuned), MOST, LENGTH, 2 * number),)
               for number, change in enumerate(carried.changes)]  # fmt: skip
    return Texts.of(carried, network, written, keep)
