"""`hf-align transport`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_align.cli import console
from hf_align.cli import options as opt
from hf_align.errors import OptionError
from hf_align.settings import choices
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

_DISTILLED = Schedule.of_transport("distil").steps


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
        float | None,
        opt.merging(
            metavar="T",
            show_default=str(choices.KEEP),
            help="Examples that B writes for each that the fine-tune does: there the result answers as B does.",
        ),
    ] = None,
    as_adapter: Annotated[
        bool,
        opt.merging(
            "--as-adapter", help="Write an adapter of B where the fine-tune is an adapter, and no whole model."
        ),
    ] = False,
    match: opt.Match = Options.match,
    steps: Annotated[
        int | None,
        opt.matching(
            metavar="N",
            show_default=f"{Schedule.steps}, or {_DISTILLED} with --method distil",
            help="Steps of --match learned, and of --method distil.",
        ),
    ] = None,
    data: opt.Data = None,
    residual: opt.Residual = Options.residual,
    heads: opt.Heads = Options.heads,
    spaces: opt.Spaces = None,
    untie: opt.Untie = None,
    specs: opt.Specs = None,
    strict: opt.Strict = False,
    dtype: Annotated[
        choices.Dtype | None, opt.output(metavar="DTYPE", show_default="that of B", help="Data type of the result.")
    ] = None,
    max_shard_size: opt.MaxShardSize = Options.max_shard_size,
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
    """Carry what a fine-tune learned on its base to another base.

    Without data the models are run on what the fine-tune writes. With data (text like what it was trained on) the
    report says how much of the gain is carried over.

    $ hf-align transport org/a-chat --base org/a --onto org/b -o b-chat
    """
    choices.strength("--strength", strength)
    if keep is not None and method == "task_arithmetic":
        raise OptionError("--keep is of what is fitted, and --method task_arithmetic fits nothing")
    keep = choices.share("--keep", choices.KEEP if keep is None else keep)
    options = opt.chosen(locals(), Schedule.of_transport)
    finetuned, base, onto = (opt.at_revision(model, revision) for model in (finetuned, base, onto))
    from hf_align.jobs import pipeline

    made = pipeline.transport(finetuned, base, onto, output, options, data, console.speaker(quiet),
                              strength=strength, keep=keep, as_adapter=as_adapter,
                              command=opt.command(ctx, transport))  # fmt: skip
    report = made.as_json()
    console.emit(report, as_json, console.merge_lines(report))
