"""A merged or aligned model as a checkpoint that `from_pretrained` loads: weights, config, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from safetensors.torch import save
from torch import Tensor

from hf_align.checkpoints.companions import write_companions
from hf_align.checkpoints.naming import DiskLayout, DiskWeights
from hf_align.checkpoints.shards import Claim, ShardPlan, whole, write_with_bar
from hf_align.models import Model, Pair
from hf_align.running.network import Batch


@dataclass(frozen=True)
class Draft:
    """What is going to be written, known from headers alone.

    Attributes:
        names_from: the model whose names and layout on disk are used.
        dtype: of the parameters; that of `names_from` by default.
    """

    pair: Pair
    names_from: Model
    dtype: torch.dtype | None
    plan: ShardPlan

    @classmethod
    def build(cls, pair: Pair, names_from: Model, dtype: torch.dtype | None, max_shard_size: str) -> Draft:
        """Plan every tensor of the architecture.

        Raises:
            OutputError: the size is not understood.
        """
        layout = DiskLayout(names_from.checkpoint, names_from.names, pair.spec.parameters, dtype)
        plan = ShardPlan.build([(name, *layout.info(name)) for name in sorted(layout)], max_shard_size)
        return cls(pair, names_from, dtype, plan)


def record(pair: Pair, made_with: Mapping[str, str], examples: Batch | None = None) -> dict[str, str]:
    """What the result depends on, by name: a run goes on only with what one of the same record wrote.

    Args:
        made_with: options.
        examples: that the models are run on to match or to merge.
    """
    ran_on = {} if examples is None else {"--data": sha256(save(examples)).hexdigest()}
    symmetries = sha256(json.dumps(pair.spec.as_json()).encode()).hexdigest()
    inputs = pair.a.checkpoint.record(pair.a.ref) | pair.b.checkpoint.record(pair.b.ref)
    return {**made_with, **ran_on, "the derived symmetries": symmetries, **inputs}


def reported(held_out: Batch | None, *, certify: bool) -> dict[str, str]:
    """What the report depends on besides, by name."""
    on = {} if held_out is None else {"the examples of the report": sha256(save(held_out)).hexdigest()}
    return {"--certify": str(certify), **on}


def write(
    claim: Claim, draft: Draft, produce: Callable[[str], Tensor], say: Callable[[str], None], *, quiet: bool
) -> None:
    """Write every tensor of the architecture, in the layout of a checkpoint, with config and tokenizer of A.

    Args:
        produce: gives a parameter by its name in memory.

    Raises:
        OutputError, CheckpointError: as `write_shards`.
    """
    pair, model = draft.pair, draft.names_from
    tensors = DiskWeights(model.checkpoint, model.names, produce, pair.spec.parameters, draft.dtype)
    if unused := model.names.unused:
        say(f"left out: {len(unused)} of {model.ref}'s tensors that its architecture does not load ({unused[0]})")
    say(f"writing {len(tensors)} tensors to {claim.folder}")
    write_with_bar(claim, draft.plan, whole(tensors.__getitem__), quiet=quiet)
    if claim.processes.leads:
        untied = {"tie_word_embeddings": False} if pair.untied else {}
        write_companions(claim.folder, pair.layout(pair.a).folder, untied)
