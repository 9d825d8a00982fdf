"""Methods of hf-align in recipes, which mergekit does not have: `transport`, `curve`, `regression` and `distil`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_align.errors import HfAlignError
from hf_align.jobs.job import Asked, Job
from hf_align.jobs.merge import Merge
from hf_align.jobs.transport import Transport, Tuned
from hf_align.mergekit.config import Align
from hf_align.settings.choices import KEEP, Dtype, OwnMethod, checked, share
from hf_align.settings.schedule import Schedule

TRANSPORT = "transport"
_METHODS = (TRANSPORT, "curve", "regression", "distil")


def is_own(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe is merged by a method of hf-align."""
    return recipe.get("merge_method") in _METHODS


def own_job(path: Path, recipe: Mapping[str, Any], align: Align | None, asked: Asked) -> Job[Any]:
    """What a recipe with a method of hf-align asks for.

    Raises:
        HfAlignError: a key that means nothing to its method, one that is missing, or any bad input.
    """
    method = str(recipe["merge_method"])
    models, own = _entries(recipe), {k: v for k, v in recipe.items() if k not in ("merge_method", "models")}
    parameters = own.pop("parameters", None) or {}
    dtype = own.pop("out_dtype", None) or own.pop("dtype", None)
    base = own.pop("base_model", None)
    _require_known(method, own, ())
    if align is not None and align.reference is not None:
        basis = "base_model" if method == TRANSPORT else "first model"
        raise HfAlignError(f"reference means nothing to merge_method {method}, which is in the basis of the {basis}")
    _require_known(method, parameters, ("keep",) if method == TRANSPORT else ())
    options = replace(asked.options, dtype=None if dtype is None else checked("dtype", dtype, Dtype))
    steps = {"steps": align.steps} if align is not None and align.steps else {}
    schedule = Schedule.of_method(method, **steps, seed=options.schedule.seed)
    named = checked("merge_method", "regression" if method == TRANSPORT else method, OwnMethod)
    options = replace(options, method=named, schedule=schedule)
    asked = replace(asked, options=options, command=f"hf-align mergekit {path.name} OUT")
    weights = [_number(method, entry, "weight", 1.0) for entry in models]
    if method == TRANSPORT:
        if base is None:
            raise HfAlignError("merge_method transport needs a base_model, which the fine-tunes are carried to")
        tuned = [Tuned(str(entry["model"]), _tuned_from(entry), weight)
                 for entry, weight in zip(models, weights, strict=True)]  # fmt: skip
        keep = share("keep", _number(method, {"parameters": parameters}, "keep", KEEP))
        return Transport.open(tuned, str(base), asked, keep=keep)
    return _merge(method, base, models, weights, asked)


def _merge(method: str, base: Any, models: list[Mapping[str, Any]], weights: list[float], asked: Asked) -> Merge:
    """A merge of two models by their weights, or of more in equal parts."""
    if base is not None or any("base_model" in entry for entry in models):
        raise HfAlignError(f"base_model means nothing to merge_method {method}, which merges models as they are")
    if len(models) < 2:
        raise HfAlignError(f"merge_method {method} needs two models or more")
    if min(weights) < 0 or not sum(weights):
        raise HfAlignError(f"the weights of merge_method {method} are {weights}; they must be positive")
    if len(models) > 2 and len(set(weights)) > 1:
        raise HfAlignError(f"merge_method {method} merges more than two models in equal parts; leave their weights out")
    options = replace(asked.options, weight=weights[1] / sum(weights) if len(models) == 2 else 0.5)
    return Merge.open([str(entry["model"]) for entry in models], replace(asked, options=options), certify=False)


def _entries(recipe: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    method, models = recipe["merge_method"], recipe.get("models")
    if not isinstance(models, list) or not models:
        raise HfAlignError(f"merge_method {method} needs a list of models")
    for entry in models:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("model"), str):
            raise HfAlignError(f"merge_method {method} needs a model in each entry of models")
        _require_known(method, entry, ("model", "base_model", "parameters"))
        _require_known(method, entry.get("parameters") or {}, ("weight",))
    return models


def _require_known(method: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := [key for key in given if key not in known]:
        raise HfAlignError(f"{unknown[0]} means nothing to merge_method {method}")


def _number(method: str, entry: Mapping[str, Any], name: str, default: float) -> float:
    """A parameter that is one number: not of layers, nor of filters."""
    found = (entry.get("parameters") or {}).get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise HfAlignError(f"{name} is {found!r}; merge_method {method} needs one finite number")
    return float(found)


def _tuned_from(entry: Mapping[str, Any]) -> str:
    base = entry.get("base_model")
    if not isinstance(base, str):
        raise HfAlignError(f"merge_method transport needs the base_model that {entry['model']} was tuned from")
    return base
