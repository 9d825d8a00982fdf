"""The program: its commands, and what it says when one of them fails."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import Annotated, Any

import typer

from hf_align import __version__
from hf_align.cli import console, words
from hf_align.cli.align import align
from hf_align.cli.certify import certify
from hf_align.cli.evaluate import evaluate
from hf_align.cli.explain import explain
from hf_align.cli.help import Command, Group
from hf_align.cli.merge import merge
from hf_align.cli.mergekit import mergekit
from hf_align.cli.push import push
from hf_align.cli.report import report
from hf_align.cli.spec import spec
from hf_align.cli.transport import transport
from hf_align.errors import HfAlignError, one_line
from hf_align.runtime.processes import alone_by_mistake, current

_BOTH = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="hf-align", cls=Group, context_settings=_BOTH, rich_markup_mode=None, pretty_exceptions_enable=False
)
for command in (merge, align, transport, evaluate, certify, spec, explain, mergekit, report, push):
    app.command(cls=Command, context_settings=_BOTH)(command)


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
    """Merge Hugging Face models that were trained apart.

    Models trained from different seeds compute alike in different bases. hf-align derives from the architecture's
    graph every change of basis that leaves the function untouched, moves B into the basis of A, and merges.

    $ hf-align merge org/a org/b -o merged
    """
    if (warning := alone_by_mistake()) is not None:
        _say(warning)


_INTERRUPTED = 130
"""What typer makes of SIGINT."""


@cache
def _program() -> Any:
    """The commands with their options, which are read off signatures: in one process, once."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line; errors that the user can mend are one line and exit status 2."""
    logging.basicConfig(format="%(name)s: %(message)s")
    try:
        words.require_values(sys.argv[1:])
        typed = words.current_names(sys.argv[1:] or ["--help"], _say)
        status = _program()(args=words.with_values(typed), prog_name="hf-align", standalone_mode=False)
    except typer.TyperException as error:  # an option that is not there, or a value that it does not take
        _say(one_line(error.format_message().replace("Value error, ", "")))
        raise SystemExit(2) from None
    except HfAlignError as error:
        if current().leads or not error.shared:
            _say(str(error))
        raise SystemExit(2) from None
    except BrokenPipeError:  # whoever read what is said has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    except Exception as error:
        _say(console.unexpected(error))
        raise SystemExit(2) from None
    if status == _INTERRUPTED:
        _say("interrupted; the same command goes on from what is done")
    raise SystemExit(status or 0)


def _say(line: str) -> None:
    typer.echo(f"hf-align: {line}", err=True)
