"""`hf-align align`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hf_align.cli import console
from hf_align.cli import options as opt
from hf_align.settings.options import Options


def align(
    a: opt.A,
    b: opt.B,
    output: Annotated[Path, opt.output("-o", "--output", metavar="DIR", help="Folder for B in A's basis.")],
    match: opt.MatchToMove = "weight",
    data: opt.DataToMatch = None,
    steps: opt.StepsToMatch = None,
    lambda_sampling: opt.LambdaSampling = None,
    residual: opt.Residual = Options.residual,
    heads: opt.Heads = Options.heads,
    spaces: opt.Spaces = None,
    baseline: opt.AllowInexact = False,
    untie: opt.Untie = None,
    retokenize: opt.Retokenize = False,
    specs: opt.Specs = None,
    strict: opt.Strict = False,
    overwrite: opt.Overwrite = False,
    revision: opt.Revision = None,
    token: opt.Token = None,
    trust_remote_code: opt.Remote = False,
    device: opt.Device = None,
    offload: opt.Offload = None,
    witness: opt.Witness = True,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Write B in A's basis, its function unchanged, and the alignment that took it there.

    The norms and biases of B are written in one canonical form. Those of A on disk are not in that form, so do not
    average the two files with another tool: hf-align merge brings both into it first.

    $ hf-align align org/a org/b -o b-in-a
    """
    options = opt.chosen(locals())
    a, b = (opt.at_revision(model, revision) for model in (a, b))
    from hf_align.jobs import pipeline

    report = pipeline.align(a, b, output, options, data, console.speaker(quiet)).as_json()
    console.emit(report, as_json, console.merge_lines(report))
