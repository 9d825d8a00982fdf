"""The file of reviewed overrides of a model type: what may be written in it, and where it is found.

`specs/schema.json` is generated from the models below.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_align.errors import HfAlignError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SpaceRef(_Strict):
    """A space, by a parameter that carries it.

    In the name `*` stands for a part between dots (a layer's number) and `**` for anything. `factor` picks one of
    several spaces of an axis, in the order in which `hf-align spec` prints them.
    """

    parameter: str = Field(min_length=1, examples=["model.layers.*.mlp.up_proj.weight"])
    axis: int = Field(ge=0)
    factor: int | None = Field(default=None, ge=0)


class _Override(_Strict):
    reason: Annotated[str, Field(min_length=10, description="Why the derived symmetry is not the one to use.")]


class Pin(_Override):
    """Nothing moves the space."""

    action: Literal["pin"]
    space: SpaceRef


class SetBound(_Override):
    """The space is moved by this group. One that is not below the derived group must pass the certificate."""

    action: Literal["bound"]
    space: SpaceRef
    group: Literal["GeneralLinear", "Orthogonal", "OrthogonalFixingOnes", "OrthogonalFixingOnesUpToSign",
                   "ScaledPermutation", "PositiveScaledPermutation", "SignedPermutation", "PermutationUpToSign",
                   "Permutation"]  # fmt: skip


class Tie(_Override):
    """Two spaces share one element; wildcards pair the spaces for which they stand for the same."""

    action: Literal["tie"]
    spaces: Annotated[tuple[SpaceRef, SpaceRef], Field(description="The second follows the first.")]


Override = Annotated[Pin | SetBound | Tie, Field(discriminator="action")]


class OverrideFile(_Strict):
    """Overrides of the derived symmetries of one model type, in the order in which they apply."""

    overrides: tuple[Override, ...]


def read_overrides(model_type: str, folder: Path | None = None) -> tuple[Path, OverrideFile] | None:
    """The overrides of a model type: from `folder` if it has any, else from those that ship with the package.

    Raises:
        HfAlignError: the folder does not exist, or the file does not follow the schema.
    """
    if folder is not None and not folder.is_dir():
        raise HfAlignError(f"{folder} is no folder of specs")
    if not re.fullmatch(r"[\w-][\w.-]*", model_type):  # it comes from a config, and becomes a file name
        return None
    for path in (p / f"{model_type}.yaml" for p in (folder, shipped()) if p is not None):
        if path.is_file():
            return path, _read(path)
    return None


def shipped() -> Path:
    """The folder of specs of the installed package, or of the source tree."""
    package = Path(str(files("hf_align")))
    inside = package / "specs"
    return inside if inside.is_dir() else package.parent.parent / "specs"


def _read(path: Path) -> OverrideFile:
    try:
        return OverrideFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise HfAlignError(f"{path}: {where}: {first['msg']}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HfAlignError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
