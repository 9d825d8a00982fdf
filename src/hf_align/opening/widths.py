"""Two models of one architecture in different sizes: the narrower one is widened, and what it computes is compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.errors import IncompatibleModels
from hf_align.running.generate import noise
from hf_align.running.network import Batch, Network, Weights, predictions
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.symmetry.widening import STRETCHES, WidenedWeights, grown
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.trace import trace

UNCHANGED = 1e-4
"""The largest change of an output, of the largest output, that float32 explains."""


@dataclass(frozen=True)
class Architecture:
    """A config and its symmetries."""

    config: PretrainedConfig
    spec: SymmetrySpec


def widen(raw: Weights, narrow: Architecture, wide: Architecture) -> tuple[WidenedWeights, float]:
    """A narrow model's weights in the sizes of a wide one, and the largest relative change of its outputs.

    Both sizes are run once on the same few random inputs, so their weights must fit into memory.

    Args:
        raw: weights by name in memory.

    Raises:
        IncompatibleModels: a space has no room to grow, or the outputs change by more than rounding.
    """
    widened = [WidenedWeights(raw, narrow.spec, wide.spec, stretch) for stretch in STRETCHES]
    inputs = noise(trace(narrow.config))
    before = outputs(narrow.config, raw, inputs)
    changes = []
    for weights in widened:
        after = outputs(wide.config, weights, inputs)
        if after.shape != before.shape:
            raise IncompatibleModels("the outputs of these models differ in size, so they do not merge")
        changes.append(float((after - before).abs().max() / before.abs().max()))
        if changes[-1] < UNCHANGED:
            return weights, changes[-1]
    raise IncompatibleModels(
        f"widening the narrower model changes its outputs by {min(changes):.1e}: its architecture computes with sizes "
        f"that differ here ({described(narrow.spec, wide.spec)})"
    )


def described(narrow: SymmetrySpec, wide: SymmetrySpec) -> str:
    """What grows from which size to which, in words."""
    sizes = Counter((name.rsplit(".", 1)[-1], *both) for name, both in grown(narrow, wide).items())
    return ", ".join(f"{f'{count} × ' if count > 1 else ''}{name} {n} to {w}" for (name, n, w), count in sizes.items())


@torch.no_grad()
def outputs(config: PretrainedConfig, weights: Weights, inputs: Batch) -> Tensor:
    """What a model is judged by, on some inputs."""
    names = inventory(build_without_weights(config)).shapes
    return predictions(Network(config)({name: weights[name] for name in names}, inputs))
