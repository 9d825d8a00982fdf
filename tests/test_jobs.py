"""One way for all commands that write a model: what is done once is not done again, and little makes a new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import run, tiny_gpt2
from faults import contents
from safetensors.torch import load_file
from test_output import recipe_of
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.shards import Source, whole
from hf_align.jobs import witnessing
from hf_align.jobs.job import Asked, Job
from hf_align.jobs.job import run as run_job
from hf_align.jobs.opened import Opened
from hf_align.jobs.outcome import Report
from hf_align.jobs.writing import draft_of
from hf_align.settings.options import Options


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("models") / name for name in "abc"]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        GPT2LMHeadModel(tiny_gpt2()).save_pretrained(folder)
    return folders


class Stopped(BaseException):
    """Nothing catches it."""


def stopped(*_: object, **__: object) -> None:
    raise Stopped


def not_again(*_: object, **__: object) -> None:
    raise AssertionError("computed twice")


COMMANDS: dict[str, Callable[[list[Path], Path, Path], list[object]]] = {
    "merge": lambda m, t, out: ["merge", m[0], m[1], "-o", out],
    "several": lambda m, t, out: ["merge", *m, "-o", out],
    "method": lambda m, t, out: ["merge", m[0], m[1], "-o", out, "--method", "ties", "--base", m[2]],
    "align": lambda m, t, out: ["align", m[0], m[1], "-o", out],
    "recipe": lambda m, t, out: ["mergekit", recipe_of(m[0], m[1], t / "r.yml", align=True), out],
}  # fmt: skip


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.quick] if each == "align" else []) for each in COMMANDS]
)
def test_a_run_that_is_killed_keeps_its_match_and_its_witness(
    command: str, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*COMMANDS[command](models, tmp_path, tmp_path / "out"), "--quiet"]
    whole_arguments = [*COMMANDS[command](models, tmp_path, tmp_path / "whole" / "out"), "--quiet"]
    assert run(*whole_arguments) == 0
    with monkeypatch.context() as patched:
        patched.setattr("hf_align.jobs.job.write_with_bar", stopped)
        patched.setattr("hf_align.mergekit.recipe.run_mergekit", stopped)
        with pytest.raises(Stopped):
            run(*arguments)
    monkeypatch.setattr(Opened, "find", not_again)
    monkeypatch.setattr(witnessing, "hold_all", not_again)
    assert run(*arguments) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole" / "out")


@dataclass(frozen=True, kw_only=True)
class Twice(Job[None]):
    """A new command: its inputs, its match, its weights."""

    models: Opened

    def match(self, claim: Claim) -> None:
        """There is none."""

    def entries(self, claim: Claim, match: None) -> Source:
        checkpoint = self.models.first.a.checkpoint
        return whole(lambda name: 2 * checkpoint[name])

    def report(self, output: Path, match: None) -> Report:
        return Report(str(output), self.models.spec.model_type)


def test_a_new_command(models: list[Path], tmp_path: Path) -> None:
    asked = Asked(Options(quiet=True), command="hf-align twice")
    opened = Opened.open({"A": str(models[0])}, asked.options)
    draft = draft_of(opened.first, opened.first.a, asked.options)
    job = Twice(asked=asked, sources=[opened.first.a.source], record={"the command": "twice"}, draft=draft,
                models=opened)  # fmt: skip
    assert run_job(job, tmp_path / "out").seconds
    first, second = (load_file(folder / "model.safetensors") for folder in (models[0], tmp_path / "out"))
    assert all(torch.equal(2 * first[name], tensor) for name, tensor in second.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "hf-align twice" in (tmp_path / "out" / "README.md").read_text()
    assert not run_job(job, tmp_path / "out").seconds, "it was complete"
