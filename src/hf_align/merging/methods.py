"""Every way to merge two models that share a basis, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.circuits import circuit_mean
from hf_align.merging.fisher import fisher_mean
from hf_align.merging.fusion import fused, fused_by_activations, semi_permuted
from hf_align.merging.regmean import regression_mean
from hf_align.merging.regression import sequential_regression
from hf_align.merging.samples import Samples
from hf_align.merging.tensors import TENSORWISE, TensorMethod

FromWeights = Callable[[Aligned], Mix]
FromSamples = Callable[[Aligned, Samples], Mix]


def _by_tensor(method: TensorMethod) -> FromWeights:
    def merge(models: Aligned) -> Mix:
        def mix(name: str, weight: float) -> Tensor:
            return method(models.a[name], models.b[name], weight)

        return mix

    return merge


REGRESSION = "regression"
"""The method that is kept weight by weight as it goes (`regression.py`)."""
FROM_WEIGHTS: dict[str, FromWeights] = {
    **{name: _by_tensor(method) for name, method in TENSORWISE.items()},
    "circuits": circuit_mean,
    "ot-fusion": fused,
}
FROM_SAMPLES: dict[str, FromSamples] = {
    "fisher": fisher_mean,
    "regmean": regression_mean,
    REGRESSION: sequential_regression,
    "ot-fusion-activations": fused_by_activations,
    "semi-permutation": semi_permuted,
}
"""Methods that run both models, and so need something to run them on."""
CURVE = "curve"
"""The method that descends on the loss of the merged model (`curve.py`)."""
DISTIL = "distil"
"""The method that descends towards the ensemble of the models (`distil.py`)."""
RUNNING = frozenset((*FROM_SAMPLES, CURVE, DISTIL))
"""All methods for which models must run."""
HOLDING = frozenset(("fisher", CURVE, DISTIL))
"""Methods for which both models must fit into memory at once."""
INEXACT = frozenset({"ot-fusion", "ot-fusion-activations", "semi-permutation"})
"""Methods that mix the units of B by maps that are no symmetries: what they make of B alone is not B."""


def mix_of(method: str, models: Aligned, samples: Callable[[], Samples]) -> Mix:
    """A merge by a method that takes the weights, or the weights and samples, of two models.

    Args:
        samples: drawn where the method runs the models.
    """
    return FROM_WEIGHTS[method](models) if method in FROM_WEIGHTS else FROM_SAMPLES[method](models, samples())
