"""The recipe of a merge as people write it: an ordinary mergekit YAML, with one more key, `align`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from hf_align.errors import HfAlignError
from hf_align.settings.choices import DESCENDING, Heads, Match
from hf_align.settings.plain_yaml import read_documents

NAMING = ("model", "source_model", "base_model")
"""Keys of recipes whose values are models."""


class Align(BaseModel):
    """The key `align` of a recipe; each field is the option of the same name of `hf-align merge`.

    Attributes:
        reference: the model whose basis all others are moved into; by default the base model, else the first.
        match: without it by weights, and not at all where the models share a basis already.
    """

    model_config = ConfigDict(extra="forbid")

    reference: str | None = None
    match: Match | None = None
    data: Path | None = None
    residual: Literal["orthogonal", "permutation"] = "orthogonal"
    heads: Heads = "two-stage"
    spaces: tuple[str, ...] = ()
    steps: PositiveInt | None = None
    seed: int | None = None
    device: str | None = None
    untie: bool | None = None
    specs: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """A document of a recipe.

    Attributes:
        name: what the documents after it call the model that it makes; None for one that none of them needs.
        body: as mergekit reads it, every model as `PATH@REVISION+ADAPTER`.
        align: its key `align`; None without one.
    """

    name: str | None
    body: Mapping[str, Any]
    align: Align | None


def read_recipes(path: Path) -> list[Recipe]:
    """The documents of a recipe, as `mergekit-multi` reads them. A bare `align: true` takes all defaults.

    Raises:
        HfAlignError: there is no such file, it is not valid YAML of that kind, or nothing uses a setting.
    """
    try:
        found = read_documents(path)
    except OSError as error:
        raise HfAlignError(f"{path} cannot be read: {error.strerror}") from error
    return [_recipe(path, document) for document in found or [None]]


def _recipe(path: Path, document: Any) -> Recipe:
    if not isinstance(document, dict):
        raise HfAlignError(f"{path} is not a mapping; a mergekit recipe has merge_method, models, …")
    name, asked = document.pop("name", None), document.pop("align", None)
    if name is not None and not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name)):
        raise HfAlignError(f"{path}: name is {name!r}; use letters, digits, dots and dashes")
    body = with_models(document, _reference)
    if asked in (None, False):
        return Recipe(name, body, None)
    try:
        align = Align.model_validate({} if asked is True else asked)
    except ValidationError as error:
        raise HfAlignError(f"{path}: align: {first_fault(error)}") from error
    if align.steps and align.match != "learned" and body.get("merge_method") not in DESCENDING:
        raise HfAlignError(f"{path}: align: steps applies to match: learned, or to a merge_method that descends")
    return Recipe(name, body, align)


def with_models(recipe: Any, instead: Callable[[Any], Any]) -> Any:
    """A recipe with something else in the place of each of its models."""
    if isinstance(recipe, list):
        return [with_models(inner, instead) for inner in recipe]
    if not isinstance(recipe, Mapping):
        return recipe
    return {key: instead(inner) if key in NAMING else with_models(inner, instead) for key, inner in recipe.items()}


def with_words(recipe: Any, instead: Callable[[str], str]) -> Any:
    """A recipe with something else in the place of each text that is no key."""
    if isinstance(recipe, Mapping):
        return {key: with_words(inner, instead) for key, inner in recipe.items()}
    if isinstance(recipe, list):
        return [with_words(inner, instead) for inner in recipe]
    return instead(recipe) if isinstance(recipe, str) else recipe


def renamed(recipe: Any, names: Mapping[str, str]) -> Any:
    """A recipe with other names for its models."""
    return with_words(recipe, lambda text: names.get(text, text))


def _reference(value: Any) -> Any:
    """`PATH@REVISION+ADAPTER@REVISION` for `{path, revision}`, or for `{model: …, lora: …}` of two such mappings.

    Raises:
        HfAlignError: a model is written in another way.
    """
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("path"), str) and value.keys() <= {"path", "revision"}:
        return f"{value['path']}@{value['revision']}" if value.get("revision") else value["path"]
    parts = [_reference(value[key]) for key in ("model", "lora") if value.get(key) is not None]
    if not parts or not value.keys() <= {"model", "lora"} or not all(isinstance(part, str) for part in parts):
        raise HfAlignError(f"the recipe names a model by {', '.join(map(str, value))}; write it as "
                           "PATH@REVISION+ADAPTER")  # fmt: skip
    return "+".join(parts)


def first_fault(error: ValidationError) -> str:
    """Where pydantic found the first thing wrong, and what, on one line."""
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    return f"{where}: {fault['msg']}" if where else str(fault["msg"])
