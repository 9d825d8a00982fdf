"""Gains that are read through a link, f(s), beside another gain: of γ ⊙ f(s) nothing sees which is which.

So it is with queries that have a scale of their own for each dimension behind a norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get
from hf_align.symmetry.gauges.degrees import cancels, drawn_powers
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.gains import link_of_gain
from hf_align.symmetry.rules.links import Link, link_of
from hf_align.tracing.ops import Trait, does


@dataclass(frozen=True)
class LinkedGain(Gauge):
    """γ ⊙ f(s) replaces γ, and all f(s) become one."""

    scale: str
    link: Link
    gain: str

    said = "a scale behind a link, moved into the gain beside it"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.scale, self.gain)

    def fix(self, name: str, get: Get) -> Tensor:
        read = self.link.read(get(self.scale))
        return self.link.stored(torch.ones_like(read)) if name == self.scale else get(name) * read.reshape_as(get(name))


def linked_gains(found: Interpretation, gone: Collection[str]) -> Iterator[LinkedGain]:
    """The gauges of such gains.

    Args:
        gone: gains that have gone into other weights.
    """
    done = set(gone)
    for linked in found.linked_gains:
        link = link_of_gain(linked)
        for gain in _before(linked.node, found):
            if done.isdisjoint((linked.parameter, gain)):
                gauge = LinkedGain(linked.parameter, link, gain)
                if _is_unseen(gauge, found):
                    done |= set(gauge.targets)
                    yield gauge


def _before(node: fx.Node, found: Interpretation) -> Iterator[str]:
    """The weights that multiply a value before an op does."""
    for value in node.all_input_nodes:
        while does(value, Trait.MOVES) and len(value.all_input_nodes) == 1:
            (value,) = value.all_input_nodes
        if does(value, Trait.MULTIPLIES):
            yield from (found.program.parameters[a] for a in value.all_input_nodes if a in found.program.parameters)


def _is_unseen(gauge: LinkedGain, found: Interpretation) -> bool:
    """Whether no output changes when any factors of f(s) go over to γ, followed as powers that are drawn."""
    stored = [node for node, name in found.program.parameters.items() if name == gauge.scale]
    gains = [node for node, name in found.program.parameters.items() if name == gauge.gain]
    reads = [user for node in stored for user in node.users]
    size = stored[0].meta["val"].numel()
    if any(link_of(user) is not gauge.link for user in reads) or any(g.meta["val"].numel() != size for g in gains):
        return False
    drawn = drawn_powers(size)
    powers = {node: drawn.reshape(node.meta["val"].shape) for node in gains}
    return cancels({**powers, **{node: -drawn.reshape(node.meta["val"].shape) for node in reads}}, found)
