"""The files beside the weights of a model: its config, as plain JSON, and its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_align.errors import IncompatibleModels

_COPIED = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "added_tokens.json",
           "generation_config.json", "preprocessor_config.json", "processor_config.json", "chat_template*")  # fmt: skip


def write_companions(folder: Path, source: Path, changed: Mapping[str, Any]) -> None:
    """A's config as it is on disk, so that nothing is lost or added but what `changed` says; and its tokenizer."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | changed
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for pattern in (*_COPIED, *(["*.py"] if "auto_map" in config else [])):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def require_same_vocabulary(refs: tuple[str, str], folders: list[Path]) -> None:
    """Token ids must mean the same in both; only where both folders have a tokenizer.

    Raises:
        IncompatibleModels: they do not.
    """
    files = [f / "tokenizer.json" for f in folders]
    if all(f.is_file() for f in files):
        vocabularies = [json.loads(f.read_text(encoding="utf-8")).get("model", {}).get("vocab") for f in files]
        if vocabularies[0] != vocabularies[1]:
            raise IncompatibleModels(
                f"{refs[0]} and {refs[1]} have different vocabularies; their tokens do not correspond"
            )
