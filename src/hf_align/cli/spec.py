"""`hf-align spec`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_align.cli import options as opt


def spec(
    model: opt.Model,
    output: Annotated[Path | None, opt.output("-o", "--output", metavar="FILE", help="Write to a file.")] = None,
    specs: opt.Specs = None,
    revision: opt.Revision = None,
    token: opt.Token = None,
    trust_remote_code: opt.Remote = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Print the symmetries derived from an architecture, as YAML. Reads no weights.

    $ hf-align spec llama
    $ hf-align spec org/a -o a.yml
    """
    model = opt.at_revision(model, revision)
    import yaml

    from hf_align.api.symmetries import symmetries
    from hf_align.runtime.progress import waiting

    with waiting("deriving the symmetries", quiet=quiet):
        found = symmetries(model, specs=specs, trust_remote_code=trust_remote_code).as_json()
    text = json.dumps(found, indent=2) if as_json else yaml.safe_dump(found, sort_keys=False, width=120)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text, encoding="utf-8")
