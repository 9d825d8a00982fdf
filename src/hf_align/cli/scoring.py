"""What two models and their means score on tasks: each is written to a scratch folder, run there and removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hf_align.jobs.job import Say
from hf_align.settings.options import Options

if TYPE_CHECKING:
    from hf_align.api.tasks import Scores

MEAN, ALIGNED = "mean", "aligned mean"


@dataclass(frozen=True)
class _Written(Mapping[str, Path]):
    """Folders by the names of the models in them; only the one that was asked for last is there.

    Attributes:
        options: by the name of a model, what makes it out of both.
    """

    a: str
    b: str
    scratch: Path
    options: Mapping[str, Options]
    say: Say

    def __iter__(self) -> Iterator[str]:
        return iter(self.options)

    def __len__(self) -> int:
        return len(self.options)

    def __getitem__(self, name: str) -> Path:
        from hf_align.jobs import pipeline

        options = self.options[name]
        for folder in self.scratch.iterdir():
            shutil.rmtree(folder)
        self.say(f"running the tasks on {name}")
        pipeline.merge(self.a, self.b, self.scratch / name.replace(" ", "-"), options)
        return self.scratch / name.replace(" ", "-")


def score_line(a: str, b: str, tasks: Sequence[str], options: Options, say: Say, **run: Any) -> dict[str, Scores]:
    """What A, B, their mean as they are and their mean in one basis score on tasks.

    Args:
        a, b: folders or Hub references.
        options: how B is matched; both means are taken at its `weight`.
        run: of `hf_align.score`.

    Raises:
        HfAlignError: models that do not merge, no such task, or no harness.
    """
    from hf_align.api.tasks import score

    plain = replace(options, match="none", untie=None, alignment=None, quiet=True)
    made = {"A": replace(plain, weight=0.0), "B": replace(plain, weight=1.0), MEAN: plain}
    if options.match != "none":
        made[ALIGNED] = replace(options, quiet=True)
    with TemporaryDirectory(prefix="hf-align-") as scratch:
        return score(_Written(a, b, Path(scratch), made, say), tasks, device=options.device, **run)


def score_lines(scores: Mapping[str, Scores]) -> list[str]:
    """Scores as a table: a row for each metric of a task, a column for each model."""
    first = next(iter(scores.values()))
    rows = [(task, metric) for task, metrics in first.items() for metric in metrics if "_stderr" not in metric]
    names = [f"{task} {metric.removesuffix(',none')}" for task, metric in rows]
    wide = max(len(name) for name in names) + 2 if names else 2
    head = " " * wide + "".join(f"{name:>14}" for name in scores)
    return [head, *(name.ljust(wide) + "".join(f"{found[task][metric]:14.4f}" for found in scores.values())
                    for name, (task, metric) in zip(names, rows, strict=True))]  # fmt: skip
