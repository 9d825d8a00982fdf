"""What the command line does with models, for other programs too: merge, align, transport, evaluate.

Modelling code takes seconds to load. What needs it is imported where it is called, so that a plain merge does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_align.jobs import plain
from hf_align.jobs.job import Asked, Say, run, silent
from hf_align.jobs.outcome import Report
from hf_align.settings.choices import KEEP, Effort
from hf_align.settings.options import Options

if TYPE_CHECKING:
    from hf_align.jobs.merge import Merge
    from hf_align.running.evaluate import Comparison


def merge(
    a: str,
    b: str,
    output: Path,
    options: Options,
    data: Path | None = None,
    say: Say = silent,
    *,
    more: Sequence[str] = (),
    certify: bool = False,
    command: str = "",
    effort: Effort | None = None,
) -> Report:
    """Align models with the first, and write their merge as a checkpoint that `from_pretrained` loads.

    Args:
        a, b, more: folders or Hub references. More than two are brought together through a basis that favours none of
            them, and merged by their mean, by regression or by distillation.
        data: examples; with them the report says whether alignment helped. What runs the models, be it to match or to
            merge, takes the first half of them, and the report the other.
        say: told what is going on, a line at a time.
        certify: prove the symmetries that are used on a small copy, and put the proof into the model card.
        command: what the card says that the merge was made with.
        effort: chooses how they are matched and merged, in place of what the options say.

    Raises:
        HfAlignError: any bad input, before anything is written.
    """
    if effort is not None:
        from hf_align.jobs.effort import at_effort

        options, line = at_effort((a, b, *more), options, effort)
        say(line)
    options.require_filled()
    asked = Asked(options, data, say, command)
    if options.match == "none" and data is None and not more:
        report = plain.merge(a, b, output, asked)
        if report is not None:
            return report
    from hf_align.jobs.merge import Merge

    models = (a, b, *more)
    job = Merge.open(models, asked, certify=certify) if effort is None else _as_it_runs(models, asked, certify, effort)
    return run(job, output)


def _as_it_runs(models: Sequence[str], asked: Asked, certify: bool, effort: Effort) -> Merge:
    """The merge, by the mean where the models cannot be run here as its method needs."""
    from hf_align.errors import CannotRun
    from hf_align.jobs.merge import Merge

    try:
        job = Merge.open(models, asked, certify=certify, effort=effort)
        job.require_graph()
        return job
    except CannotRun as error:
        asked.say(f"merged by the mean: {error}")
        mean = replace(asked, options=replace(asked.options, method="linear"))
        return Merge.open(models, mean, certify=certify)


def align(a: str, b: str, output: Path, options: Options, data: Path | None = None, say: Say = silent) -> Report:
    """Write B in A's basis, its function unchanged, and the alignment that took it there.

    Raises:
        HfAlignError: any bad input, before anything is written.
    """
    from hf_align.jobs.aligned import Align

    return run(Align.open(a, b, Asked(options, data, say)), output)


def transport(
    finetuned: str,
    base: str,
    onto: str,
    output: Path,
    options: Options,
    data: Path | None = None,
    say: Say = silent,
    *,
    strength: float = 1.0,
    keep: float = KEEP,
    as_adapter: bool = False,
    command: str = "",
) -> Report:
    """Carry what a fine-tune learned on its base to another base, and write that.

    Args:
        finetuned, base, onto: folders or Hub references, of one architecture and vocabulary.
        options: `method` is "regression", or "task_arithmetic" for B + λ (F − A) alone.
        data: text like what the fine-tune was trained on; half of it is run on, the other half reported on.
        strength: λ, how much of the change is carried over.
        as_adapter: write an adapter of the other base, where the fine-tune is one.
        keep: examples that the other base writes, and answers on as before, for each of the others.

    Raises:
        HfAlignError: any bad input, before anything is written.
    """
    from hf_align.jobs.as_adapter import TransportAdapter
    from hf_align.jobs.transport import Transport, Tuned

    asked, job = Asked(options, data, say, command), TransportAdapter if as_adapter else Transport
    return run(job.open([Tuned(finetuned, base, strength)], onto, asked, keep=keep), output)


def evaluate(a: str, b: str, data: Path, options: Options, say: Say = silent) -> Comparison:
    """Losses along the line between A and B, as they are and aligned.

    Raises:
        HfAlignError: any bad input.
    """
    from hf_align.jobs.comparing import compare
    from hf_align.jobs.opened import Basis, Opened
    from hf_align.running.data import with_labels

    models = Opened.open({"A": a, "B": b}, options, say)
    fit, held_out = models.examples(data)
    held_out = with_labels(held_out or fit or {})
    return compare(Basis(models, models.find(fit, say)), held_out)
