"""Descent of a merged model towards a mix of models: no labels, and no data where the models write.

The teacher of a merge is the ensemble of its models, the mean of their log-probabilities (Hinton et al.,
arXiv 1503.02531, with all models on the inputs of each); that of a transport is B's logits with what the fine-tune
changed of A's (arXiv 2401.08565). Every weight is free, or its change from another is a product of two factors (LoRA,
arXiv 2106.09685). Matrices take steps that are steepest in the spectral norm (`steepest.py`), vectors those of Adam
(arXiv 1412.6980).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from hf_align.matching.descent import Descent, Moving, Progress, State
from hf_align.matching.objectives import Objective, drawn
from hf_align.matching.steepest import Steepest, as_matrices
from hf_align.running.decoder_inputs import unlabelled
from hf_align.running.generate import own_inputs, writes
from hf_align.running.network import Batch, Network, Weights, joined, predictions
from hf_align.settings.schedule import Schedule
from hf_align.tracing.build import build_without_weights

_NO_GRADIENT = 1e-6
"""Gradients well below it hardly move a weight: a model that is its own teacher has those of rounding alone."""
ASKED = 64
"""Rows on which starts are compared."""
_LEAST = 1e-2
"""Of a factor that hardly is there, what its steps are measured by."""
_AT_ONCE = 8
"""Of them: what a model answers to these is in memory at once, a few times."""
WRITTEN = 4096
"""Sequences that each model writes for a descent."""
_LENGTH = 64
"""Tokens of each."""


@dataclass(frozen=True)
class TowardsMix(Objective):
    """Cross-entropy to Σ s·log p of some models, normalised; the squared distance to Σ s·y for no classes.

    Attributes:
        sources: placed for the network.
        shares: s, 1 in sum.
        inputs: of several kinds, as many of each in a step; without labels.
    """

    sources: Sequence[Weights]
    shares: Sequence[float]
    inputs: Sequence[Batch]

    def loss(self, network: Network, merged: Weights, rows: int, rng: Generator) -> Tensor:
        each = max(1, rows // len(self.inputs))
        return torch.stack([self._on(drawn(x, each, rng, network.device), network, merged) for x in self.inputs]).mean()

    def _on(self, batch: Batch, network: Network, merged: Weights) -> Tensor:
        answer = network(merged, batch)
        sources = zip(self.sources, self.shares, strict=True)
        with torch.no_grad():  # one after another: of a large vocabulary an answer may be larger than the model
            told = (share * _told(network(source, batch)) for source, share in sources)
            target: Tensor = sum(told, torch.zeros((), device=network.device))
        if _has_classes(answer):
            return -(target.softmax(-1) * _told(answer)).sum(-1).mean()
        return (_told(answer) - target).square().mean() / target.square().mean()


def _told(answer: Any) -> Tensor:
    """Log-probabilities of classes, or what is predicted where there are none."""
    found = predictions(answer)
    return found.log_softmax(-1) if _has_classes(answer) else found


def _has_classes(answer: Any) -> bool:
    return getattr(answer, "logits", None) is not None


@dataclass(frozen=True)
class Together(Objective):
    """Several objectives, each on its share of the rows.

    Attributes:
        shares: of each, 1 in sum.
    """

    each: Sequence[Objective]
    shares: Sequence[float]

    def loss(self, network: Network, merged: Weights, rows: int, rng: Generator) -> Tensor:
        found = [share * objective.loss(network, merged, max(1, round(share * rows)), rng)
                 for objective, share in zip(self.each, self.shares, strict=True)]  # fmt: skip
        return torch.stack(found).sum()


@dataclass(frozen=True)
class Limits:
    """What a descent may change.

    Attributes:
        ranks: that the change of each weight may have which moves; None for any.
        around: the weights that they are changes of, by name in memory, placed for the network.
    """

    ranks: Mapping[str, int | None]
    around: Weights

    def at(self, name: str, start: Tensor) -> _Free | _Factored:
        """A weight that moves, where it starts."""
        rank = self.ranks[name]
        return _Free.at(start) if rank is None else _Factored.at(start, self.around[name], rank)


@dataclass(frozen=True)
class _Free(Moving):
    """A weight that an optimiser moves.

    Attributes:
        entries: a matrix or more [*, n, k], or a vector [n].
    """

    kept: ClassVar[tuple[str, ...]] = ("entries",)
    entries: Tensor
    shape: torch.Size

    @classmethod
    def at(cls, start: Tensor) -> _Free:
        return cls(_moved(as_matrices(start) if start.ndim > 1 else start.reshape(-1)), start.shape)

    @property
    def value(self) -> Tensor:
        return self.entries.view(self.shape)

    @property
    def paces(self) -> list[tuple[Tensor, float]]:
        """What an optimiser moves, and how far in a step, times the rate."""
        return [(self.entries, max(self.entries.shape[-2:]) ** 0.5 if self.entries.ndim > 1 else 1.0)]


@dataclass(frozen=True)
class _Factored(Moving):
    """A weight W + U D, of which an optimiser moves the factors.

    Attributes:
        around: W, [n, …].
        up, down: U [n, rank] and D [rank, …], of one size at the start.
        pace: of both: together they change the weight as far in a step as if it moved freely.
    """

    kept: ClassVar[tuple[str, ...]] = ("up", "down")
    around: Tensor
    up: Tensor
    down: Tensor
    pace: float

    @classmethod
    def at(cls, start: Tensor, around: Tensor, rank: int) -> _Factored:
        u, s, vh = torch.linalg.svd((start.double() - around.double()).flatten(1), full_matrices=False)
        roots = s[:rank].sqrt()
        pace = max(len(start), vh.shape[1]) ** 0.5 / 2 / max(float(roots.max()), _LEAST)
        return cls(around.float(), _moved(u[:, :rank] * roots), _moved(roots[:, None] * vh[:rank]), pace)

    @property
    def value(self) -> Tensor:
        return self.around + (self.up @ self.down).view(self.around.shape)

    @property
    def paces(self) -> list[tuple[Tensor, float]]:
        """As `_Free.paces`."""
        return [(self.up, self.pace), (self.down, self.pace)]


def _moved(start: Tensor) -> Tensor:
    return start.detach().float().clone(memory_format=torch.contiguous_format).requires_grad_()


@torch.no_grad()
def nearest(starts: Mapping[str, Weights], network: Network, objective: Objective) -> str:
    """What the start with the lowest objective is called; all are asked on the same rows, one after another.

    Args:
        starts: weights by name in memory, by what they are called.
    """

    def loss(start: Weights) -> float:
        placed, rng = network.placed(start), Generator().manual_seed(0)
        found = sum(float(objective.loss(network, placed, _AT_ONCE, rng)) for _ in range(ASKED // _AT_ONCE))
        return math.inf if math.isnan(found) else found

    losses = {called: loss(start) for called, start in starts.items()}
    return min(losses, key=losses.__getitem__)


def written_by(network: Network, authors: Sequence[Weights], data: Batch | None, count: int) -> list[Batch]:
    """Inputs of a descent: the data, and what each of some models writes; without data, noise where none writes.

    Args:
        authors: placed for the network.
        count: sequences of each.
    """
    given = [] if data is None else [unlabelled(data, network.config)]
    if given and not writes(build_without_weights(network.config)):
        return given
    each = [own_inputs(network, author, count, _LENGTH, seed) for seed, author in enumerate(authors, start=2)]
    # A text is one of many that the merged model will meet, and a short one is soon known by heart.
    return [*given, joined(each)]


def distilled(
    start: Weights,
    network: Network,
    objective: Objective,
    schedule: Schedule,
    *,
    limits: Limits | None = None,
    state: State | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The weights that moved at the end of the descent, float32 on the CPU, by name.

    Args:
        start: weights by name in memory, placed for the network.
        limits: what moves; without them all weights do, freely.

    Raises:
        HfAlignError: the loss is not finite.
    """
    limits = limits or Limits(dict.fromkeys(start), start)
    moving = {n: limits.at(n, start[n]) for n in sorted(network.trained & limits.ranks.keys())}

    def loss(rng: Generator) -> Tensor:
        merged = {n: moving[n].value if n in moving else start[n] for n in start}
        return objective.loss(network, merged, schedule.rows, rng)

    paces = [pace for weight in moving.values() for pace in weight.paces]
    Descent(list(moving.values()), _optimisers(paces, schedule.weight_rate), schedule, state).run(loss, progress)
    return {n: weight.value.detach().cpu().contiguous() for n, weight in moving.items()}


def _optimisers(paces: Sequence[tuple[Tensor, float]], rate: float) -> list[torch.optim.Optimizer]:
    """Of matrices and of vectors, where there are any."""
    matrices = [{"params": [x], "rate": rate * pace} for x, pace in paces if x.ndim > 1]
    vectors = [x for x, _ in paces if x.ndim == 1]
    found: list[torch.optim.Optimizer] = [Steepest(matrices, least=_NO_GRADIENT)] if matrices else []
    return found + ([torch.optim.Adam([{"params": vectors, "rate": rate}], eps=_NO_GRADIENT)] if vectors else [])
