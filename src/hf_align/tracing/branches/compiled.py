"""Modules that torch has compiled, and code that a model's code makes: a trace follows the way that one call takes, and
nothing shows the others."""

from __future__ import annotations

import ast
import linecache
import re
from pathlib import Path

import torch
from torch import nn

from hf_align.errors import IncompatibleModels
from hf_align.tracing.branches.taken import INSTALLED, brought

_BRANCHES = ("prim::If", "prim::Loop")
_PLACE = re.compile(r'File "(.+)", line (\d+)')


def require_one_way(model: nn.Module) -> None:
    """See that no compiled module has branches or loops but those of packages, and that no code is made by `exec`.

    Raises:
        IncompatibleModels: one does, or some is.
    """
    if (line := _made(model)) is not None:
        raise IncompatibleModels(
            f"{type(model).__name__} cannot be traced: {line} makes code as it runs, which nothing shows; "
            "write that code out, or merge with --match none"
        )
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and (line := _branch(part)) is not None:
            raise IncompatibleModels(
                f"{type(model).__name__} cannot be traced: {path or 'it'} is compiled by torch.jit, with a branch or a "
                f"loop in {line}; put the module that it was made of in its place, or merge with --match none"
            )


def _made(model: nn.Module) -> str | None:
    """The file and the line in which code of a model's own makes code."""
    for module in brought(model):
        file = Path(str(module.__file__))
        try:
            tree = ast.parse("".join(linecache.getlines(str(file))))
        except (SyntaxError, ValueError):  # what was loaded stands there no more
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="exec" | "compile")):
                    return f"{file.name}:{node.lineno}"
    return None


def _branch(part: torch.jit.ScriptModule) -> str | None:
    """The file and the line in which a compiled module branches."""
    graph = part.inlined_graph  # its nodes do not outlive it
    for kind in _BRANCHES:
        for node in graph.findAllNodes(kind, recurse=True):  # type: ignore[attr-defined]
            told = node.sourceRange()
            if not any(folder in told for folder in INSTALLED):
                found = _PLACE.search(told)
                return f"{Path(found[1]).name}:{found[2]}" if found else "its code"
    return None
