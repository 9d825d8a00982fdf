"""Merges of tests are matched by weights and merged by their mean unless they ask: the default runs the models."""

from __future__ import annotations

from collections.abc import Sequence

_ASKING = ("--match", "--method", "--effort", "--alignment", "--steps", "--lambda-sampling", "--base", "--parameter",
           "--help", "-h")  # fmt: skip


def by_weights(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with a match where a merge leaves it open."""
    asked = {argument.partition("=")[0] for argument in arguments}
    leaves_open = arguments[:1] == ["merge"] and asked.isdisjoint(_ASKING)
    return [*arguments, *(["--match", "weight"] if leaves_open else [])]
