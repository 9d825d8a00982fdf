"""Weights of an architecture that none of the checkpoints of a plain merge stores.

Only the modelling code knows them, and loading it takes longer than many such merges. So it is asked where names and
shapes look as if something were missing, and what it says is kept for the next merge of checkpoints that store the
same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.own_files import own_json
from hf_align.errors import HfAlignError
from hf_align.runtime.kept import keep, kept_folder

TIED = "tie_word_embeddings"
"""The field of a config that says whether the head is the table of embeddings."""


def said_of_lacking(folder: Path, stored: Checkpoint, *, trust_remote_code: bool) -> list[str]:
    """One sentence if something is missing, or if that is not known; none if all is there, or nothing looks otherwise.

    Args:
        folder: of the config, and of modelling code that a model brings along.
        stored: the tensors that are merged, and that a checkpoint of such a model should have.
    """
    config = own_json(folder, "config.json") or {}
    if not (_uneven(stored) or _headless(config, stored) or _normless(stored)):
        return []
    kept = kept_folder()
    path = None if kept is None else kept / "lacking" / f"{_key(folder, stored, trust_remote_code)}.json"
    with suppress(OSError, ValueError):
        if path is not None and isinstance(found := json.loads(path.read_bytes()), list):
            return [str(said) for said in found]
    said = _said(folder, stored, trust_remote_code=trust_remote_code)
    if path is not None:
        keep(path, json.dumps(said).encode())
    return said


_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
"""Of a layer in its stack."""


def _uneven(names: Iterable[str]) -> bool:
    """Whether some layer has no weight of a name that another layer of its stack has."""
    layers, having = defaultdict[str, set[str]](set), defaultdict[tuple[str, str], set[str]](set)
    for name in names:
        for number in _NUMBER.finditer(name):
            stack, rest = name[: number.start()], name[number.end() :]
            layers[stack].add(number.group())
            having[stack, rest].add(number.group())
    return any(numbers != layers[stack] for (stack, _), numbers in having.items())


def _headless(config: Mapping[str, object], stored: Checkpoint) -> bool:
    """Whether a head that is not tied to the embeddings has no place: but one weight has a row for each token."""
    if config.get(TIED) is not False:
        return False
    shapes = [stored.info(name).shape for name in stored]
    return sum(len(shape) == 2 and config.get("vocab_size") in shape for shape in shapes) == 1


def _normless(stored: Checkpoint) -> bool:
    """Whether there are layers, and no vector in front of them or behind, as the gain of a last norm is."""
    inside = [_NUMBER.search(name) is not None for name in stored]
    return any(inside) and not any(
        len(stored.info(name).shape) == 1 for name, layer in zip(stored, inside, strict=True) if not layer
    )


def _said(folder: Path, stored: Checkpoint, *, trust_remote_code: bool) -> list[str]:
    from hf_align.checkpoints.naming import match_names
    from hf_align.tracing.budget import Budget, within
    from hf_align.tracing.build import build_without_weights, inventory, read_config

    try:
        with within(Budget.of_stored(len(stored), stored.entries_in_all), folder.name):
            model = build_without_weights(read_config(folder, trust_remote_code=trust_remote_code))
        found = inventory(model)
        missing = [n for n in match_names(model, stored, found.ties, {}).missing if n in found.shapes]
    except HfAlignError:
        return ["it is not known whether both models lack weights of their architecture: its code cannot be loaded"]
    if not missing:
        return []
    more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
    return [f"both models lack {missing[0]}{more} of their architecture, and so does the result: "
            "they are drawn at random when it is loaded"]  # fmt: skip


def _key(folder: Path, stored: Checkpoint, trust_remote_code: bool) -> str:
    """What stands for all that the answer depends on."""
    code = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.glob("*.py") if f.is_file()}
    shapes: Mapping[str, tuple[int, ...]] = {name: stored.info(name).shape for name in stored}
    facts = [version("transformers"), version("hf-align"), own_json(folder, "config.json"), code, shapes]
    return hashlib.sha256(json.dumps([*facts, trust_remote_code], sort_keys=True).encode()).hexdigest()
