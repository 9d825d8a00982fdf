"""What a person sees: progress on a terminal, none where nobody looks, quiet, JSON, 80 columns, completion."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
import textwrap
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import pytest
import torch
from conftest import MODELS, run, save, tiny_gpt2, tiny_llama
from forks import forked, hf_align
from safetensors.torch import load_file, save_file
from typer.main import get_command

from hf_align.cli import words
from hf_align.cli.app import app
from hf_align.cli.console import unexpected
from hf_align.cli.options import at_revision
from hf_align.settings.choices import AnyHeads, AnyMethod, AnyResidual

LLAMA = MODELS / "llama"
COMMAND = [sys.executable, "-m", "hf_align"]
FULL = Path("/dev/full")
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


def parameters(command: str) -> list[Any]:
    return list(get_command(app).commands[command].params)  # type: ignore[attr-defined]


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


def test_warnings_are_no_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both models hold a tensor that their architecture has not, and their licences differ."""
    pair = [save(tmp_path / name, tiny_llama(), seed) for seed, name in enumerate("ab")]
    for folder, licence in zip(pair, ("mit", "apache-2.0"), strict=True):
        stored = load_file(folder / "model.safetensors")
        save_file({**stored, "extra.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
        (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    capsys.readouterr()
    assert run("merge", *pair, "--quiet", "-o", tmp_path / "out") == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all(line.startswith("warning: ") for line in said)
    assert sum("(extra.weight)" in line for line in said) == 2 and "licences of the inputs differ" in said[2]


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
    options = {name for option in parameters(command) for name in option.opts}
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


def test_data_that_nothing_runs_on_is_said_to_be_unused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save(tmp_path / n, tiny_gpt2(), seed) for seed, n in enumerate("ab"))
    save_file({"input_ids": torch.arange(10)[None].expand(4, 10).contiguous()}, tmp_path / "d.safetensors")
    assert run("align", a, b, "-o", tmp_path / "out", "--data", tmp_path / "d.safetensors", "--no-witness") == 0
    assert "--data is not used: --match weight compares weights alone" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "spins"), [(None, "1000"), ("7", "7")])
def test_threads_do_not_spin_for_long_on_cores_that_others_use(given: str | None, spins: str) -> None:
    code = """
        import atexit, os, sys
        sys.argv = ["hf-align", "--version"]
        atexit.register(lambda: print("torch" in sys.modules, os.environ["GOMP_SPINCOUNT"]))
        from hf_align.__main__ import main
        main()
    """
    env = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"} | ({"GOMP_SPINCOUNT": given} if given else {})
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-1] == f"False {spins}"


def without_libraries(arguments: list[str], env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """A command that must end before anything large is loaded: its status, and what it said."""
    code = f"""
        import atexit, sys
        sys.argv = ["hf-align", *{arguments!r}]
        slow = {{"torch", "transformers", "numpy", "scipy", "huggingface_hub", "accelerate"}}
        atexit.register(lambda: print("loaded:", *sorted(slow & sys.modules.keys())))
        from hf_align.cli.app import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True,
                          env={**os.environ, **(env or {})})  # fmt: skip
    said, _, loaded = done.stdout.rpartition("loaded:")
    assert loaded.split() == []
    return done.returncode, said, done.stderr


HELP = [["--help"], ["-h"], [], ["merge", "--help"], ["certify", "-h"], ["--version"], ["--show-completion", "bash"]]


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_does_not_wait_for_libraries(arguments: list[str]) -> None:
    """A shell that completes runs the program at every key."""
    env = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    status, said, errors = without_libraries(arguments, env)
    assert status == 0 and said and not errors


REFUSED = {
    "merge a": "Missing argument 'B'",
    "merge a b --match wieght": "'wieght' is not one of 'weight', 'activation', 'learned', 'none'",
    "merge a b --nope": "No such option: --nope",
    "mrege a b": "Did you mean 'merge'",
    "merge a b --weight 2": "less than or equal to 1",
    "merge a b --points 2": "greater than or equal to 3",
    "merge a b --max-shard-size much": "not a shard size",
    "merge a b --residual separate": "changes B's function",
    "merge a b --residual first": "needs --match activation",
    "merge a b --steps 3": "--steps applies to a descent",
    "transport f --base a --onto b -o c --method task_arithmetic --keep 0.5": "--keep is of what is fitted",
    "merge a b --method distil --lambda-sampling uniform": "--lambda-sampling is no setting of what goes down a loss",
    "merge a b --match none --spaces x": "--spaces says how models are matched",
    "merge a b --match none --alignment x": "--alignment says how models are matched",
    "merge a b --match none --untie-word-embeddings": "--untie-word-embeddings says how models are matched",
    "evaluate a b --data c --match none --heads circuits": "--heads says how models are matched",
    "transport f --base a --onto b -o c --match none --heads circuits": "--heads says how models are matched",
    "merge a b --alignment x --match learned --steps 5": "--match says how models are matched anew",
    "evaluate a b --data c --alignment x --heads circuits": "--heads says how models are matched anew",
    "merge a b --points 5": "--points is how many losses are measured between the models; it needs --data",
    "merge a b --widen n_inner=9 --method linear": "--method linear takes none",
    "merge a b --widen n_inner": "write a field of the config and its size",
    "merge a b --base c": "--base and --parameter are for methods of mergekit",
    "merge a b c --method ties": "merges two models here",
    "merge a b c --weight 0.3": "more have equal shares",
    "merge a b c --dry-run": "--dry-run takes two models",
    "merge a b --private": "need --push",
    "merge a+b c --revision main": "a@REVISION+b",
    "align a b -o c --match none": "'none' is not one of 'weight', 'activation', 'learned'",
    "align a b -o c --steps 3": "it needs --match learned\n",
    "evaluate a b --data c --steps 3": "it needs --match learned\n",
    "transport f --base a --onto b -o c --steps 3": "it needs --match learned, or --method distil\n",
    "evaluate a b": "evaluate needs --data or --tasks",
    "evaluate a b --data c --limit 3": "--limit needs --tasks",
    "certify a --layers 0": "greater than or equal to 1",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_options_are_refused_in_one_line_and_at_once(typed: str) -> None:
    status, said, errors = without_libraries(typed.split())
    assert status == 2 and not said
    (line,) = errors.splitlines(keepends=True)
    assert line.startswith("hf-align: ") and REFUSED[typed] in line


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["merge", "a", "", "-o", "c"], "what follows a is empty"),
        (["merge", "a", "b", "-o", ""], "what follows -o is empty"),
        (["merge", "a", "b", "--output=", "--overwrite"], "--output is empty"),
        (["mergekit", "recipe.yml", ""], "what follows recipe.yml is empty"),
    ],
)
def test_what_is_empty_is_not_the_folder_that_a_command_is_run_in(
    typed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*typed) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"hf-align: {message}; is a variable of the shell not set?"


@pytest.mark.parametrize("typed", [["merge", "a", "b", "-o", "r\udce9sum\udce9"], ["align", "a\udcff", "b", "-o", "c"]])
def test_a_name_that_no_card_could_say_is_refused(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*typed) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("is no text in UTF-8; rename the file or folder, or run in a UTF-8 locale")


def test_a_folder_that_was_removed_is_no_place_to_run_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path.cwd()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    try:
        (tmp_path / "gone").rmdir()
        assert run("merge", tmp_path, tmp_path, "-o", tmp_path / "out") == 2
    finally:
        os.chdir(before)
    assert capsys.readouterr().err == "hf-align: the folder in which hf-align is run was removed\n"


def test_an_output_that_is_a_link_to_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", "--quiet") == 2
    assert capsys.readouterr().err == f"hf-align: {tmp_path / 'out'} cannot be written: it is a link to nothing\n"


@pytest.mark.parametrize("words", [(), ("--verbose",)])
def test_what_the_client_says_is_said_once_and_where_it_is_asked_for(words: tuple[str, ...]) -> None:
    code = f"""
        import logging, sys
        sys.argv = ["hf-align", "spec", "llama", "-q", *{words!r}]
        from hf_align.cli.app import main
        from hf_align.api import symmetries
        from huggingface_hub.utils import logging as of_the_client
        def told(*_, **__):
            of_the_client.get_logger("huggingface_hub.x").warning("nothing to send")
            raise SystemExit
        symmetries.symmetries = told
        main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.stderr.count("nothing to send") == len(words), done.stderr


def test_old_names_hold_for_one_version_and_say_so() -> None:
    said: list[str] = []
    typed = ["--only", "x", "--mixing", "narrow", "--mixing=middle", "--no-untie", "--baseline"]
    assert words.current_names(typed, said.append) == [
        "--spaces", "x", "--lambda-sampling", "near-midpoint", "--lambda-sampling=midpoint", "--tie-word-embeddings",
        "--allow-inexact",
    ]  # fmt: skip
    assert len(said) == 5 and all("is now called" in line for line in said)
    there = {name for option in parameters("merge") for name in (*option.opts, *option.secondary_opts)}
    assert set(words.RENAMED.values()) <= there and not set(words.RENAMED) & there


def test_the_card_tells_no_token_and_no_folder(tmp_path: Path) -> None:
    typed = ["merge", str(tmp_path), "org/b", "--token", "hf_x", f"-o{tmp_path}/out", "--token=hf_y", "-q"]
    told = words.told(typed, parameters("merge"), frozenset({"output"}))
    assert told == f"hf-align merge {tmp_path.name} org/b -o out -q"


def test_a_revision_is_of_repositories_that_name_none(tmp_path: Path) -> None:
    found = {m: at_revision(m, "v1") for m in ("org/a", "org/a@main", "hf://org/a", str(tmp_path))}
    assert list(found.values()) == ["org/a@v1", "org/a@main", "hf://org/a@v1", str(tmp_path)]
    assert at_revision("org/a", None) == "org/a"


@pytest.mark.skipif(not FULL.is_char_device(), reason="this machine has no device that is always full")
def test_no_room_for_what_is_said_is_no_fault_of_ours() -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*COMMAND, "spec", "gpt2"], stdout=full, stderr=subprocess.PIPE, text=True)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hf-align")]
    assert done.returncode == 2 and "No space left on device" in line and "fault" not in line


@pytest.mark.parametrize("columns", [50, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_in_panels(
    command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(command, "--help") == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= columns
    shown = parameters(command)
    assert all(option in page for p in shown if p.param_type_name == "option" for option in p.opts)
    assert all(p.help for p in shown) and "\nGeneral\n" in page and f"\n  hf-align {command} " in page
    if columns == 80:
        assert max(len(panel.splitlines()) for panel in page.split("\n\n")) <= 24, "a panel fits a screen"
    if command == "merge":
        assert {*get_args(AnyMethod), *get_args(AnyResidual), *get_args(AnyHeads)} <= set(re.findall(r"[\w-]+", page))
        assert "linear (default)" not in " ".join(page.split()), "--effort chooses the method where nothing else does"


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zsh", "fish"))])
def test_shells_complete_commands_and_options(shell: str) -> None:
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run([*COMMAND, "--show-completion", shell], env=env, check=True, capture_output=True, text=True)
    assert "COMPLETE" in shown.stdout
    name = "_HF_ALIGN_COMPLETE"
    asked = {"COMP_WORDS": "hf-align mer", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "hf-align mer",
             "_TYPER_COMPLETE_FISH_ACTION": "get-args", name: f"complete_{shell}"}  # fmt: skip
    _, found, _ = without_libraries([], {**env, **asked})
    assert "merge" in found and "mergekit" in found and "certify" not in found


def test_too_little_memory_is_no_fault() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**55)
    assert unexpected(error.value) == unexpected(MemoryError()) == "there is not enough memory for this"
    assert "--device cpu" in unexpected(torch.OutOfMemoryError("CUDA out of memory"))
    assert "is a fault" in unexpected(RuntimeError("shapes differ"))


def test_who_stops_a_run_is_told_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_align.jobs.pipeline.align", stopped)
    assert run("align", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", "--quiet") == 130
    said = "hf-align: interrupted; the same command goes on from what is done"
    assert [line for line in capsys.readouterr().err.splitlines() if line] == [said]
