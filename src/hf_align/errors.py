"""What can go wrong, by what the user must do about it. Every message is one line; the command line exits with 2."""

from __future__ import annotations

import os
import unicodedata

_BREAKS = frozenset(("Cc", "Cs", "Cf", "Zl", "Zp"))
"""Kinds of characters that break a line, move the cursor, or cannot be encoded."""


def one_line(text: str) -> str:
    """A text in which what would break the line, or the terminal, is written as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in _BREAKS else c for c in text)


def first_line(error: BaseException) -> str:
    """What an error of another library says first, or its kind."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def require_path(name: str, path: str | os.PathLike[str]) -> None:
    """See that a path is one of text, and not empty, which would stand for the folder that this is run in.

    Raises:
        OptionError: it is.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise OptionError(f"{name} is {path!r}; a str or a Path is needed")
    if not os.fspath(path):
        raise OptionError(f"{name} is empty; a folder is needed")


class HfAlignError(Exception):
    """Base of all errors that the user can mend."""

    shared = False
    """Raised in all processes of a run at once, so that one of them says it."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class OptionError(HfAlignError, ValueError):
    """An option or an argument has no such value, or contradicts another one: choose otherwise."""


class MissingExtra(HfAlignError, ImportError):
    """An optional dependency is not installed: install the extra that the message names."""


class IncompatibleModels(HfAlignError):
    """The two models do not merge, or an architecture cannot be built or traced: choose other models."""


class CannotRun(HfAlignError):
    """The models cannot be run here as a choice needs it: choose one that reads the weights alone."""


class CheckpointError(HfAlignError):
    """A checkpoint is missing, damaged or unsupported: fetch or convert it again."""


class OutputError(HfAlignError):
    """The output cannot be written: choose another folder, or make room."""
