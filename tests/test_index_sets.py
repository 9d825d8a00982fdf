"""Over which spaces elements differ: units of experts that are looked up by number, or taken out of a stack in turn."""

from __future__ import annotations

from math import prod

import pytest
import torch
from test_gauges import program

from hf_align.symmetry.certificate.certify import soundness
from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.derivation.derive import derive


@pytest.mark.parametrize(
    ("kind", "apart"),
    [
        *((kind, True) for kind in ("Plain", "Largest", "InTurn", "Gated", "Biased", "Flat", "Loop", "Below",
                                    "BelowNext")),
        *((kind, False) for kind in ("TwoRouters", "TwoMaxima", "Exchanged", "Cross", "Next", "Before", "Both",
                                     "BothMaxima", "Sum", "Carried", "CarriedWords", "MeanWords", "Running",
                                     "Attending", "LoopNext")),
    ],
)  # fmt: skip
def test_units_differ_between_experts_unless_they_meet(kind: str, apart: bool) -> None:
    traced = program(f"LookedUp{kind}", num_hidden_layers=1)
    spec, rng = derive(traced), torch.Generator().manual_seed(0)
    weights = random_weights(spec, rng)
    assert max(soundness(traced, spec, weights, random_inputs(traced, rng), rng) for _ in range(3)) < 1e-9
    units = [space for space in spec.spaces.values() if space.size == 10]
    assert sum(prod(spec.index_shape(space.name)) for space in units) == (4 if apart else 1)
