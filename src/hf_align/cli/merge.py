"""`hf-align merge`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from hf_align.cli import console
from hf_align.cli import options as opt
from hf_align.errors import OptionError
from hf_align.settings.choices import OF_MANY, Effort, OwnMethod
from hf_align.settings.options import Options

if TYPE_CHECKING:
    from hf_align.jobs.outcome import Report

_OF_EFFORT = ("match", "method", "alignment", "steps", "lambda_sampling", "base", "parameter")


def merge(
    ctx: typer.Context,
    a: opt.A,
    b: opt.B,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="MORE", help=f"More models, for --method {', '.join(OF_MANY)}."),
    ] = None,
    match: opt.Match = Options.match,
    steps: opt.Steps = None,
    lambda_sampling: opt.LambdaSampling = None,
    residual: opt.Residual = Options.residual,
    heads: opt.Heads = Options.heads,
    spaces: opt.Spaces = None,
    baseline: opt.AllowInexact = False,
    untie: opt.Untie = None,
    retokenize: opt.Retokenize = False,
    alignment: opt.AlignmentFile = None,
    specs: opt.Specs = None,
    strict: opt.Strict = False,
    effort: opt.Effort = None,
    method: opt.Method = Options.method,
    weight: opt.Weight = Options.weight,
    base: opt.Base = None,
    parameter: opt.Parameter = None,
    data: opt.Data = None,
    points: opt.Points = Options.points,
    output: opt.Output = Path("merged"),
    dtype: opt.Dtype = None,
    widen: opt.Widen = None,
    max_shard_size: opt.MaxShardSize = Options.max_shard_size,
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    push: opt.Push = None,
    private: opt.Private = False,
    create_pr: opt.CreatePr = False,
    commit_message: opt.CommitMessage = None,
    revision: opt.Revision = None,
    token: opt.Token = None,
    drop_cache: opt.DropCache = False,
    trust_remote_code: opt.Remote = False,
    device: opt.Device = None,
    offload: opt.Offload = None,
    witness: opt.Witness = True,
    certify: opt.Certify = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Align B with A and merge the two into one checkpoint.

    $ hf-align merge org/a org/b -o merged --data held_out.txt
    $ hf-align merge org/a org/b --effort quick
    $ hf-align merge org/a org/b --match learned --push

    On several processes, with the same bytes:

    $ accelerate launch --multi_gpu --num_processes 4 -m hf_align merge A B

    accelerate needs --multi_gpu to start more than one process on a machine, also where there is no GPU.
    """
    if push is None and (private or create_pr or commit_message):
        raise OptionError("--private, --create-pr and --commit-message need --push")
    typed = locals()
    effort = _effort(ctx, effort)  # first: what does not go with it may go with no other option either
    options = opt.chosen(typed)
    _require_used(ctx, options, data, certify)
    _require_for_method(options, base, parameter, len(more or ()), effort)
    models = [opt.at_revision(model, revision) for model in (a, b, *(more or ()))]
    if len(set(models)) < len(models):
        console.speaker(options.quiet)("warning: the same model is given twice")
    if dry_run:
        return _plan(models, output, options, effort, as_json)
    owner = ""
    if push is not None:
        from hf_align.publishing import push as upload

        owner = upload.user(push, create_pr=create_pr)  # before anything is computed
    done = _merged(models, output, options, base, parameter, data, push is not None if certify is None else certify,
                   opt.command(ctx, merge), effort)  # fmt: skip
    report = done.as_json()
    lines = console.merge_lines(report)
    if push is not None:
        names = [_base(model) for model in models]
        message = commit_message or f"Merge of {', '.join(names[:-1])} and {names[-1]} made with hf-align"
        name = push or upload.default_name(owner, names)
        pushed = upload.push(output, upload.Destination(name, private, create_pr, message))
        report["pushed"] = asdict(pushed)
        lines.append(f"uploaded to {pushed.url}")
    console.emit(report, as_json, lines)


def _effort(ctx: typer.Context, asked: Effort | None) -> Effort | None:
    """The effort that is asked for; a good one where all that an effort chooses is left open, else none."""
    given = _given(ctx, _OF_EFFORT)
    if asked is not None and given:
        raise OptionError(f"--effort chooses how to match and to merge; leave out --{given[0].replace('_', '-')}")
    return asked or (None if given else "good")


def _given(ctx: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of some options that were typed."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def _require_used(ctx: typer.Context, options: Options, data: Path | None, certify: bool | None) -> None:
    """Refuse what would do nothing."""
    if certify and options.match == "none":
        raise OptionError("--certify proves the symmetries that models are moved by, and --match none moves none")
    if certify and options.method not in get_args(OwnMethod):
        raise OptionError(f"--certify is not for --method {options.method}; hf-align certify proves the same")
    if data is None and _given(ctx, ["points"]):
        raise OptionError("--points is how many losses are measured between the models; it needs --data")


def _require_for_method(
    options: Options, base: str | None, parameter: list[str] | None, more: int, effort: Effort | None
) -> None:
    """Refuse what does not go with a method, or with more than two models."""
    own = options.method in get_args(OwnMethod)
    if own and (base is not None or parameter):
        raise OptionError(f"--base and --parameter are for methods of mergekit, not for --method {options.method}")
    if more and not own:
        raise OptionError(f"--method {options.method} merges two models here; hf-align mergekit takes a recipe of more")
    if more:
        options.require_for_many()
    if effort is None:
        options.require_filled()


def _merged(models: list[str], output: Path, options: Options, base: str | None, parameter: list[str] | None,
            data: Path | None, certify: bool, command: str, effort: Effort | None) -> Report:  # fmt: skip
    say, (a, b, *more) = console.speaker(options.quiet), models
    if options.method in get_args(OwnMethod):
        from hf_align.jobs import pipeline

        return pipeline.merge(a, b, output, options, data, say, more=more, certify=certify, command=command,
                              effort=effort)  # fmt: skip
    from hf_align.mergekit.pair import merge_pair, read_parameters

    return merge_pair(a, b, output, options, base=base, parameters=read_parameters(parameter or []), data=data,
                      say=say, command=command)  # fmt: skip


def _plan(models: list[str], output: Path, options: Options, effort: Effort | None, as_json: bool) -> None:
    if len(models) > 2:
        raise OptionError("--dry-run takes two models; for more, run it on pairs")
    from hf_align.jobs import dry_run
    from hf_align.jobs.effort import of_strangers

    if effort is not None:
        options = of_strangers(options, effort)
    options.require_filled()
    found = dry_run.dry_run(models[0], models[1], output, options)
    console.emit(found.as_json(), as_json, dry_run.lines(found))
    if not found.compatible:
        raise typer.Exit(2)


def _base(model: str) -> str:
    """A model's name without its revision, a folder's without its path; of a model with an adapter, the adapter's."""
    model = model if Path(model).is_dir() else model.rpartition("+")[2]
    return Path(model).resolve().name if Path(model).is_dir() else model.removeprefix("hf://").partition("@")[0]
