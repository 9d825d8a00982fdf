"""The file of reviewed overrides of a model type: what may be written in it, and where it is found.

`specs/schema.json` is generated from the models below.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_align.errors import HfAlignError
from hf_align.settings.plain_yaml import read_yaml
from hf_align.tracing.given import Argument, GivenCall


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


class Values(_Strict):
    """A tensor that a call is given."""

    shape: tuple[Annotated[int, Field(gt=0)] | str, ...] = Field(
        description="Sizes: numbers, `batch` and `tokens` of the first call, or fields of the config."
    )
    dtype: Literal["float", "int", "bool", "tokens"] = "float"
    values: Any = Field(default=None, description="A number, or lists of them, that fill the shape. Without, floats "
                        "and tokens may be any, and the others are zero.")  # fmt: skip


class Call(_Override):
    """A way to call the model that no trying finds: it is traced, certified and witnessed as the others are."""

    action: Literal["call"]
    name: str = Field(min_length=1)
    arguments: dict[str, Values | bool | int | float | str] = Field(
        min_length=1, description="Besides those of the first call, or in their place."
    )

    def given(self) -> GivenCall:
        """The call, as tracing takes it."""
        return GivenCall(self.name, tuple(
            Argument(name, value.shape, value.dtype, _tuples(value.values)) if isinstance(value, Values)
            else Argument(name, None, "", value)
            for name, value in self.arguments.items()
        ))  # fmt: skip


class Unused(_Override):
    """Weights that are read by no call on purpose hold nothing still but themselves."""

    action: Literal["unused"]
    parameter: str = Field(min_length=1, examples=["model.mtp.**"])


Override = Annotated[Pin | SetBound | Tie | Call | Unused, Field(discriminator="action")]


class OverrideFile(_Strict):
    """Overrides of the derived symmetries of one model type, in the order in which they apply."""

    overrides: tuple[Override, ...]

    @property
    def calls(self) -> tuple[GivenCall, ...]:
        """Modes besides those that are found."""
        return tuple(o.given() for o in self.overrides if isinstance(o, Call))

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns of weights that no call reads on purpose."""
        return tuple(o.parameter for o in self.overrides if isinstance(o, Unused))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read_overrides(model_type: str, folder: Path | None = None) -> tuple[Path, OverrideFile] | None:
    """The overrides of a model type: from `folder` if it has any, else from those that ship with the package.

    Raises:
        HfAlignError: the folder does not exist, or the file does not follow the schema.
    """
    if folder is not None and not folder.is_dir():
        raise HfAlignError(f"{folder} is not a folder of specs")
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
        return OverrideFile.model_validate(read_yaml(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise HfAlignError(f"{path}: {where}: {first['msg']}") from error
    except OSError as error:
        raise HfAlignError(f"{path} cannot be read: {error.strerror}") from error


def matched(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the wildcards stand for; None where the name is another."""
    expression = re.escape(pattern).replace(r"\*\*", "(.*)").replace(r"\*", r"([^.]*)")
    found = re.fullmatch(expression, name)
    return None if found is None else found.groups()


def is_named(pattern: str, name: str) -> bool:
    """Whether a name is one of those that are meant."""
    return matched(pattern, name) is not None
