"""The attributes that the code of a model sets in what its user calls: neither while it is built, nor in a call."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from transformers import GenerationMixin, PreTrainedModel

from hf_align.tracing.branches.changed import BUILT_BY, Named, set_later

_CALL = frozenset(("forward", "__call__"))
BUILDS = frozenset((*BUILT_BY, PreTrainedModel._init_weights.__name__))
"""Methods that are called when a model is built, and no more."""
CALLED_BY_OTHERS = frozenset(dir(PreTrainedModel) + dir(GenerationMixin))
"""What libraries call."""


def set_by_methods(sources: Sequence[str]) -> frozenset[str]:
    """The attributes that are set, or changed, by functions which a user may call between two calls of a model.

    Args:
        sources: all files of its code.
    """
    functions = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, Named)]
    calls = {name: set[str]() for name in {function.name for function in functions}}
    for function in functions:
        calls[function.name] |= {*called(function)} & calls.keys()
    in_calls = _reached(_CALL, calls)
    in_builds = {name for name in _reached(BUILDS, calls) if name.startswith("_")}  # the others are for users, too
    others = CALLED_BY_OTHERS | in_calls | in_builds
    return frozenset[str]().union(*(set_later(source, others) for source in sources))


def called(function: Named) -> Iterator[str]:
    """The names of what a function calls."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name


def _reached(starts: Collection[str], calls: dict[str, set[str]]) -> set[str]:
    """The functions that some call, or what these call."""
    found, waiting = set[str](), [*starts & calls.keys()]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += calls[name]
    return found
