"""Merge models that are live, or that lie in folders and on the Hub."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_align.api.align import align as find
from hf_align.api.align import called_beside
from hf_align.api.alignment import Alignment
from hf_align.api.examples import Data, called_with, examples
from hf_align.api.given import Given, Kind, Model, take
from hf_align.api.module_data import reusable
from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import OptionError, require_path
from hf_align.jobs import pipeline
from hf_align.jobs.outcome import Report
from hf_align.matching.match import are_same
from hf_align.merging.aligned import Aligned
from hf_align.merging.methods import FROM_SAMPLES, REGRESSION, mix_of
from hf_align.merging.regression import regression_of
from hf_align.merging.samples import MORE, MOST, Samples
from hf_align.publishing import push
from hf_align.running.offload import network_for
from hf_align.runtime.alone import alone, warn_the_caller
from hf_align.runtime.devices import Devices
from hf_align.settings.choices import OF_MANY, AnyMatch, Dtype, Match, Method, checked, finite
from hf_align.settings.options import Options
from hf_align.symmetry.alignment import squared_distance
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.tracing.module_calls import Inputs

Align = Alignment | Sequence[Alignment] | Match | Literal["none"]
"""Alignments that were found before, or how models are matched now."""
_SUM = 1e-6
"""How far weights may be from one in sum: they are written by hand."""


@alone
def merge(
    models: Sequence[Model],
    *,
    weights: Sequence[float] | None = None,
    method: Method = "linear",
    align: Align = "weight",
    output_dir: str | os.PathLike[str] | None = None,
    push_to_hub: str | None = None,
    data: Data | None = None,
    inputs: Inputs | None = None,
    device: str | None = None,
    dtype: Dtype | torch.dtype | None = None,
    overwrite: bool = False,
    config: PretrainedConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    witness: bool = True,
    retokenize: bool = False,
    widen: Mapping[str, int] | None = None,
) -> Any:
    """One model out of several, all in the basis of the first.

    Args:
        models: live models, state dicts, folders or Hub ids; the first one is the reference.
        weights: the share of each, equal by default; they add up to one.
        method: how models in one basis are merged; "linear" and "regression" take any number.
        align: how they are matched; alignments of all but the first with the first; or "none".
        output_dir: where folders and ids are merged to, shard by shard, as the command does.
        push_to_hub: the repository that the output folder is then uploaded to.
        data: what methods and matching run on; with `output_dir`, a path, by which alignment is judged as well.
        inputs: what plain modules are called with; by default it is taken from the first batch of `data`.
        device: where models run; an accelerator if there is one.
        dtype: of what is written to `output_dir`.
        overwrite: whether an output folder with something else in it is replaced.
        config: of state dicts.
        tokenizer: for data that is text.
        witness: run every model before and after it is aligned, and refuse what changed.
        retokenize: with `output_dir`, bring models with another tokenizer into the tokens of the first.
        widen: with `output_dir`, fields of the config that are larger in the merged model, and how large: for
            "regression", which then has room for more units of both (PLeaS, arXiv 2407.02447).

    Returns:
        The same kind of thing as the first model, a live model for a folder or an id; with `output_dir` the report.

    Raises:
        ValueError: an option has no such choice, or does not go with the others.
        HfAlignError: models that do not merge.

    Warns:
        UserWarning: alignments that were found before were found for other weights.
    """
    checked("method", method, Method)
    if not isinstance(align, (Alignment, list, tuple)):
        checked("align", align, AnyMatch)
    for name, flag in (("witness", witness), ("overwrite", overwrite), ("retokenize", retokenize)):
        checked(name, flag, (True, False))
    stored: Dtype | None = None if dtype is None else checked("dtype", str(dtype).removeprefix("torch."), Dtype)
    if isinstance(models, (str, os.PathLike, Mapping, nn.Module)) or not isinstance(models, Iterable):
        raise OptionError("models is one model; a list of two or more is needed")
    models = list(models)
    if len(models) < 2:
        raise OptionError(f"two models or more are merged; {len(models)} given")
    shares, _ = _shares(weights, len(models)), Devices.choose(device)
    if method not in OF_MANY and len(models) > 2:
        raise OptionError(f'method="{method}" merges two models; more are merged by "linear" or "regression"')
    if output_dir is None:
        if push_to_hub is not None or overwrite or retokenize or widen or dtype is not None:
            raise OptionError("push_to_hub, overwrite, retokenize, widen and dtype need output_dir")
        if data is not None and method not in FROM_SAMPLES and align not in ("activation", "learned"):
            raise OptionError(f'data is used neither by method="{method}" nor by this way to align')
        data = reusable(data)
        inputs = called_with(inputs, data, *models)
        alignments = _alignments(models, align, data, inputs, device, config, tokenizer, witness)
        named = [*zip(models, ["A", *called_beside(len(models) - 1)], strict=True)]
        if alignments:
            given = [alignments[0].taken(m, config, called=name) for m, name in named]
            if not isinstance(align, str):
                _warn_of_others(alignments, given)
        else:
            given = [take(m, config, inputs=inputs, called=name) for m, name in named]
        return _in_memory(given, alignments, shares, method, examples(data, given[0], tokenizer), device)
    require_path("output_dir", output_dir)
    of_two = shares[1] if len(shares) == 2 else 0.5
    options = Options(match=_matching(align), method=method, weight=of_two, device=device, dtype=stored,
                      overwrite=overwrite, witness=witness, retokenize=retokenize, quiet=True,
                      widen=tuple(f"{name}={size}" for name, size in (widen or {}).items()))  # fmt: skip
    return _to_disk(models, options, Path(output_dir), data, push_to_hub, shares)


def interpolate(a: Kind, b: Model, weight: float, *, align: Align = "weight", **options: Any) -> Kind:
    """(1 - weight) · A + weight · B, with B in the basis of A.

    Args:
        weight: of B.
        align: as for `merge`, which takes the other options, too.
    """
    finite("weight", weight)
    merged: Kind = merge([a, b], weights=[1 - weight, weight], align=align, **options)
    return merged


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    if not isinstance(weights, Sequence | np.ndarray) or isinstance(weights, str):
        raise OptionError(f"weights is {weights!r}; a list of {count} numbers is needed")
    shares = [finite("weights", each) for each in weights]
    if len(shares) != count or abs(sum(shares) - 1) > _SUM:
        raise OptionError(f"weights are {shares}; {count} numbers that add up to one are needed")
    return shares


def _matching(align: Align) -> AnyMatch:
    if not isinstance(align, str):
        raise OptionError("alignments that were found before are for live models; with output_dir, give a way to match")
    match: AnyMatch = checked("align", align, AnyMatch)
    return match


def _alignments(models: list[Model], align: Align, data: Data | None, inputs: Inputs | None, device: str | None,
                config: PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase | None,
                witness: bool) -> list[Alignment]:  # fmt: skip
    """One for each model but the first; none if they are merged as they are."""
    if isinstance(align, str):
        match = _matching(align)
        if match == "none":
            return []
        needed = None if match == "weight" else data
        return find(models[1:], to=models[0], match=match, data=needed, inputs=inputs, device=device, config=config,
                    tokenizer=tokenizer, witness=witness)  # fmt: skip
    found = [align] if isinstance(align, Alignment) else list(align)
    if len(found) != len(models) - 1:
        raise OptionError(f"{len(found)} alignments for {len(models)} models: one for each but the first is needed")
    return found


def _warn_of_others(alignments: list[Alignment], given: list[Given]) -> None:
    """Warn if alignments were found for other models, or for the same in another order: means of what they move are of
    weights that are far apart."""
    first = alignments[0].weights_of(given[0], alignments[0].reference)
    for alignment, other in zip(alignments, given[1:], strict=True):
        if alignment.distance is not None:
            moved = alignment.weights_of(other, alignment.elements)
            here = math.sqrt(sum(squared_distance(first, moved, name) for name in alignment.spec.parameters))
            before, found = alignment.distance
            if not are_same(found, here, before):
                warn_the_caller(f"the alignment of {other.called} was found for other weights: it brought those to a "
                                f"distance of {found:.4g}, and brings these to {here:.4g}")  # fmt: skip


def _in_memory(
    given: list[Given],
    alignments: list[Alignment],
    shares: list[float],
    method: str,
    batch: dict[str, Tensor] | None,
    device: str | None,
) -> Any:
    if alignments:
        first = alignments[0]
        config, spec = first.config, first.spec
        moved = [first.weights_of(given[0], first.reference)]
        moved += [a.weights_of(g, a.elements) for a, g in zip(alignments, given[1:], strict=True)]
    else:
        config = given[0].config
        spec = symmetries(config)
        moved = [g.weights for g in given]
    if method == "linear":

        def mean(name: str) -> Tensor:
            return functools.reduce(torch.add, (share * w[name] for share, w in zip(shares, moved, strict=True)))

        return given[0].with_weights(Computed(spec.parameters, mean), config, spec)
    each = [Computed(spec.parameters, w.__getitem__) for w in moved]  # tied weights once

    def samples(most: int = MOST) -> Samples:
        return Samples.of(each, network_for(config, Devices.choose(device).running), batch, lambda _: None, most)

    if method == REGRESSION:
        return given[0].with_weights(regression_of(each, shares, samples(MORE), spec), config, spec)
    mix = mix_of(method, Aligned(spec, *each), samples)
    return given[0].with_weights(Computed(spec.parameters, lambda n: mix(n, shares[1])), config, spec)


def _to_disk(models: list[Model], options: Options, output: Path, data: Data | None, repository: str | None,
             shares: list[float]) -> Report:  # fmt: skip
    references = [os.fspath(m) for m in models if isinstance(m, (str, os.PathLike))]
    if len(references) < len(models):
        raise OptionError("output_dir is for folders and Hub ids; save_pretrained writes a live model")
    if data is not None and not isinstance(data, (str, os.PathLike)):
        raise OptionError("with output_dir, data must be a path")
    path = None if data is None else Path(data)
    if repository is not None:
        push.user(repository)  # before anything is computed
    if len(references) > 2 and len(set(shares)) > 1:
        raise OptionError("with output_dir, more than two models must have equal weights")
    first, second, *more = references
    report = pipeline.merge(first, second, output, options, path, more=more)
    if repository is not None:
        push.push(output, push.Destination(repository))
    return report
