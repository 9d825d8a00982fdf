"""`hf-align evaluate`."""

from __future__ import annotations

from hf_align import console
from hf_align.cli import options as opt
from hf_align.options import Options


def evaluate(
    a: opt.A,
    b: opt.B,
    data: opt.HeldOut,
    points: opt.Points = Options.points,
    match: opt.Match = Options.match,
    steps: opt.Steps = None,
    lambda_sampling: opt.LambdaSampling = None,
    residual: opt.Residual = Options.residual,
    heads: opt.Heads = Options.heads,
    spaces: opt.Spaces = None,
    baseline: opt.AllowInexact = False,
    untie: opt.Untie = None,
    alignment: opt.AlignmentFile = None,
    specs: opt.Specs = None,
    revision: opt.Revision = None,
    token: opt.Token = None,
    trust_remote_code: opt.Remote = False,
    device: opt.Device = None,
    offload: opt.Offload = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Measure the loss between A and B, with and without alignment.

    $ hf-align evaluate org/a org/b --data held_out.txt --points 5
    """
    options = opt.chosen(locals())
    a, b = (opt.at_revision(model, revision) for model in (a, b))
    console.bars(quiet)
    from hf_align import pipeline
    from hf_align.jobs.comparing import verdict

    found = pipeline.evaluate(a, b, data, options, console.speaker(quiet))
    lines = [*console.comparison_lines(found.as_json()), "", *console.wrapped(verdict(found))]
    console.emit(found.as_json(), as_json, lines)
