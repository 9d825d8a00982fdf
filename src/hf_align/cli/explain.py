"""`hf-align explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_align.cli import console
from hf_align.cli import options as opt
from hf_align.errors import HfAlignError


def explain(
    model: opt.Model,
    parameter: Annotated[str, typer.Argument(metavar="NAME", help="A parameter's name in memory.")],
    specs: opt.Specs = None,
    revision: opt.Revision = None,
    token: opt.Token = None,
    trust_remote_code: opt.Remote = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Say which spaces a parameter's axes carry, and which line of the modelling code bounds each.

    $ hf-align explain llama model.layers.0.mlp.up_proj.weight
    """
    model = opt.at_revision(model, revision)
    import yaml

    from hf_align.api.symmetries import symmetries
    from hf_align.runtime.progress import waiting

    with waiting("deriving the symmetries", quiet=quiet):
        found = symmetries(model, specs=specs, trust_remote_code=trust_remote_code)
    try:
        result = found.explain(parameter)
    except ValueError as error:
        raise HfAlignError(f"{model} has no parameter {parameter}; hf-align spec lists them") from error
    console.emit(result, as_json, yaml.safe_dump(result, sort_keys=False, width=80).splitlines())
