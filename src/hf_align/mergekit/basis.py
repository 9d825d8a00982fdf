"""The models of a recipe in the basis of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_align.checkpoints.naming import DiskWeights
from hf_align.models import Model, Pair, open_pair
from hf_align.options import Options
from hf_align.pipeline import Say, aligned_weights, examples, find_match


@dataclass(frozen=True)
class Inputs:
    """The models of a recipe, opened.

    Attributes:
        pair: the reference, and another model.
        models: by what the recipe calls them, the reference among them.
        weights: the same, as weights by name in memory, in one basis.
    """

    pair: Pair
    models: Mapping[str, Model]
    weights: Mapping[str, Mapping[str, Tensor]]

    def layout(self, name: str, dtype: torch.dtype | None) -> DiskWeights:
        """One model's weights in the names and layout of the reference."""
        a = self.pair.a
        return DiskWeights(a.checkpoint, a.names, self.weights[name].__getitem__, self.pair.spec.parameters, dtype)


def open_inputs(
    reference: str, named: Mapping[str, str], options: Options, data: Path | None = None, say: Say = lambda _: None
) -> Inputs:
    """Open all models and find for each the move into the basis of the reference.

    Args:
        reference: one of the names.
        named: what a recipe calls a model -> folder or Hub reference.
        data: examples for matching that runs the models.
    """
    models: dict[str, Model] = {}
    weights: dict[str, Mapping[str, Tensor]] = {}
    pair = None
    for name, model in named.items():
        if name == reference and len(named) > 1:
            continue
        say(f"moving {model} into the basis of {named[reference]}" if options.match != "none" else f"opening {model}")
        pair = open_pair(named[reference], model, untie=options.untie, specs=options.specs,
                         trust_remote_code=options.trust_remote_code)  # fmt: skip
        pair.require_one_size()
        fit, _ = examples(pair, options, data)
        models[reference], models[name] = pair.a, pair.b
        weights[reference], weights[name] = aligned_weights(pair, options, find_match(pair, options, fit, say))
    assert pair is not None
    return Inputs(pair, models, weights)
