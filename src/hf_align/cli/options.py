"""Arguments and options of the commands: each one's type, name and help, and the panel of `--help` that it stands in.

Defaults are those of `Options`; choices are those of `settings/choices.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from hf_align.cli import words
from hf_align.errors import OptionError
from hf_align.settings import choices
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

MATCHING, MOVING = "How models are matched", "What may move"
MERGING, JUDGING = "How they are merged", "How the result is judged"
OUTPUT, HUB, RUNNING, GENERAL = "Output", "Hub", "How it runs", "General"
PANELS = (MATCHING, MOVING, MERGING, JUDGING, OUTPUT, HUB, RUNNING, GENERAL)
"""In the order in which `--help` shows them; each fits a screen of 80 columns."""
matching, moving, merging, judging, output, hub, running, general = (
    partial(typer.Option, rich_help_panel=panel) for panel in PANELS
)
"""An option in each of them."""


def _with_token(token: str | None) -> None:
    """Everything that speaks to the Hub looks for the token there, transformers too."""
    if token is not None:
        os.environ["HF_TOKEN"] = token


def _verbose(wanted: bool) -> None:
    for variable in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):  # read when the libraries are loaded
        os.environ.setdefault(variable, "info" if wanted else "error")
    logging.getLogger("huggingface_hub").propagate = False  # it writes its messages itself
    for library in ("transformers", "huggingface_hub", "lm_eval"):
        logging.getLogger(library).setLevel(logging.INFO if wanted else logging.ERROR)
    logging.getLogger("hf_align").setLevel(logging.DEBUG if wanted else logging.WARNING)


def _quiet(wanted: bool) -> bool:
    """Progress of downloads and uploads goes too; commands have the value."""
    if wanted:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    return wanted


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, org/name or org/name@revision; a LoRA adapter likewise, or MODEL+ADAPTER."
    ),
]
A = Annotated[str, typer.Argument(metavar="A", help="The model whose basis is used: a folder or org/name[@revision].")]
B = Annotated[
    str, typer.Argument(metavar="B", help="The other model, likewise. Either may be a LoRA adapter, or MODEL+ADAPTER.")
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="What a merge has written.")]

# How models are matched -----------------------------------------------------------------------------------------------

_OF_MATCHING = ("residual", "heads", "spaces", "alignment", "specs")
"""Options that say how models are matched."""
_WAYS = (
    "By their weights (seconds), by what both compute on the same inputs, or by descent on the loss of the merged "
    "model (best, slowest; needs no data)."
)
Match = Annotated[choices.AnyMatch, matching(metavar="HOW", help=f"{_WAYS} none merges them as they are.")]
MatchToMove = Annotated[choices.Match, matching(metavar="HOW", help=_WAYS)]
StepsToMatch = Annotated[
    int | None, matching(metavar="N", show_default=str(Schedule.steps), help="Steps of --match learned.")
]
Steps = Annotated[
    int | None,
    matching(
        metavar="N",
        show_default=str(Schedule.steps),
        help="Steps of --match learned and of --method curve; --method distil takes 1000.",
    ),
]
LambdaSampling = Annotated[
    choices.LambdaSampling | None,
    matching(
        metavar="WHERE",
        show_default=Schedule.lambda_sampling,
        help="Where between the models learned methods take the loss: λ in (0.4, 0.6), 0.5, or in (0, 1).",
    ),
]
Residual = Annotated[
    choices.AnyResidual,
    matching(
        metavar="GROUP",
        help="What moves the residual stream: the largest group that the architecture allows, permutations, or nothing "
        "(identity); with --match activation, permutations by its first, last or all features, or by each apart "
        "(separate, which changes B).",
    ),
]
Heads = Annotated[
    choices.AnyHeads,
    matching(
        metavar="HOW",
        help="How attention heads are paired: by the best fit of their weights, by what they compute (circuits), in "
        "their order (monotonic), or as if there were none (ignore-heads, which changes B).",
    ),
]
AlignmentFile = Annotated[Path | None, matching(metavar="FILE", help="Use a saved alignment; nothing is matched.")]

# What may move --------------------------------------------------------------------------------------------------------

Spaces = Annotated[
    list[str] | None,
    moving(
        metavar="PATTERN",
        help="Move only spaces whose names match (*.layers.3.*); may be repeated. hf-align spec lists them.",
    ),
]
AllowInexact = Annotated[bool, moving("--allow-inexact", help="Allow choices that change B, to compare with.")]
Untie = Annotated[
    bool | None,
    moving(
        "--untie-word-embeddings/--tie-word-embeddings",
        show_default="untied where that lets more of the model move",
        help="Whether a head that shares the embedding's weights gets its own.",
    ),
]
Retokenize = Annotated[
    bool,
    moving("--retokenize", help="Bring models with another tokenizer into the tokens of A, which changes them."),
]
Specs = Annotated[
    Path | None, moving(metavar="DIR", help="Reviewed overrides of derived symmetries, before those that ship.")
]
Strict = Annotated[bool, moving("--strict", help="Refuse architectures with ops that have no rule.")]

# How they are merged --------------------------------------------------------------------------------------------------

Method = Annotated[
    choices.AnyMethod,
    merging(
        metavar="METHOD",
        show_default="that of --effort, or linear",
        help="linear and slerp mix tensors; circuits averages what heads do; fisher and regmean weigh by what the "
        "models compute; regression solves for what both compute, weight by weight; curve and distil train the "
        "result (lowest loss, slowest); ot-fusion and semi-permutation mix B's units first, which is "
        "inexact; from ties on they are mergekit's (pip install 'hf-align[mergekit]').",
    ),
]
Effort = Annotated[
    choices.Effort | None,
    merging(
        metavar="HOW",
        show_default="good",
        help="Choose how to match and to merge: quick (weights and the mean, seconds), good (regression, no gradients) "
        "or best (distillation, minutes). Fine-tunes of one base are told by their weights, and merged as they are.",
    ),
]
Weight = Annotated[float, merging(min=0.0, max=1.0, metavar="T", help="Share of B.")]
Base = Annotated[str | None, merging(metavar="MODEL", help="What A and B started from, for ties and the like.")]
Parameter = Annotated[
    list[str] | None, merging(metavar="NAME=VALUE", help="Parameter of a mergekit method; may be repeated.")
]
Data = Annotated[
    Path | None,
    judging(
        metavar="FILE",
        help="Held-out examples (text, .jsonl, .safetensors) that the report is measured on. What runs the models "
        "takes the first half of them.",
    ),
]
DataToMatch = Annotated[Path | None, matching(metavar="FILE", help="Examples to match on; half of them are used.")]
HeldOut = Annotated[
    Path | None,
    judging(metavar="FILE", help="Held-out examples: text, .jsonl, or .safetensors of forward's arguments."),
]
Points = Annotated[int, judging(min=3, metavar="N", help="λ from 0 to 1 at which losses are measured.")]

Tasks = Annotated[
    str | None,
    judging(
        metavar="TASK,...",
        help="Tasks of the LM Evaluation Harness: A, B and their means are run on them (pip install "
        "'hf-align[tasks]').",
    ),
]
FewShot = Annotated[
    int | None,
    judging(min=0, metavar="N", show_default="that of the task", help="Examples in the prompt of a task."),
]
Limit = Annotated[int | None, judging(min=1, metavar="N", show_default="all", help="Examples of each task.")]
TaskFolder = Annotated[Path | None, judging(metavar="DIR", help="A folder with tasks of your own.")]

# Output ---------------------------------------------------------------------------------------------------------------

Output = Annotated[Path, output("-o", "--output", metavar="DIR", help="Folder for the result.")]
Widen = Annotated[
    list[str] | None,
    output(
        metavar="FIELD=SIZE",
        help="Wider than A and B, by a field of their config, with room for more units of both; may be repeated.",
    ),
]
Dtype = Annotated[
    choices.Dtype | None, output(metavar="DTYPE", show_default="that of A", help="Data type of the result.")
]
MaxShardSize = Annotated[str, output(metavar="SIZE", help="Size of the largest file.")]
Overwrite = Annotated[bool, output("--overwrite", help="Replace what is in the output folder.")]
DryRun = Annotated[bool, output("--dry-run", help="Report what would be read, written and needed; reads headers only.")]

# Hub ------------------------------------------------------------------------------------------------------------------

Push = Annotated[
    str | None, hub(metavar="[ORG/NAME]", help="Upload the result with its card; by default to USER/A-B-merge.")
]
Repository = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="Repository to upload to; created if it does not exist.")
]
Private = Annotated[bool, hub("--private", help="Make the repository private.")]
CreatePr = Annotated[bool, hub("--create-pr", help="Propose the files as a pull request.")]
CommitMessage = Annotated[str | None, hub(metavar="TEXT", help="Commit message.")]
Revision = Annotated[str | None, hub(metavar="REV", help="Branch, tag or commit of every model that names none.")]
Branch = Annotated[str | None, hub(metavar="REV", help="Branch, or refs/pr/N to continue a pull request.")]
Token = Annotated[
    str | None,
    hub(metavar="TOKEN", callback=_with_token, show_default="HF_TOKEN, or that of hf auth login", help="Hub token."),
]
DropCache = Annotated[bool, hub("--drop-cache", help="Delete shards from the cache once they have been merged.")]
Remote = Annotated[bool, hub("--trust-remote-code", help="Run modelling code that comes with a model.")]

# How it runs ----------------------------------------------------------------------------------------------------------

Device = Annotated[
    str | None,
    running(
        metavar="DEVICE",
        show_default="an accelerator if there is one",
        help="Where models run and weights are moved, such as cpu or cuda:1.",
    ),
]
Offload = Annotated[
    bool | None,
    running(
        "--offload/--no-offload",
        show_default="where models do not fit into memory",
        help="Run models module by module, with weights read from their files.",
    ),
]
Witness = Annotated[
    bool,
    running(
        "--witness/--no-witness",
        show_default="--witness",
        help="Run aligned models before writing, and stop if their outputs have changed.",
    ),
]
Certify = Annotated[
    bool | None,
    running("--certify/--no-certify", show_default="with --push", help="Prove the symmetries on a small copy first."),
]

# General --------------------------------------------------------------------------------------------------------------

Json = Annotated[bool, general("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, general("--quiet", "-q", callback=_quiet, help="No progress on stderr; warnings stay.")]
Verbose = Annotated[
    bool, general("--verbose", "-v", callback=_verbose, help="Show messages of other libraries, and tracebacks.")
]


def chosen(given: Mapping[str, Any], schedule_of: Callable[..., Schedule] = Schedule.of_method) -> Options:
    """What was typed, by the names that `Options` and its schedule have for it.

    Args:
        schedule_of: a method, with what was typed.

    Raises:
        OptionError: two of the options contradict each other, or no device has that name.
    """
    typed = {name: value for name, value in given.items() if value is not None}
    own, scheduled = ({f.name: typed[f.name] for f in fields(of) if f.name in typed} for of in (Options, Schedule))
    schedule = schedule_of(own.get("method", Options.method), **scheduled)
    options = Options(**{**own, **{n: tuple(own.get(n, ())) for n in ("spaces", "widen")}, "schedule": schedule})
    if scheduled and not options.descends:
        name = "--" + next(iter(scheduled)).replace("_", "-")
        of_method = ", or --method distil" if "onto" in given else ", or --method curve or distil"
        by = of_method if "method" in given else ""  # which align and evaluate do not have
        raise OptionError(f"{name} applies to a descent: it needs --match learned{by}")
    if idle := [name for name in scheduled if name not in schedule.used_by(options.match, options.method)]:
        raise OptionError(f"--{idle[0].replace('_', '-')} is no setting of what goes down a loss here")
    _require_matched(options)
    if options.device is not None:
        from hf_align.runtime.devices import named  # loads torch

        named(options.device)
    return options


def _require_matched(options: Options) -> None:
    """Refuse what says how models are matched where nothing matches them, or where a file says it already.

    Raises:
        OptionError: there is such an option.
    """
    plain = Options()
    differ = [name for name in _OF_MATCHING if getattr(options, name) != getattr(plain, name)]
    if options.match == "none" and (differ or options.untie):
        name = differ[0] if differ else "untie-word-embeddings"
        raise OptionError(f"--{name} says how models are matched, and --match none matches nothing")
    anew = ["match"] if options.match != plain.match else [name for name in differ if name == "heads"]
    if options.alignment is not None and anew:
        raise OptionError(f"--{anew[0]} says how models are matched anew, and --alignment has what moves B")


def at_revision(model: str, revision: str | None) -> str:
    """A model at a revision, if it is on the Hub and names none itself.

    Raises:
        OptionError: it is a model and an adapter, which have a revision each.
    """
    if revision is None or Path(model).exists() or "@" in model:
        return model
    if "+" in model:
        raise OptionError(f"--revision applies to one repository; write {model.replace('+', '@REVISION+')}")
    return f"{model}@{revision}"


def command(ctx: typer.Context, function: Callable[..., None]) -> str:
    """What was typed, for the card.

    Args:
        function: the command's.
    """
    kinds: dict[str, Any] = get_type_hints(function)
    paths = frozenset(name for name, kind in kinds.items() if Path in (kind, *get_args(kind)))
    return words.told(words.with_values(sys.argv[1:]), ctx.command.params, paths)
