"""How a merged model was made: a file that stays with it, and that its card and its report are written from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml import YAMLError

from hf_align import __version__
from hf_align.checkpoints.hub import Source
from hf_align.checkpoints.own_files import own_bytes
from hf_align.errors import CheckpointError, HfAlignError, one_line

FOLDER = "hf-align"
FILE = "provenance.json"
ALIGNMENT = "alignment.safetensors"
"""Of two models: in that folder, or beside what was aligned."""
_LONGEST_LICENCE = 100
_LONGEST_FRONT = 2**18
"""Characters: more results of benchmarks than anyone lists."""


def home_of_alignment(folder: Path) -> Path:
    """The folder with the config that an alignment belongs to: its own, where the result has another architecture."""
    return folder / FOLDER if (folder / FOLDER / "config.json").is_file() else folder


class Input(BaseModel):
    """One of the models that went in.

    Attributes:
        name: `org/name`, or the last part of a folder's path.
        repository, commit: on the Hub; None for a folder.
        licence: as its card has it.
        adapter_of: name of the model that it is merged into, if it is an adapter.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    repository: str | None = None
    commit: str | None = None
    licence: str | None = None
    adapter_of: str | None = None

    @classmethod
    def all_of(cls, sources: Sequence[Source]) -> list[Input]:
        """What may be told of models to anyone: no local path; adapters after the models that they belong to."""
        found: list[Input] = []
        for source in sources:
            base = cls._of(source)
            if source.adapter is None:
                found.append(base)
                continue
            own = cls._of(source.adapter).model_copy(update={"adapter_of": base.name})
            found += [model for model in (base, own) if model not in found]
        return found

    @classmethod
    def _of(cls, source: Source) -> Input:
        licence = _licence_of(source.folder)
        return cls(name=source.own_name, repository=source.repository, commit=source.commit, licence=licence)


def _licence_of(folder: Path) -> str | None:
    """The licence in the front matter of a model's README.md."""
    try:
        readme = (own_bytes(folder, "README.md") or b"").decode("utf-8")
        data: Any = ModelCard(readme, ignore_metadata_errors=True).data if readme and _is_plain_yaml(readme) else {}
    except (CheckpointError, ValueError, TypeError, YAMLError, RecursionError):  # a card that is damaged says nothing
        return None
    named = data.get("license_name") if data.get("license") == "other" else data.get("license")
    return one_line(named)[:_LONGEST_LICENCE] if isinstance(named, str) and named else None


def _is_plain_yaml(readme: str) -> bool:
    """Whether the front matter is short, and has no anchors: a few lines of them may stand for gigabytes."""
    front = readme.split("\n---", 1)[0]
    return len(front) <= _LONGEST_FRONT and not re.search(r"(^|[\s\[{,])[*&]\w", front)


class Provenance(BaseModel):
    """How a model was made.

    Attributes:
        inputs: the models, and the adapters that were merged into them.
        models: names of what was merged, in order; BASE+ADAPTER with an adapter.
        command: what was typed, without local paths.
        strategy: every option that the result depends on.
        certificate: as `hf-align certify --json`; None if it was not asked for.
        witness: as in `--json`; None if it was left out, or nothing is aligned.
        comparison: as `hf-align evaluate --json`; None without data, and of more than two models.
        held_out: whether the notes say what was measured on data.
        agreement: parameter -> cosine of the two models' weights, as they are and aligned; empty without data.
        prompt, texts: words of the data, and how each model and the merge go on from them, by name.
    """

    model_config = ConfigDict(extra="forbid")

    version: str = __version__
    model_type: str
    inputs: list[Input]
    models: list[str]
    command: str
    strategy: dict[str, Any]
    untied: bool = False
    certificate: dict[str, Any] | None = None
    witness: dict[str, Any] | None = None
    distance_before: float | None = None
    distance_after: float | None = None
    comparison: dict[str, Any] | None = None
    held_out: bool = False
    agreement: dict[str, tuple[float, float]] = {}
    notes: list[str] = []
    prompt: str | None = None
    texts: list[tuple[str, str]] = []

    @property
    def title(self) -> str:
        """What was merged, without owners."""
        return " + ".join("+".join(part.rpartition("/")[2] for part in name.split("+")) for name in self.models)

    @property
    def is_aligned(self) -> bool:
        """Whether models were moved before they were merged."""
        return self.strategy.get("match", "none") != "none"

    @property
    def prover(self) -> str:
        """The command that proves the symmetries that were used; those of an untied head are in the written config."""
        return f"hf-align certify {'THIS_MODEL' if self.untied else self.model_type}"

    @property
    def carried(self) -> int:
        """How many fine-tunes were carried to another base: the last of the models."""
        return len(str(self.strategy.get("strength", "")).split())

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given a value."""
        return {k: v for k, v in self.strategy.items() if v != "" and v is not None and v is not False}

    def save(self, folder: Path) -> None:
        """Write it into a model's folder."""
        (folder / FOLDER).mkdir(exist_ok=True)
        (folder / FOLDER / FILE).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Provenance:
        """Read what `save` wrote.

        Raises:
            HfAlignError: the folder was not made by hf-align, or the file is damaged.
        """
        file = folder / FOLDER / FILE
        if not file.is_file():
            raise HfAlignError(f"{folder} was not written by hf-align merge: it has no {FOLDER}/{FILE}")
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise HfAlignError(f"{file}: {where}: {first['msg']}") from error
