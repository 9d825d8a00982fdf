"""What `--help` prints: panels of options, in any width, and no word broken."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from hf_align.cli.options import GENERAL, PANELS
from hf_align.errors import OptionError

_WIDEST, _NARROW, _COLUMN = 100, 64, 28
"""Columns: of a page, below which help stands under the name of its option, and where it begins beside it."""


class Command(TyperCommand):
    """A command with such a page; what it takes once is given once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=[*args])
        for option, times in Counter[Any](order).items() if not ctx.resilient_parsing else ():
            if times > 1 and option.param_type_name == "option" and not (option.multiple or option.is_flag):
                raise OptionError(f"{max(option.opts, key=len)} is given {times} times, and takes one value")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(_page(self, ctx)) + "\n")


class Group(TyperGroup):
    """The program, with a line for each command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = _width()
        rows = [(name, command.get_short_help_str(1000)) for name, command in self.commands.items()]
        options: list[Any] = self.get_params(ctx)
        lines = [*_usage(self, ctx, width), "", *_about(self.help, width)]
        lines += _panel("Commands", rows, width, 12)
        lines += _panel("Options", [(_name(option), option.help or "") for option in options], width, _COLUMN)
        lines += ["", *textwrap.wrap("hf-align COMMAND --help says what a command takes.", width)]
        formatter.write("\n".join(lines) + "\n")


def _page(command: Any, ctx: Any) -> list[str]:
    width, parameters = _width(), command.get_params(ctx)
    kinds = get_type_hints(inspect.unwrap(command.callback))
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    panels = {"Arguments": arguments} | {panel: [] for panel in PANELS}
    for option in (p for p in parameters if p.param_type_name != "argument" and not p.hidden):
        panels[option.rich_help_panel or GENERAL].append(option)
    lines = [*_usage(command, ctx, width), "", *_about(command.help, width)]
    for panel, shown in panels.items():
        lines += _panel(panel, [(_name(p), _described(p, kinds.get(p.name))) for p in shown], width, _COLUMN)
    return lines


def _width() -> int:
    return min(_WIDEST, shutil.get_terminal_size().columns)


def _panel(title: str, rows: Sequence[tuple[str, str]], width: int, column: int) -> list[str]:
    """A title with its rows, each a name and what is said of it; nothing without any."""
    if not rows:
        return []
    return ["", typer.style(title, bold=True), *(line for row in rows for line in _row(*row, width, column))]


def _usage(command: Any, ctx: Any, width: int) -> list[str]:
    arguments = [_name(p) if p.required else f"[{_name(p)}]" for p in command.params if p.param_type_name == "argument"]
    taken = ["[OPTIONS]", *arguments] if not isinstance(command, Group) else ["COMMAND", "[OPTIONS]"]
    line = f"Usage: {ctx.command_path} {' '.join(taken)}"
    return textwrap.wrap(line, width, subsequent_indent=" " * 7, break_on_hyphens=False)


def _about(text: str | None, width: int) -> Iterator[str]:
    """Paragraphs of a docstring; a line after `$` is a command, and can be pasted however it is broken."""
    for number, paragraph in enumerate(inspect.cleandoc(text or "").split("\n\n")):
        if number:
            yield ""
        if not paragraph.startswith("$ "):
            yield from textwrap.wrap(paragraph, width, break_on_hyphens=False)
            continue
        for line in paragraph.splitlines():
            broken = textwrap.wrap(line.removeprefix("$ "), width - 8, break_on_hyphens=False, break_long_words=False)
            yield from ((" " * (6 if i else 2)) + part + (" \\" if i < len(broken) - 1 else "")
                        for i, part in enumerate(broken))  # fmt: skip


def _row(name: str, about: str, width: int, column: int) -> list[str]:
    """A name, and what is said of it beside it, or under it where there is no room."""
    column = 6 if width < _NARROW and column > width // 4 else column
    text = textwrap.wrap(about, width - column, break_on_hyphens=False, break_long_words=False)
    text = [" " * column + line for line in text]
    if text and 2 + len(name) < column - 1:
        text[0] = f"  {name}".ljust(column) + text[0].lstrip()
        return text
    return [*textwrap.wrap(name, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False), *text]


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"{parameter.metavar}{'...' if parameter.nargs == -1 else ''}"
    short_last = sorted(parameter.opts, key=len)
    name = ", ".join(short_last) + "".join(f" / {o}" for o in parameter.secondary_opts)
    return name if parameter.is_flag else f"{name} {parameter.metavar or ''}".rstrip()


def _described(parameter: Any, kind: Any) -> str:
    parts, default = [parameter.help or ""], _default(parameter)
    if choices := _choices(kind):
        marked = [f"{choice} (default)" if choice == default else choice for choice in choices]
        parts.append(f"One of {', '.join(marked)}.")
    if default is not None and default not in choices:
        parts.append(f"[default: {default}]")
    if parameter.required and parameter.param_type_name != "argument":
        parts.append("[required]")
    return " ".join(parts)


def _choices(kind: Any) -> Sequence[str]:
    """The values of a `Literal`, or of one or nothing."""
    kinds = [kind, *get_args(kind)]
    return next((get_args(k) for k in kinds if get_origin(k) is Literal), ())


def _default(parameter: Any) -> str | None:
    shown = getattr(parameter, "show_default", False)
    if isinstance(shown, str):
        return shown
    value = parameter.default
    return None if value is None or isinstance(value, bool) or value in ("", (), []) or callable(value) else str(value)
