"""What a person sees: progress on a terminal, none where nobody looks, quiet, JSON, 80 columns, completion."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from conftest import MODELS, run
from forks import forked, hf_align
from typer.main import get_command

from hf_align.cli import app

LLAMA = MODELS / "llama"
COMMAND = [sys.executable, "-m", "hf_align"]
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


def on_a_terminal(out: Path, *arguments: object) -> str:
    """What a terminal at standard error shows; standard output goes to a file."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    parts: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other side is closed
            while part := os.read(ours, 4096):
                parts.append(part)

    reader = Thread(target=read)
    reader.start()
    ran = forked(hf_align, *arguments, stderr=Path(os.ttyname(theirs)))
    os.close(theirs)
    reader.join()
    os.close(ours)
    shown = b"".join(parts).decode()
    assert ran.returncode == 0, shown
    out.write_text(ran.stdout)
    return shown


def test_a_clock_where_a_person_looks(tmp_path: Path) -> None:
    shown = on_a_terminal(tmp_path / "out.json", "spec", "llama", "--json")
    assert re.search(r"deriving the symmetries 00:0\d", shown)
    assert json.loads((tmp_path / "out.json").read_text())["model_type"] == "llama"
    assert not shown.split("\r")[-1].strip()  # it is gone at the end


def test_quiet_is_quiet_on_a_terminal_too(tmp_path: Path) -> None:
    merge = ("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", "--quiet")
    assert on_a_terminal(tmp_path / "out.txt", *merge) == ""


def test_a_merge_shows_how_far_it_is(tmp_path: Path) -> None:
    shown = on_a_terminal(tmp_path / "out.txt", "merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out")
    assert "writing: 100%" in shown and "sweep 1: " in shown


def test_no_bars_if_the_environment_says_so(tmp_path: Path) -> None:
    """huggingface_hub's own switch holds for ours."""
    env = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run([*COMMAND, "merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out"], env=env, check=True,
                          capture_output=True, text=True)  # fmt: skip
    assert "%|" not in done.stderr and "sweep 1: " in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_quiet(command: str) -> None:
    options = {name for option in get_command(app).commands[command].params for name in option.opts}  # type: ignore
    assert {"--json", "--quiet"} <= options


def test_tables_fit_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text("\n".join(json.dumps({"input_ids": list(range(1 + i, 33 + i))}) for i in range(4)))
    pair = (LLAMA / "0", LLAMA / "1")
    for arguments in (
        ("merge", *pair, "-o", tmp_path / "out", "--data", data), ("merge", *pair, "--dry-run"),
        ("evaluate", *pair, "--data", data, "--points", "3"), ("certify", "llama", "--layers", "1"),
    ):  # fmt: skip
        capsys.readouterr()
        assert run(*arguments, "--quiet") == 0
        lines = capsys.readouterr().out.replace(str(tmp_path), "").splitlines()
        assert lines and max(map(len, lines)) <= 80, max(lines, key=len)


def test_help_does_not_wait_for_libraries() -> None:
    """A shell that completes runs the program at every key."""
    code = "import sys; import hf_align.cli; print(*sorted({'transformers', 'scipy.optimize'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zsh", "fish"))])
def test_shells_complete_commands_and_options(shell: str) -> None:
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run([*COMMAND, "--show-completion", shell], env=env, check=True, capture_output=True, text=True)
    assert "COMPLETE" in shown.stdout
    name = "_HF_ALIGN_COMPLETE"
    asked = {"COMP_WORDS": "hf-align mer", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "hf-align mer",
             "_TYPER_COMPLETE_FISH_ACTION": "get-args", name: f"complete_{shell}"}  # fmt: skip
    code = "import sys; sys.argv = ['hf-align']; from hf_align.cli import app; app(prog_name='hf-align')"
    found = subprocess.run([sys.executable, "-c", code], env={**env, **asked}, capture_output=True, text=True).stdout
    assert "merge" in found and "mergekit" in found and "certify" not in found
