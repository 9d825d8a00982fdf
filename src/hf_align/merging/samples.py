"""What models are run on, where a merge depends on what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_align.running.decoder_inputs import unlabelled
from hf_align.running.generate import own_inputs
from hf_align.running.network import Batch, Network, Weights, joined

MOST = 256
"""Examples: more change little."""
MORE = 512
"""Examples where many weights are solved for."""
_LENGTH = 64
"""Tokens of each text that a model writes."""


@dataclass(frozen=True)
class Taught:
    """Inputs, and what is aimed at on them.

    Attributes:
        inputs: arguments of `forward`, [examples, ...], without labels.
        shares: s of what is aimed at, Σ s·x of what some models compute; 1 in sum.
    """

    inputs: Batch
    shares: Sequence[float]

    @property
    def count(self) -> int:
        """Examples."""
        return len(next(iter(self.inputs.values())))


@dataclass(frozen=True)
class Samples:
    """Inputs for each of several models.

    Attributes:
        network: of their architecture.
        each: for every model arguments of `forward`, [examples, ...], without labels.
    """

    network: Network
    each: Sequence[Batch]

    @property
    def all(self) -> Batch:
        """Those of all; once where they are the same."""
        first = self.each[0]
        if all(inputs is first for inputs in self.each):
            return first
        return joined(self.each)

    @classmethod
    def of(
        cls,
        models: Sequence[Weights],
        network: Network,
        data: Batch | None,
        say: Callable[[str], None],
        most: int = MOST,
    ) -> Samples:
        """Some of the data for all; if there is none what each model writes itself, or noise where none writes.

        Args:
            most: examples, of the data or for each model.
        """
        if data is not None:
            return cls(network, (unlabelled(data, network.config, most),) * len(models))
        say(f"no data: each model is run on {most} inputs of its own, or on noise if it cannot generate")
        written = [
            own_inputs(network, network.placed(weights), most, _LENGTH, seed) for seed, weights in enumerate(models)
        ]
        return cls(network, written)
