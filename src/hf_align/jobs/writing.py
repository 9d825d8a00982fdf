"""A merged or aligned model in the names, layout and dtypes of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from safetensors.torch import save
from torch import Tensor

from hf_align.checkpoints.companions import model_code, stored_as
from hf_align.checkpoints.naming import DiskLayout, DiskWeights
from hf_align.checkpoints.ondemand import Computed
from hf_align.checkpoints.plan import ShardPlan
from hf_align.checkpoints.shards import Source, whole
from hf_align.jobs.job import Draft
from hf_align.jobs.opened import Opened
from hf_align.opening.models import Model
from hf_align.opening.pairs import Pair
from hf_align.running.network import Batch, Weights
from hf_align.settings.options import Options
from hf_align.symmetry.spec import SymmetrySpec


def draft_of(pair: Pair, like: Model, options: Options) -> Draft:
    """Every tensor of an architecture, in the names and layout of a model's checkpoint.

    Raises:
        OptionError: the size of shards is not understood.
    """
    layout = DiskLayout(like.checkpoint, like.names, pair.spec.parameters, options.torch_dtype, pair.larger_shapes)
    plan = ShardPlan.build([(name, *layout.info(name)) for name in sorted(layout)], options.max_shard_size)
    return Draft(plan, like.folder, config_changes(pair, like, options))


def config_changes(pair: Pair, like: Model, options: Options) -> dict[str, Any]:
    """The entries of the config that an untied head, larger sizes and another dtype change, one within another as they
    are there. Code that was not run is named no more: the weights may not be right for it."""
    found: dict[str, Any] = {"tie_word_embeddings": False} if pair.untied else {}
    found |= stored_as(like.folder, options.torch_dtype)
    if not options.trust_remote_code and (code := model_code(like.folder)):
        found["auto_map"] = dict.fromkeys(code)
    for (*above, name), size in pair.larger.items():
        inner = found
        for key in above:
            inner = inner.setdefault(key, {})
        inner[name] = size
    return found


def entries_of(pair: Pair, like: Model, options: Options, produce: Callable[[str], Tensor]) -> Source:
    """What is written as `draft_of` says.

    Args:
        produce: gives a parameter by its name in memory.
    """
    weights = DiskWeights(like.checkpoint, like.names, produce, pair.spec.parameters, options.torch_dtype,
                          pair.larger_shapes)  # fmt: skip
    return whole(weights.__getitem__)


def as_written(like: Model, options: Options, weights: Weights) -> Weights:
    """A result as whoever loads it reads it: every weight rounded to what `entries_of` writes it in."""
    dtypes = like.dtypes(options.torch_dtype)

    def rounded(name: str) -> Tensor:
        weight = weights[name]
        return weight.to(dtypes[name]).to(weight)

    return Computed(weights, rounded)


def record(made_with: Mapping[str, str], models: Opened, examples: Batch | None) -> dict[str, str]:
    """What the result depends on, in order: a run goes on only with what one of the same record wrote.

    Args:
        made_with: the command, and what its result depends on besides options and models.
        examples: that the models are run on to match or to merge.
    """
    ran_on = {} if examples is None else {"--data": digest(examples)}
    parts = zip(models.names, models.models, strict=True)
    inputs = {k: v for role, m in parts for k, v in m.checkpoint.record(f"{role}: {m.ref}").items()}
    return {**made_with, **models.options.result, **ran_on, **symmetries_of(models.first.spec), **inputs}


def reported_on(held_out: Batch | None) -> dict[str, str]:
    """The part of a record that the report depends on."""
    return {} if held_out is None else {"the examples of the report": digest(held_out)}


def symmetries_of(spec: SymmetrySpec) -> dict[str, str]:
    """The part of a record that reviewed overrides, and another version of a library, would change."""
    return {"the derived symmetries": sha256(json.dumps(spec.as_json()).encode()).hexdigest()}


def digest(examples: Batch) -> str:
    """What stands for examples."""
    return sha256(save(examples)).hexdigest()
