"""The words of a command as they were typed: what is put right before they are read, and what a card says of them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_align.errors import OptionError
from hf_align.settings.choices import RENAMED_METHODS

RENAMED = {
    "--only": "--spaces",
    "--baseline": "--allow-inexact",
    "--mixing": "--lambda-sampling",
    "--untie": "--untie-word-embeddings",
    "--no-untie": "--tie-word-embeddings",
}
"""Names that options had; they will be removed in version 0.2."""
_SAMPLINGS = {"narrow": "near-midpoint", "middle": "midpoint"}
"""Values that `--mixing` had."""


def current_names(words: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """The words with the names that options have today.

    Args:
        say: told of every old name.
    """
    found: list[str] = []
    old = ""
    for word in words:
        name, equals, value = word.partition("=")
        if old == "--mixing":
            name, equals, value = _SAMPLINGS.get(word, word), "", ""
        elif name in RENAMED:
            say(f"{name} is now called {RENAMED[name]}; the old name goes away in version 0.2")
            value = _SAMPLINGS.get(value, value) if name == "--mixing" else value
        if "--method" in (old, name) and (method := value or word) in RENAMED_METHODS:
            say(f"--method {method} is now called {RENAMED_METHODS[method]}; the old name goes away in version 0.2")
            name, value = (name, RENAMED_METHODS[method]) if equals else (RENAMED_METHODS[method], "")
        old = "" if equals else name
        found.append(f"{RENAMED.get(name, name)}{equals}{value}")
    return found


def require_values(words: Sequence[str]) -> None:
    """Refuse what stands for nothing: the empty path is the folder that the command is run in. What is written of a
    merge says where it is, as text.

    Raises:
        OptionError: a word, or the value of an option, is empty or no text in UTF-8; that folder is gone.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise OptionError("the folder in which hf-align is run was removed") from None
    for before, word in zip(["hf-align", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise OptionError(f"{word!r} is no text in UTF-8; rename the file or folder, or run in a UTF-8 locale")
        if not word:
            raise OptionError(f"what follows {before} is empty; is a variable of the shell not set?")
        if word.startswith("-") and equals and not value and name != "--push":
            raise OptionError(f"{name} is empty; is a variable of the shell not set?")


def with_values(words: Sequence[str]) -> list[str]:
    """A bare `--push` gets the empty value, which stands for the derived name; typer knows no optional values."""
    followed = zip(words, [*words[1:], "--"], strict=True)
    return [f"{word}=" if word == "--push" and after.startswith("-") else word for word, after in followed]


def told(words: Sequence[str], parameters: Sequence[Any], paths: frozenset[str]) -> str:
    """A command for others to read: without the folders of this disk, and without a token.

    Args:
        words: all after `hf-align`, as `with_values` gives them.
        parameters: of the command.
        paths: the names of those that are files or folders.
    """
    options = {name: p for p in parameters for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
    left, found = iter(words), ["hf-align"]
    for word in left:
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name not in options and word[:2] in options and not word.startswith("--"):  # -oDIR
            name, value = word[:2], word[2:]
        if name not in options:
            found.append(_without_path(word))
            continue
        option = options[name]
        if not getattr(option, "is_flag", False) and not (equals or value):
            value = next(left, "")
        if name != "--token":
            found += [name, *([_without_path(value, is_path=option.name in paths)] if value else [])]
    return shlex.join(found)


def _without_path(value: str, *, is_path: bool = False) -> str:
    """An argument without the folders of this disk; it is the same before the output is there and after."""
    parts = [value] if is_path or not value or Path(value).exists() else value.split("+")
    return "+".join(_without_folder(part, is_path) for part in parts)


def _without_folder(value: str, is_path: bool) -> str:
    is_path = is_path or value.startswith(("/", ".", "~")) or bool(value and Path(value).exists())
    return Path(os.path.abspath(value)).name if is_path else value
