"""`hf-align transport`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_align.cli import console
from hf_align.cli import options as opt
from hf_align.settings import choices
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule


def transport(
    ctx: typer.Context,
    finetuned: Annotated[
        str, typer.Argument(metavar="FINETUNED", help="The fine-tune: a folder, org/name, or MODEL+ADAPTER.")
    ],
    base: Annotated[str, opt.merging(metavar="A", help="The model that it was tuned from.")],
    onto: Annotated[str, opt.merging(metavar="B", help="The base that it is carried to.")],
    output: opt.Output,
    method: Annotated[
        choices.TransportMethod,
        opt.merging(
            metavar="METHOD",
            help="regression fits every weight so that B does on top of its own what the fine-tune does on top of A; "
            "task_arithmetic only adds the change of the weights, in B's basis; distil trains from what regression "
            "gives.",
        ),
    ] = "regression",
    strength: Annotated[float, opt.merging(metavar="T", help="How much of the change is carried over.")] = 1.0,
    keep: Annotated[
        float,
        opt.merging(
            metavar="T",
            help="Examples that B writes for each that the fine-tune does: there the result answers as B does.",
        ),
    ] = choices.KEEP,
    as_adapter: Annotated[
        bool,
        opt.merging(
            "--as-adapter", help="Write an adapter of B where the fine-tune is an adapter, and no whole model."
        ),
    ] = False,
    match: opt.Match = Options.match,
    steps: opt.Steps = None,
    data: opt.Data = None,
    residual: opt.Residual = Options.residual,
    heads: opt.Heads = Options.heads,
    spaces: opt.Spaces = None,
    untie: opt.Untie = None,
    specs: opt.Specs = None,
    strict: opt.Strict = False,
    dtype: opt.Dtype = None,
    max_shard_size: opt.MaxShardSize = Options.max_shard_size,
    overwrite: opt.Overwrite = False,
    token: opt.Token = None,
    trust_remote_code: opt.Remote = False,
    device: opt.Device = None,
    offload: opt.Offload = None,
    witness: opt.Witness = True,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Carry what a fine-tune learned on its base to another base.

    Without data the models are run on what the fine-tune writes. With data (text like what it was trained on) the
    report says how much of the gain is carried over.

    $ hf-align transport org/a-chat --base org/a --onto org/b -o b-chat
    """
    choices.strength("--strength", strength)
    choices.share("--keep", keep)
    options = opt.chosen(locals(), Schedule.of_transport)
    from hf_align.jobs import pipeline

    made = pipeline.transport(finetuned, base, onto, output, options, data, console.speaker(quiet),
                              strength=strength, keep=keep, as_adapter=as_adapter,
                              command=opt.command(ctx, transport))  # fmt: skip
    report = made.as_json()
    console.emit(report, as_json, console.merge_lines(report))
