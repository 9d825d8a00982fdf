"""`hf-align evaluate`."""

from __future__ import annotations

from pathlib import Path

from hf_align.cli import console
from hf_align.cli import options as opt
from hf_align.errors import OptionError
from hf_align.settings.options import Options


def evaluate(
    a: opt.A,
    b: opt.B,
    data: opt.HeldOut = None,
    points: opt.Points = Options.points,
    tasks: opt.Tasks = None,
    num_fewshot: opt.FewShot = None,
    limit: opt.Limit = None,
    include_path: opt.TaskFolder = None,
    match: opt.Match = Options.match,
    steps: opt.StepsToMatch = None,
    lambda_sampling: opt.LambdaSampling = None,
    residual: opt.Residual = Options.residual,
    heads: opt.Heads = Options.heads,
    spaces: opt.Spaces = None,
    baseline: opt.AllowInexact = False,
    untie: opt.Untie = None,
    retokenize: opt.Retokenize = False,
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
    """Measure the loss between A and B, or their scores on tasks, with and without alignment.

    --data gives losses along the line from A to B. --tasks gives the scores of A, of B, of their mean, and of their
    mean once B is aligned. Either is enough.

    $ hf-align evaluate org/a org/b --data held_out.txt --points 5
    $ hf-align evaluate org/a org/b --tasks lambada_openai,arc_easy --limit 200
    """
    options = opt.chosen(locals())
    names = [name for name in (tasks or "").split(",") if name]
    _require_something(data, names, {"--num-fewshot": num_fewshot, "--limit": limit, "--include-path": include_path})
    a, b = (opt.at_revision(model, revision) for model in (a, b))
    from hf_align.jobs import pipeline
    from hf_align.jobs.comparing import verdict

    say, result, lines = console.speaker(quiet), {}, []
    if data is not None:
        found = pipeline.evaluate(a, b, data, options, say)
        result = found.as_json()
        lines = [
            *console.comparison_lines(result),
            "",
            *console.wrapped(verdict(found)),
        ]
    if names:
        from hf_align.cli.scoring import score_line, score_lines

        scores = score_line(a, b, names, options, say, num_fewshot=num_fewshot, limit=limit, include_path=include_path)
        result["tasks"] = scores
        lines += [*([""] if lines else []), *score_lines(scores)]
    console.emit(result, as_json, lines)


def _require_something(data: Path | None, tasks: list[str], of_tasks: dict[str, object]) -> None:
    """See that there is something to measure, and that options of tasks come with tasks.

    Raises:
        OptionError: they do not.
    """
    if data is None and not tasks:
        raise OptionError("evaluate needs --data or --tasks, or both")
    if not tasks and (stray := [name for name, value in of_tasks.items() if value is not None]):
        raise OptionError(f"{stray[0]} needs --tasks")
