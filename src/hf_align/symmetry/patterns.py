"""Names of parameters with wildcards: `*` stands for a part between dots (a layer's number), `**` for anything."""

from __future__ import annotations

import re


def matched(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the wildcards stand for; None where the name is another."""
    expression = re.escape(pattern).replace(r"\*\*", "(.*)").replace(r"\*", r"([^.]*)")
    found = re.fullmatch(expression, name)
    return None if found is None else found.groups()


def is_named(pattern: str, name: str) -> bool:
    """Whether a name is one of those that are meant."""
    return matched(pattern, name) is not None
