"""How a merged model was made: a file that stays with it, and that its card and its report are written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hf_align import __version__
from hf_align.errors import HfAlignError
from hf_align.hub import Source

FOLDER = "hf-align"
FILE = "provenance.json"


class Input(BaseModel):
    """One of the models that went in.

    Attributes:
        name: `org/name`, or the last part of a folder's path.
        repository, commit: on the Hub; None for a folder.
        licence: as its card has it.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    repository: str | None = None
    commit: str | None = None
    licence: str | None = None

    @classmethod
    def of(cls, source: Source, licence: str | None) -> Input:
        """What may be told of a model to anyone: no local path."""
        name = source.repository or source.folder.resolve().name
        return cls(name=name, repository=source.repository, commit=source.commit, licence=licence)


class Provenance(BaseModel):
    """How a model was made.

    Attributes:
        command: what was typed, without local paths.
        strategy: every option that the result depends on.
        certificate: as `hf-align certify --json`; None if it was not asked for.
        comparison: as `hf-align evaluate --json`; None without data.
        agreement: parameter -> cosine of the two models' weights, as they are and aligned; empty without data.
    """

    model_config = ConfigDict(extra="forbid")

    version: str = __version__
    model_type: str
    inputs: list[Input]
    command: str
    strategy: dict[str, Any]
    untied: bool = False
    certificate: dict[str, Any] | None = None
    distance_before: float | None = None
    distance_after: float | None = None
    comparison: dict[str, Any] | None = None
    agreement: dict[str, tuple[float, float]] = {}
    notes: list[str] = []

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
