"""Whether alignment helped, and whether a method did: losses on examples that nothing was matched or merged on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from huggingface_hub.utils import tqdm
from transformers import PretrainedConfig

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.naming import NamedWeights, match_names
from hf_align.checkpoints.ondemand import Computed
from hf_align.jobs.opened import Basis
from hf_align.jobs.outcome import Report
from hf_align.matching.activations import correlations
from hf_align.matching.universe import Mean
from hf_align.merging.methods import REGRESSION
from hf_align.merging.regression import mean_of
from hf_align.running.evaluate import ROUNDING, Comparison, Evaluator
from hf_align.running.network import Batch, Weights
from hf_align.running.offload import network_for
from hf_align.settings.choices import DESCENDING, Effort
from hf_align.settings.options import Options
from hf_align.tracing.build import build_without_weights, inventory

_FEATURE_ROWS = 64
"""Examples on which features are compared."""


def compare(basis: Basis, held_out: Batch) -> Comparison:
    """Losses along the line between two models, as they are and aligned."""
    models, network, points = basis.models, basis.models.network, basis.models.options.points
    evaluator = Evaluator(network, held_out)
    raw_a, raw_b, moved_a, moved_b = map(network.placed, (*models.weights, *basis.weights))
    with tqdm(total=2 * points, desc="losses on the way from A to B", unit="loss", disable=models.options.quiet) as bar:
        found = evaluator.compare((raw_a, raw_b), (moved_a, moved_b), points, bar.update)
    rows = {k: t[:_FEATURE_ROWS] for k, t in evaluator.data.items()}
    before, after = (correlations(evaluator.network, *ends, rows) for ends in ((raw_a, raw_b), (moved_a, moved_b)))
    features = {name: (before[name], after[name]) for name in before}
    return replace(found, features=features, is_aligned=bool(basis.matches))


def judged(basis: Basis, held_out: Batch, report: Report) -> str:
    """Whether alignment helped; what was measured of two models is added to the report."""
    if len(basis.weights) > 2:
        return of_many(basis, held_out)
    comparison = compare(basis, held_out)
    report.comparison = comparison.as_json()
    return verdict(comparison)


def verdict(comparison: Comparison) -> str:
    """One honest sentence on two models."""
    naive, aligned = comparison.naive.barrier, comparison.aligned.barrier
    if not comparison.is_aligned:
        return f"not aligned, the models have a barrier of {naive:.3f}"
    called = "barrier"
    if not comparison.has_barrier:
        naive, aligned, called = comparison.naive.mean, comparison.aligned.mean, "mean loss between the models"
    if not comparison.helps:
        return f"alignment does NOT help here: {called} {aligned:.3f} aligned, {naive:.3f} without; prefer --match none"
    without = "" if comparison.has_barrier else "there is no barrier; "
    return f"{without}alignment lowers the {called} from {naive:.3f} to {aligned:.3f}"


def beside_the_others(
    basis: Basis, method: str, merged: Weights, held_out: Batch, line: Mapping[str, Any] | None
) -> list[str]:
    """What a merge comes to beside the plain mean, its models and their ensemble, and what would come lower.

    Args:
        method: that the merge was made by.
        merged: rounded to what is written.
        line: the losses on the line between two models, where they were measured.
    """
    models, options = basis.models, basis.models.options
    evaluator, raw = Evaluator(models.network, held_out), models.weights
    shares = options.shares(len(raw))
    mean = dict(zip(line["lambdas"], line["aligned"]["losses"], strict=True)).get(options.weight) if line else None
    if mean is None:
        in_float32 = [Computed(w, lambda n, w=w: w[n].float()) for w in basis.weights]  # type: ignore[misc]
        mean = evaluator.loss(mean_of(in_float32, shares))
    is_mean = method == "linear"
    found = evaluator.loss(merged)
    apart = [line["loss_a"], line["loss_b"]] if line else [evaluator.loss(weights) for weights in raw]
    ensemble = evaluator.ensemble(raw, shares)
    return [*([] if is_mean else [_beside_the_mean(method, found, _mean_in(basis), mean)]),
            _beside_the_models(options, found, apart, ensemble)]  # fmt: skip


def _mean_in(basis: Basis) -> str:
    """What the mean of models in a basis is called, beside that of the models as they are."""
    return "the mean of the aligned models" if basis.matches else "the plain mean"


def _beside_the_mean(method: str, found: float, called: str, mean: float) -> str:
    """One honest sentence on a method that is not the mean."""
    if found < mean:
        return f"{method} merges to a loss of {found:.3f}, {called} to {mean:.3f}"
    return f"{method} does NOT help here: loss {found:.3f}, of {called} {mean:.3f}; prefer --method linear"


def _beside_the_models(options: Options, found: float, apart: Sequence[float], ensemble: float | None) -> str:
    """One honest sentence on a merge and what it was made of."""
    beside = "" if ensemble is None else f", their ensemble {ensemble:.3f}"
    losses = f"loss {found:.3f}; its models {', '.join(f'{loss:.3f}' for loss in apart)}{beside}"
    if found <= min(apart) + ROUNDING * abs(min(apart)):
        return f"the merge is no worse than the better model: {losses}"
    worse = f"the merge is worse than the better model alone: {losses}"
    if options.method in DESCENDING:
        return worse
    effort: Effort = "best" if options.method == REGRESSION or options.match == "none" else "good"
    return f"{worse}; for a lower loss use --effort {effort}"


def of_result(basis: Basis, held_out: Batch, called: str, config: PretrainedConfig, written: Checkpoint) -> str:
    """One honest sentence on a result that others have computed, beside the models and their mean in this basis.

    Args:
        called: what made the result.
        config: of the result; slices have another depth than the models.
        written: the result.
    """
    models = basis.models
    evaluator = Evaluator(models.network, held_out)
    apart = [evaluator.loss(weights) for weights in models.weights]
    mean = evaluator.loss(Mean(basis.weights))
    network = network_for(config, models.network.device)
    architecture = build_without_weights(config)
    known = inventory(architecture)
    found = NamedWeights(written, match_names(architecture, written, known.ties, {}))
    loss = Evaluator(network, held_out).loss(Computed(known.shapes, found.__getitem__))
    return (f"{called} merges to a loss of {loss:.3f}; its models have {min(apart):.3f} to {max(apart):.3f}, "
            f"{_mean_in(basis)} {mean:.3f}")  # fmt: skip


def of_many(basis: Basis, held_out: Batch) -> str:
    """One honest sentence on the mean of several models."""
    raw, evaluator = basis.models.weights, Evaluator(basis.models.network, held_out)
    apart = [evaluator.loss(weights) for weights in raw]
    naive, found = evaluator.loss(Mean(raw)), evaluator.loss(Mean(basis.weights))
    losses = f"the models have losses {min(apart):.3f} to {max(apart):.3f}, their plain mean {naive:.3f}"
    if not basis.matches:
        return f"not aligned, {losses}"
    if naive - found > ROUNDING * abs(naive):
        return f"aligned, the mean of {len(apart)} models has loss {found:.3f}; {losses}"
    return f"alignment does NOT help here: loss {found:.3f} aligned; {losses}; prefer --match none"
