"""What others have written, as text in Markdown: names, licences and kinds of models hold no markup of ours."""

from __future__ import annotations

import re

from hf_align.errors import one_line

_MARKUP = re.compile(r"([\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_]))")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def plain(text: object) -> str:
    """A text that is shown as it is, on one line: no HTML, no links, no end of a table's cell."""
    return _MARKUP.sub(r"\\\1", one_line(str(text)).translate(_ENTITIES))


def code(text: object) -> str:
    """A text as inline code; more backticks around it than it has in it. Pipes end a table's cell in code, too."""
    shown = one_line(str(text))
    fence = "`" * (_longest_run(shown) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{space}{shown}{space}{fence}".replace("|", "\\|")


def block(text: str) -> str:
    """A text of one line as a block of code."""
    shown = one_line(text)
    fence = "`" * max(3, _longest_run(shown) + 1)
    return f"{fence}\n{shown}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
