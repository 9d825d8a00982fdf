"""The command line, and other code, in processes of their own that do not load the libraries again.

A server loads them once, and every process is a fork of it. What reads its environment while it is loaded
(huggingface_hub: HF_HOME, HF_ENDPOINT, …) has that of the server: what tests that needs a new interpreter.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest

FORKS = multiprocessing.get_context("forkserver")


@cache
def _start_server() -> None:
    FORKS.set_forkserver_preload(["loaded"])
    with pytest.MonkeyPatch.context() as patch:  # it does not get this process' path
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")  # a fork has none of its parent's threads, and would wait for them
        forkserver.ensure_running()


def forked(
    target: Callable[..., None], *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    stderr: Path | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A function in a process of its own: its exit status, and what it printed.

    Args:
        target: of a module that this process and the other can import.
        env: what the environment has besides that of the tests.
        stderr: a file or a terminal to write errors to, in place of the result.
    """
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), stderr or Path(folder, "errors")
        process = FORKS.Process(
            target=_start, args=(target, arguments, cwd, {**os.environ, **(env or {})}, out, errors)
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        said = "" if stderr else errors.read_text()
        return subprocess.CompletedProcess(list(arguments), process.exitcode, out.read_text(), said)


def hf_align(*arguments: object) -> None:
    """A target: the command line."""
    from hf_align.cli.app import main

    sys.argv = ["hf-align", *map(str, arguments)]
    main()


def script(path: str, *arguments: object) -> None:
    """A target: a Python file."""
    sys.argv = [path, *map(str, arguments)]
    runpy.run_path(path, run_name="__main__")


def pytest_main(*arguments: object) -> None:
    """A target: tests of their own."""
    sys.exit(pytest.main([*map(str, arguments)]))


def _start(
    target: Callable[..., None], arguments: tuple[object, ...], cwd: Path | None, env: dict[str, str],
    stdout: Path, stderr: Path,
) -> None:  # fmt: skip
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd or Path.cwd())
    try:
        target(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without
