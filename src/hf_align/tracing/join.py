"""Several calls of one model as one program: their graphs side by side, over the same weights.

What holds for a joined program holds for every call in it. A change of basis that leaves all its results alone leaves
each of them alone, so the symmetries of the joined program are the meet of those of its parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hf_align.tracing.alike import is_shown_by, run_alike, takes_as_much
from hf_align.tracing.example import Example
from hf_align.tracing.mode import extent
from hf_align.tracing.program import Program


def join(calls: Mapping[str, Program]) -> Program:
    """One program that makes all calls, the first of which it is judged by. Those that do no more than a longer one
    are part of it already.

    Args:
        calls: by the names of their modes; programs of one model.
    """
    graph = fx.Graph()
    first = next(iter(calls.values()))
    weights: dict[str, fx.Node] = {}
    inputs: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Any] = {}
    arguments: dict[str, torch.Tensor] = {}
    tokens: dict[str, torch.Tensor] = {}
    results: list[fx.Node] = []
    for number, call in enumerate(_told_apart(list(calls.values()))):
        prefix = f"call_{number}_" if number else ""
        copies: dict[fx.Node, fx.Node] = {}
        for node in call.graph.nodes:
            if node.op == "output":
                results += [copies[result] for result in call.interface]
                continue
            name = call.parameters.get(node)
            if name in weights:
                copies[node] = weights[name]
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if name is not None:
                weights[name] = copies[node]
            elif node in call.inputs:
                inputs[copies[node]] = prefix + call.inputs[node]
            elif node in call.constants:
                constants[copies[node]] = call.constants[node]
        arguments |= {prefix + n: t for n, t in call.example.arguments.items()}
        tokens |= {prefix + n: t for n, t in call.example.tokens.items()}
    end = graph.output(tuple(results))
    end.args = (tuple(results),)
    parameters = {weights[name]: name for name in first.shapes if name in weights}
    return Program(first.config, graph, parameters, inputs, first.shapes, first.ties, first.buffers, constants,
                   Example(arguments, tokens), first.candidate, tuple(calls),
                   frozenset[str]().union(*(call.opened for call in calls.values())),
                   untried=first.untried)  # fmt: skip


def _told_apart(calls: list[Program]) -> list[Program]:
    """The first call, and of all others those that the longest with as many ops does not show."""
    alike: dict[int, list[Program]] = defaultdict(list)
    for call in calls:
        alike[len(call.graph.nodes)].append(call)
    longest = {n: _longest(same, calls[0]) for n, same in alike.items()}
    return [call for call in calls if call is calls[0] or call is (most := longest[len(call.graph.nodes)])
            or not is_shown_by(call, most)
            or (call.example.words != most.example.words and not takes_as_much(call, most))]  # fmt: skip


def _longest(calls: list[Program], first: Program) -> Program:
    """The one with most tokens; with several texts, if what these do to each other is not seen in the first call."""
    longest = max(calls, key=lambda call: extent(call.example)[1])
    if first in calls and run_alike(first, longest):
        return longest
    return max(calls, key=lambda call: (extent(call.example)[0] > 1, extent(call.example)[1]))
