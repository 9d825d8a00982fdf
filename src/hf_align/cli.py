"""The command line: options and output only; the work is in `pipeline.py`, `jobs/` and `symmetry/`."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
import typer
import yaml

from hf_align import __version__, pipeline
from hf_align.arguments import (
    OURS,
    AlignmentFile,
    Baseline,
    CommitMessage,
    CreatePr,
    Device,
    Dtype,
    HeadChoice,
    Heads,
    Json,
    Match,
    Matching,
    Method,
    Mixing,
    Mixings,
    Model,
    Offload,
    Overwrite,
    Private,
    Quiet,
    Remote,
    Residual,
    Residuals,
    Spaces,
    Specs,
    Steps,
    Strict,
    Untie,
    Witness,
)
from hf_align.console import bars, comparison_lines, emit, merge_lines, speaker, unexpected, wrapped
from hf_align.errors import HfAlignError
from hf_align.matching.schedule import Schedule
from hf_align.options import Options
from hf_align.processes import alone_by_mistake, current
from hf_align.progress import waiting

app = typer.Typer(
    name="hf-align",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Merge Hugging Face models that were never meant to be merged.\n\n"
    "Models trained from different seeds compute alike in different bases. hf-align derives from the architecture's "
    "graph every change of basis that leaves the function untouched, moves B into the basis of A, and merges.",
)


@app.command()
def merge(
    a: Model,
    b: Model,
    more: Annotated[list[str] | None, typer.Argument(help="More models: all are merged by their mean.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the merged model.")] = Path("merged"),
    match: Match = Matching.weight,
    method: Annotated[
        Method,
        typer.Option(
            help="How aligned models are mixed: linear and slerp entry by entry; circuits averages what heads do; "
            "fisher and regmean weigh by what the models compute, on half of --data, or on what they write themselves; "
            "curve trains the middle, without labels or data (lowest loss, slowest); "
            "transport (by weights, or activations) and semi-permutation mix B's units first, which is inexact; "
            "all others are mergekit's (pip install hf-align\\[mergekit])."
        ),
    ] = Method.linear,
    base: Annotated[str | None, typer.Option(help="Model that A and B started from, for ties and the like.")] = None,
    parameter: Annotated[
        list[str] | None, typer.Option(help="Of a method of mergekit, as density=0.5; may be given again.")
    ] = None,
    weight: Annotated[float, typer.Option(min=0.0, max=1.0, help="Weight of B.")] = 0.5,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Held-out examples; the report then says whether alignment helped. --match activation and learned "
            "match on the first half of them, and report on the other."
        ),
    ] = None,
    steps: Steps = 150,
    mixing: Mixings = Mixing.narrow,
    device: Device = None,
    offload: Offload = None,
    residual: Residuals = Residual.orthogonal,
    heads: HeadChoice = Heads.two_stage,
    spaces: Spaces = None,
    baseline: Baseline = False,
    untie: Untie = None,
    alignment: AlignmentFile = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the output; by default that of A.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest shard.")] = "5GB",
    witness: Witness = True,
    strict: Strict = False,
    specs: Specs = None,
    trust_remote_code: Remote = False,
    overwrite: Overwrite = False,
    push: Annotated[
        str | None, typer.Option(metavar="[ORG/NAME]", help="Upload; by default to USER/A-B-merge.")
    ] = None,
    private: Private = False,
    create_pr: CreatePr = False,
    commit_message: CommitMessage = None,
    certify: Annotated[
        bool | None, typer.Option("--certify/--no-certify", help="Prove the symmetries first. By default with --push.")
    ] = None,
    drop_cache: Annotated[
        bool, typer.Option("--drop-cache", help="Take shards from the Hub off the disk once they are merged.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be read, written and needed; reads headers only.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Align B with A and merge the two into one checkpoint.

    Example: hf-align merge org/a org/b --data held_out.txt --push

    On several processes, with the same bytes: accelerate launch --multi_gpu --num_processes 4 -m hf_align merge A B.
    --multi_gpu is how accelerate starts more than one process on a machine, also on one without GPUs.
    """
    bars(quiet)
    if push is None and (private or create_pr or commit_message):
        raise HfAlignError("--private, --create-pr and --commit-message need --push")
    owner = _uploader(push, create_pr) if push is not None else ""
    options = _options(locals())
    if dry_run and more:
        raise HfAlignError("--dry-run is of two models; what it says of each pair of more holds for the pair")
    if dry_run:
        return _plan(a, b, output, options, as_json)
    models = [a, b, *(more or ())]
    if method in OURS:
        if base is not None or parameter:
            raise HfAlignError(f"--base and --parameter are for methods of mergekit, not for --method {method.value}")
        merged = pipeline.merge(a, b, output, options, data, speaker(quiet), more=more or (),
                                certify=push is not None if certify is None else certify,
                                command=_typed())  # fmt: skip
    else:
        from hf_align.mergekit.pair import merge_pair, read_parameters

        if more:
            raise HfAlignError(
                f"--method {method.value} merges two models here; hf-align mergekit takes a recipe of more"
            )
        merged = merge_pair(a, b, output, options, base=base, parameters=read_parameters(parameter or []), data=data,
                            say=speaker(quiet), command=_typed())  # fmt: skip
    report = merged.as_json()
    lines = merge_lines(report)
    if push is not None:
        from hf_align.publishing import push as upload

        names = [_base(model) for model in models]
        message = commit_message or f"Merge of {', '.join(names[:-1])} and {names[-1]} made with hf-align"
        name = push or upload.default_name(owner, names)
        pushed = upload.push(output, upload.Destination(name, private, create_pr, message))
        report["pushed"] = asdict(pushed)
        lines.append(f"uploaded to {pushed.url}")
    emit(report, as_json, lines)


@app.command()
def align(
    a: Model,
    b: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for B in A's basis.")],
    match: Match = Matching.weight,
    data: Annotated[
        Path | None, typer.Option(help="Examples for --match activation and learned; half of them are used.")
    ] = None,
    steps: Steps = 150,
    mixing: Mixings = Mixing.narrow,
    device: Device = None,
    offload: Offload = None,
    residual: Residuals = Residual.orthogonal,
    heads: HeadChoice = Heads.two_stage,
    spaces: Spaces = None,
    baseline: Baseline = False,
    untie: Untie = None,
    witness: Witness = True,
    strict: Strict = False,
    specs: Specs = None,
    trust_remote_code: Remote = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write B in A's basis, its function unchanged, and alignment.safetensors."""
    bars(quiet)
    report = pipeline.align(a, b, output, _options(locals()), data, speaker(quiet))
    emit(report.as_json(), as_json, merge_lines(report.as_json()))


@app.command()
def evaluate(
    a: Model,
    b: Model,
    data: Annotated[
        Path, typer.Option(help="Held-out examples: text, .jsonl, or .safetensors of forward's arguments.")
    ],
    points: Annotated[int, typer.Option(min=3, help="Mixing weights from 0 to 1.")] = 21,
    match: Match = Matching.weight,
    steps: Steps = 150,
    mixing: Mixings = Mixing.narrow,
    device: Device = None,
    offload: Offload = None,
    residual: Residuals = Residual.orthogonal,
    heads: HeadChoice = Heads.two_stage,
    spaces: Spaces = None,
    baseline: Baseline = False,
    untie: Untie = None,
    alignment: AlignmentFile = None,
    specs: Specs = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the loss between A and B, with and without alignment."""
    bars(quiet)
    from hf_align.jobs.comparing import verdict

    comparison = pipeline.evaluate(a, b, data, _options(locals()), points, speaker(quiet))
    emit(
        comparison.as_json(),
        as_json,
        [*comparison_lines(comparison.as_json()), "", *wrapped(verdict(comparison))],
    )


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="What a merge has written.")],
    repository: Annotated[str, typer.Argument(help="ORG/NAME; it is made if it is not there.")],
    private: Private = False,
    create_pr: CreatePr = False,
    commit_message: CommitMessage = None,
    revision: Annotated[str | None, typer.Option(help="Branch, or refs/pr/N to go on with a pull request.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Upload a merged model, or go on with an upload that broke off: what is there is not sent again."""
    from hf_align.publishing import push as upload

    bars(quiet)
    upload.user()
    message = commit_message or upload.Destination.message
    pushed = upload.push(folder, upload.Destination(repository, private, create_pr, message, revision))
    emit(asdict(pushed), as_json, [f"{pushed.url} ({pushed.commit})"])


@app.command("mergekit")
def run_mergekit(
    config: Annotated[Path, typer.Argument(help="A mergekit recipe (YAML), with or without the key align.")],
    output: Annotated[Path, typer.Argument(help="Folder for the merged model.")],
    random_seed: Annotated[int | None, typer.Option(help="Of methods that draw random numbers.")] = None,
    witness: Witness = True,
    trust_remote_code: Remote = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge as a mergekit recipe says, with all models moved into one basis first.

    The recipe is an ordinary one with one more key, `align: true`, or a mapping with any of `reference` (the model
    whose basis is used), `match`, `data`, `residual`, `untie` and `specs`, which are options of hf-align merge.
    """
    from hf_align.mergekit.recipe import run_recipe

    bars(quiet)
    found = run_recipe(config, output, say=speaker(quiet), seed=random_seed, trust_remote_code=trust_remote_code,
                       overwrite=overwrite, quiet=quiet, witness=witness)  # fmt: skip
    said = wrapped(found["witness"]["sentence"]) if found["witness"] else []
    emit({"output": str(output), **found}, as_json, [*found["notes"], *said, f"{output} is written"])


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What a merge has written.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="By default report.html in the folder.")] = None,
    specs: Specs = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw a merge on one page (HTML): loss on the way, what moved and how far, what is pinned and why."""
    bars(quiet)
    from hf_align.publishing.report import write_report

    page = output or folder / "report.html"
    with waiting("drawing"):
        write_report(folder, page, specs=specs, trust_remote_code=trust_remote_code)
    emit({"output": str(page)}, as_json, [f"{page} is written"])


@app.command()
def spec(
    model: Model,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to a file.")] = None,
    specs: Specs = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the symmetries derived from an architecture, as YAML. Reads no weights."""
    bars(quiet)
    from hf_align.models import config_of
    from hf_align.symmetry.overrides import symmetries

    config = config_of(model, trust_remote_code=trust_remote_code)
    with waiting("deriving the symmetries"):
        found = symmetries(config, specs).as_json()
    text = json.dumps(found, indent=2) if as_json else yaml.safe_dump(found, sort_keys=False, width=120)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text, encoding="utf-8")


@app.command()
def explain(
    model: Model,
    parameter: Annotated[str, typer.Argument(help="A parameter's name in memory.")],
    specs: Specs = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Which spaces a parameter's axes carry, and which op of the modelling code bounds each."""
    bars(quiet)
    from hf_align.models import config_of
    from hf_align.symmetry.explain import explain as describe
    from hf_align.symmetry.overrides import symmetries

    config = config_of(model, trust_remote_code=trust_remote_code)
    with waiting("deriving the symmetries"):
        found = symmetries(config, specs)
    parameter = found.ties.get(parameter, parameter)
    if parameter not in found.parameters:
        raise HfAlignError(f"{model} has no parameter {parameter}; hf-align spec lists them")
    result = describe(found, parameter)
    emit(result, as_json, yaml.safe_dump(result, sort_keys=False, width=80).splitlines())


@app.command()
def certify(
    model: Model,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the small copy.")] = 2,
    specs: Specs = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prove the derived symmetries on a small copy: none changes the function, none is missing. Reads no weights.

    Exit status 1 if a symmetry is unsound or missing.
    """
    bars(quiet)
    from hf_align.models import config_of
    from hf_align.symmetry.certificate.certify import certify as measure
    from hf_align.symmetry.overrides import reviewer
    from hf_align.tracing.reduce import reduced
    from hf_align.tracing.shrink import shrink

    config = config_of(model, trust_remote_code=trust_remote_code)
    review = reviewer(config.model_type, specs)
    with waiting("certifying on a small copy"):
        result = measure(reduced(config, layers) or shrink(config, layers), review=review)
    whole = "complete" if result.complete else "NOT COMPLETE"
    lines = [
        f"{result.model_type}: {'sound' if result.sound else 'NOT SOUND'}, largest change {result.max_error:.1e}",
        f"{whole}: {result.found} of {result.nullity} continuous dimensions",
        *(f"  missing {amount:g} in {name}" for name, amount in result.missing.items()),
        *(f"  no rule for {op}" for op in result.unknown_ops),
        *(f"  no call reads {name}, so it stands still" for name in result.unread),
        f"in {len(result.modes)} ways to call it:",
        *(f"  {mode}" for mode in result.modes),
    ]
    emit(result.as_json(), as_json, lines)
    if not (result.sound and result.complete):
        raise typer.Exit(1)


def _options(given: Mapping[str, Any]) -> Options:
    """What was typed, by the names that `Options` and its schedule have for it."""
    typed = {k: getattr(v, "value", v) for k, v in given.items() if v is not None}
    own, scheduled = ({f.name: typed[f.name] for f in fields(of) if f.name in typed} for of in (Options, Schedule))
    if "dtype" in own:
        own["dtype"] = getattr(torch, own["dtype"])
    return Options(**{**own, "spaces": tuple(own.get("spaces", ())), "schedule": Schedule(**scheduled)})


def _uploader(repository: str, create_pr: bool) -> str:
    """Who is logged in, and may write there: asked before anything is computed."""
    from hf_align.publishing import push as upload

    return upload.user(repository, create_pr=create_pr)


def _plan(a: str, b: str, output: Path, options: Options, as_json: bool) -> None:
    from hf_align import dry_run

    found = dry_run.dry_run(a, b, output, options)
    emit(found.as_json(), as_json, dry_run.lines(found))
    if not found.compatible:
        raise typer.Exit(2)


def _without_path(value: str, *, is_path: bool = False) -> str:
    """An argument without the folders of this disk; it is the same before the output is there and after."""
    parts = [value] if is_path or not value or Path(value).exists() else value.split("+")
    return "+".join(_without_folder(part, is_path) for part in parts)


def _without_folder(value: str, is_path: bool) -> str:
    is_path = is_path or value.startswith(("/", ".", "~")) or bool(value and Path(value).exists())
    return Path(os.path.abspath(value)).name if is_path else value


def _typed() -> str:
    """The command as it was typed, without local paths."""
    kinds = get_type_hints(merge)
    command = typer.main.get_command(app).commands["merge"]  # type: ignore[attr-defined]
    options = {name: p for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
    words, typed = iter(_with_values(sys.argv[1:])), ["hf-align"]
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name not in options and word[:2] in options and not word.startswith("--"):  # -oDIR
            name, value = word[:2], word[2:]
        if name not in options:
            typed.append(_without_path(word))
            continue
        found = options[name]
        takes_value = not getattr(found, "is_flag", False)
        if takes_value and not (equals or value):
            value = next(words, "")
        is_path = Path in (kinds[found.name], *get_args(kinds[found.name]))
        typed += [name, *([_without_path(value, is_path=is_path)] if value else [])]
    return shlex.join(typed)


def _base(model: str) -> str:
    """A model's name without its revision, a folder's without its path; of a model with an adapter, the adapter's."""
    model = model if Path(model).is_dir() else model.rpartition("+")[2]
    return Path(model).resolve().name if Path(model).is_dir() else model.removeprefix("hf://").partition("@")[0]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"hf-align {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if (warning := alone_by_mistake()) is not None:
        typer.echo(f"hf-align: {warning}", err=True)


def _with_values(arguments: list[str]) -> list[str]:
    """A bare `--push` gets the empty value, which stands for the derived name; typer knows no optional values."""
    followed = zip(arguments, [*arguments[1:], "--"], strict=True)
    return [f"{a}=" if a == "--push" and after.startswith("-") else a for a, after in followed]


def main() -> None:
    """Run the command line; errors that the user can mend are one line and exit status 2."""
    try:
        app(args=_with_values(sys.argv[1:]))
    except HfAlignError as error:
        if current().leads or not error.shared:
            typer.echo(f"hf-align: {error}", err=True)
        raise SystemExit(2) from None
    except BrokenPipeError:  # whoever read what is said has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    except Exception as error:
        typer.echo(f"hf-align: {unexpected(error)}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
