"""Two models, and a base if the method asks for one, by a method of mergekit: `hf-align merge --method ties`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_align.errors import HfAlignError
from hf_align.mergekit.basis import open_inputs
from hf_align.mergekit.extra import parse, require_known
from hf_align.mergekit.methods import merge_here
from hf_align.options import Options
from hf_align.outcome import Report
from hf_align.pipeline import Say
from hf_align.publishing.card import document
from hf_align.publishing.provenance import public_name


def merge_pair(
    a: str,
    b: str,
    output: Path,
    options: Options,
    *,
    base: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    data: Path | None = None,
    say: Say = lambda _: None,
    command: str = "",
) -> Report:
    """Merge B and the base, moved into A's basis, with A.

    Args:
        base: what the models are taken as changes of; methods of two models that need one take A.
        parameters: of the method, by name, for all models and tensors.
        data: examples for matching that runs the models.

    Raises:
        HfAlignError: mergekit is not there, or a model or a parameter is not usable; nothing is written then.
    """
    require_known()
    recipe = {
        "merge_method": options.method,
        "models": [
            {"model": "a", "parameters": {"weight": 1 - options.weight}},
            {"model": "b", "parameters": {"weight": options.weight}},
        ],
        "parameters": {**(parameters or {})},
        "base_model": "base" if base is not None else "a" if _starts_from_a(options.method) else None,
    }
    config = parse(recipe)
    named = {"a": a, "b": b, **({"base": base} if base is not None else {})}
    inputs = open_inputs("a", named, options, data, say)
    report = Report(str(output), inputs.pair.spec.model_type, untied=inputs.pair.untied,
                    pinned_by_unknown_ops=dict(inputs.pair.spec.unknown_ops))  # fmt: skip
    chosen = {**options.strategy, **(parameters or {})}
    if base is not None:
        chosen["base"] = public_name(inputs.models["base"].source)
    sources = [model.source for model in inputs.models.values()]

    def finish() -> None:
        document(output, sources, say, command=command, strategy=chosen, **report.facts)

    merge_here(config, inputs, output, options, say, document=finish)
    return report


def read_parameters(written: list[str]) -> dict[str, Any]:
    """Parameters written as `name=value`; values are numbers, true, false or text.

    Raises:
        HfAlignError: one has no equals sign.
    """
    found: dict[str, Any] = {}
    for each in written:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise HfAlignError(f"--parameter {each} is not of the form name=value")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _starts_from_a(method: str) -> bool:
    """Whether a method takes exactly two models, of which one is the base."""
    from mergekit import merge_methods
    from mergekit.merge_methods import BasePolicy

    try:
        contract = merge_methods.get(method).spec.contract
    except (KeyError, ValueError, RuntimeError) as error:
        raise HfAlignError(f"mergekit has no method {method}") from error
    return bool(contract.base == BasePolicy.REQUIRED and contract.max_inputs == 2)
