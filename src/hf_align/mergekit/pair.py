"""Two models, and a base if the method asks for one, by a method of mergekit: `hf-align merge --method ties`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.shards import Source as Entries
from hf_align.errors import HfAlignError, OptionError
from hf_align.jobs.aligned import OpenedJob, save_matches
from hf_align.jobs.comparing import judged, of_result
from hf_align.jobs.job import Asked, Say, run, silent
from hf_align.jobs.opened import Basis, Opened
from hf_align.jobs.outcome import Report
from hf_align.jobs.writing import record, reported_on
from hf_align.mergekit.extra import parse, require_known
from hf_align.mergekit.methods import Loop, merge_here
from hf_align.settings.options import Options


def merge_pair(
    a: str,
    b: str,
    output: Path,
    options: Options,
    *,
    base: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    data: Path | None = None,
    say: Say = silent,
    command: str = "",
) -> Report:
    """Merge B and the base, moved into A's basis, with A.

    Args:
        base: what the models are taken as changes of; methods of two models that need one take A.
        parameters: of the method, by name, for all models and tensors.
        data: examples to report on, half of them for matching that runs the models.

    Raises:
        HfAlignError: mergekit is not there, or a model or a parameter is not usable; nothing is written then.
    """
    require_known()
    asked, parameters = Asked(options, data, say, command), dict(parameters or {})
    recipe = {
        "merge_method": options.method,
        "models": [
            {"model": "a", "parameters": {"weight": 1 - options.weight}},
            {"model": "b", "parameters": {"weight": options.weight}},
        ],
        "parameters": parameters,
        "base_model": "base" if base is not None else _base_among(options.method),
    }
    config = parse(recipe)
    known = _parameters_of(options.method, parameters)
    if "weight" not in known and options.weight != 0.5:
        raise OptionError(f"--method {options.method} gives no model a weight of its own: leave --weight out")
    named = {"a": a, "b": b, **({"base": base} if base is not None else {})}
    models = Opened.open(named, options, say, jointly=False)
    loop = merge_here(config, models.first, options)
    fit, held_out = models.examples(data)
    asked.clock.lap("open")
    chosen = {**parameters, **({"weight": options.weight} if "weight" in known else {})}
    chosen |= {"base": models.sources[2].name} if base is not None else {}
    made_with = {"the command": "merge", "--parameter": json.dumps(parameters), **reported_on(held_out)}
    job = _ByMethod(asked=asked, sources=models.sources, record=record(made_with, models, fit), draft=loop.draft,
                    chosen=chosen, models=models, fit=fit, held_out=held_out, loop=loop)  # fmt: skip
    return run(job, output)


@dataclass(frozen=True, kw_only=True)
class _ByMethod(OpenedJob[Basis]):
    """By our own loop over tensors."""

    loop: Loop

    def match(self, claim: Claim) -> Basis:
        return self.models.match(claim, self.fit, self.asked.say)

    def entries(self, claim: Claim, match: Basis) -> Entries:
        return self.loop.entries(match)

    def document(self, claim: Claim, match: Basis, report: Report) -> None:
        save_matches(claim.documents, match)
        if self.held_out is not None:
            config, method = match.models.first.config, f"--method {self.options.method}"
            merged = match.of_first  # a base is no part of their mean
            report.notes.append(judged(merged, self.held_out, report))
            report.notes.append(of_result(merged, self.held_out, method, config, Checkpoint.of_files(claim.written)))
        super().document(claim, match, report)


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
        if name in found:
            raise HfAlignError(f"--parameter {name} is given twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _parameters_of(method: str, given: Mapping[str, Any]) -> frozenset[str]:
    """The parameters that a method has; what mergekit would not look at is refused, and what it would miss.

    Raises:
        HfAlignError: the method has no such parameter, or needs another one.
    """
    from mergekit import merge_methods

    if "weight" in given:  # each model has one of its own, which mergekit takes first
        raise HfAlignError("--parameter weight is not looked at; --weight is the share of B")
    said = merge_methods.get(method).spec.parameters
    known = frozenset(parameter.name for parameter in said)
    if unknown := sorted(given.keys() - known):
        others = ", ".join(sorted(known)) or "none"
        raise HfAlignError(f"--method {method} has no parameter {unknown[0]}; it has {others}")
    needed = {parameter.name for parameter in said if parameter.required} - {"weight"}
    if missing := sorted(needed - given.keys()):
        raise HfAlignError(f"--method {method} needs --parameter {missing[0]}=VALUE")
    return known


def _base_among(method: str) -> str | None:
    """Which of the models is the base where none is given: A, for a method that takes exactly two of which one is.

    Raises:
        HfAlignError: there is no such method, or it needs a base besides.
    """
    from mergekit import merge_methods
    from mergekit.merge_methods import BasePolicy

    try:
        contract = merge_methods.get(method).spec.contract
    except (KeyError, ValueError, RuntimeError) as error:
        raise HfAlignError(f"mergekit has no method {method}") from error
    if contract.base != BasePolicy.REQUIRED:
        return None
    if contract.max_inputs != 2:
        raise HfAlignError(f"--method {method} merges what models changed in their base; say with --base which it is")
    return "a"
