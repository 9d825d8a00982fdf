"""What two models are run on, where a merge depends on what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_align.merging.aligned import Aligned
from hf_align.running.generate import own_inputs
from hf_align.running.network import Batch, Network

MOST = 256
"""Examples: more change little."""
MORE = 512
"""Examples where many weights are solved for."""
_LENGTH = 64


@dataclass(frozen=True)
class Samples:
    """Inputs for each of two models.

    Attributes:
        network: of their architecture.
        a, b: arguments of `forward`, [examples, ...], without labels.
    """

    network: Network
    a: Batch
    b: Batch

    @property
    def all(self) -> Batch:
        """Those of both; once where they are the same."""
        if self.a is self.b:
            return self.a
        return {k: torch.cat([t, self.b[k]]) for k, t in self.a.items()}

    @classmethod
    def of(
        cls, models: Aligned, network: Network, data: Batch | None, say: Callable[[str], None], most: int = MOST
    ) -> Samples:
        """Some of the data for both; if there is none what each model writes itself, or noise where none writes.

        Args:
            most: examples, of the data or for each model.
        """
        if data is not None:
            some = {k: t[:most] for k, t in data.items() if k != "labels"}
            return cls(network, some, some)
        say(f"no data: each model is run on {most} inputs of its own, noise where it does not write")
        written = [
            own_inputs(network, network.placed(weights), most, _LENGTH, seed)
            for seed, weights in enumerate((models.a, models.b))
        ]
        return cls(network, *written)
