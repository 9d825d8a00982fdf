"""The recipe of a merge as people write it: an ordinary mergekit YAML, with one more key, `align`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hf_align.choices import Match
from hf_align.errors import HfAlignError
from hf_align.plain_yaml import read_yaml


class Align(BaseModel):
    """The key `align` of a recipe; each field is the option of the same name of `hf-align merge`.

    Attributes:
        reference: the model whose basis all others are moved into; by default the base model, else the first.
    """

    model_config = ConfigDict(extra="forbid")

    reference: str | None = None
    match: Match = "weight"
    data: Path | None = None
    residual: Literal["orthogonal", "permutation"] = "orthogonal"
    untie: bool | None = None
    specs: Path | None = None


def read_recipe(path: Path) -> tuple[dict[str, Any], Align | None]:
    """A recipe without its key `align`, and that key; None without one. A bare `align: true` takes all defaults.

    Raises:
        HfAlignError: there is no such file, or it is no YAML of that kind.
    """
    try:
        recipe = read_yaml(path)
    except OSError as error:
        raise HfAlignError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(recipe, dict):
        raise HfAlignError(f"{path} holds no mapping; a mergekit recipe has merge_method, models, …")
    asked = recipe.pop("align", None)
    if asked in (None, False):
        return recipe, None
    try:
        return recipe, Align.model_validate({} if asked is True else asked)
    except ValidationError as error:
        raise HfAlignError(f"{path}: align: {first_fault(error)}") from error


def first_fault(error: ValidationError) -> str:
    """Where pydantic found the first thing wrong, and what, on one line."""
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    return f"{where}: {fault['msg']}" if where else str(fault["msg"])
