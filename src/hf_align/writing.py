"""A merged or aligned model as a checkpoint that `from_pretrained` loads: weights, config, tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from hf_align.models import Model, Pair
from hf_align.naming import DiskWeights
from hf_align.shards import ShardPlan, write_shards

_COPIED = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "added_tokens.json",
           "generation_config.json", "preprocessor_config.json", "processor_config.json", "chat_template*")  # fmt: skip


@dataclass(frozen=True)
class Output:
    """How a model is written.

    Attributes:
        dtype: of the parameters; that of the checkpoint whose names are used by default.
        made_with: all options that the result depends on; a run with others never goes on with what this one wrote.
    """

    dtype: torch.dtype | None
    max_shard_size: str
    overwrite: bool
    quiet: bool
    made_with: str


def write(
    folder: Path,
    pair: Pair,
    names_from: Model,
    produce: Callable[[str], Tensor],
    output: Output,
    say: Callable[[str], None],
) -> None:
    """Write every tensor of the architecture, in the layout of a checkpoint, with config and tokenizer of A.

    Args:
        names_from: the model whose names and layout on disk are used.
        produce: gives a parameter by its name in memory.

    Raises:
        OutputError, CheckpointError: as `write_shards`.
    """
    tensors = DiskWeights(names_from.checkpoint, names_from.names, produce, pair.spec.parameters, output.dtype)
    plan = ShardPlan.build([(name, *tensors.info(name)) for name in sorted(tensors)], output.max_shard_size)
    if unused := names_from.names.unused:
        say(f"left out: {len(unused)} of {names_from.ref}'s tensors that its architecture does not load ({unused[0]})")
    say(f"writing {len(tensors)} tensors to {folder}")
    with tqdm(total=plan.nbytes, desc="writing", unit="B", unit_scale=True, disable=output.quiet) as bar:
        write_shards(plan, tensors.__getitem__, folder, fingerprint=_fingerprint(pair, output),
                     overwrite=output.overwrite, progress=bar.update)  # fmt: skip
    _write_config(folder, pair)
    _copy_companions(folder, pair.a.folder)


def _copy_companions(folder: Path, source: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for pattern in (*_COPIED, *(["*.py"] if "auto_map" in config else [])):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _write_config(folder: Path, pair: Pair) -> None:
    """A's config as it is on disk, so that nothing is lost or added, but for what alignment changed."""
    config = json.loads((pair.a.folder / "config.json").read_text(encoding="utf-8"))
    if pair.untied:
        config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fingerprint(pair: Pair, output: Output) -> str:
    """What a resumed run must share with the one that was killed."""
    digest = hashlib.sha256(output.made_with.encode())
    digest.update(json.dumps(pair.spec.as_json()).encode())
    for model in (pair.a, pair.b):
        digest.update((model.folder / "config.json").read_bytes())
        for name in sorted(model.checkpoint):
            digest.update(f"{name}{model.checkpoint.info(name)}".encode())
    return digest.hexdigest()
