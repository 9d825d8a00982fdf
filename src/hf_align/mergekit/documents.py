"""Recipes of several documents, as `mergekit-multi` takes them: one may name the result of another as a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from hf_align.errors import HfAlignError
from hf_align.mergekit.config import Recipe, with_models
from hf_align.mergekit.extra import models_of


def in_order(recipes: Sequence[Recipe], output: Path) -> list[tuple[Recipe, Path]]:
    """Documents and where each is written, none before those whose results it takes.

    The one without a name is written to the output; if all have names, the last one is. The others go to
    `OUTPUT.parts/NAME`.

    Raises:
        HfAlignError: two have the same name or none, they wait for each other, or the reference of one is not among its
            models.
    """
    for recipe in recipes:
        _require_reference(recipe)
    names = [recipe.name for recipe in recipes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise HfAlignError(
            f"two documents of the recipe are called {twice.pop() or 'nothing: give all but one a name'}"
        )
    final = recipes[names.index(None)] if None in names else recipes[-1]
    whole = output if output.name not in ("", "..") else Path(os.path.abspath(output))
    parts = whole.parent / f"{whole.name}.parts"
    folders = {name: output if name == final.name else parts / str(name) for name in names}
    ordered = _sorted({recipe.name: [m for m in models_of(recipe.body) if m in folders] for recipe in recipes})
    found = [recipes[names.index(name)] for name in ordered]

    def on_disk(model: Any) -> Any:
        return str(folders[model]) if isinstance(model, str) and model in folders else model

    def placed(recipe: Recipe) -> Recipe:
        moved = {"reference": on_disk(recipe.align.reference)} if recipe.align is not None else {}
        align = recipe.align and recipe.align.model_copy(update=moved)
        return replace(recipe, body=with_models(recipe.body, on_disk), align=align)

    return [(placed(recipe), folders[recipe.name]) for recipe in found]


def _require_reference(recipe: Recipe) -> None:
    names, reference = models_of(recipe.body), recipe.align and recipe.align.reference
    if reference is not None and reference not in names:
        raise HfAlignError(f"align: reference {reference} is not one of the recipe's models ({', '.join(names)})")


def _sorted(needed: Mapping[str | None, Sequence[str]]) -> list[str | None]:
    try:
        return list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        waiting = " and ".join(sorted({str(name) for name in error.args[1]}))
        raise HfAlignError(f"the documents {waiting} of the recipe depend on each other") from error
