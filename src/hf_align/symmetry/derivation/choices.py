"""Entries that are looked up by number, such as the units of chosen experts: whose are they, at every place?

The element of a group may differ from expert to expert if units of one never meet those of another. Where all experts
stand side by side, the axes of the values show that. Else it is followed here: every entry is labelled, by the number
of its expert, or by the place of the number that it was looked up by; and no two labels may meet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.index_provenance import NOBODY, moved, only_moves, without_copies
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.contraction import axes_in_step
from hf_align.symmetry.rules.lookup import is_mask
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.ops import Trait, does, is_pointwise


def meet_their_own(
    starts: Mapping[fx.Node, Tensor], count: int, places: Collection[fx.Node], found: Interpretation
) -> bool:
    """Whether entries of one expert never meet those of another; where it is not known, no.

    Args:
        starts: of weights, whose each entry is: labels in the shape of the weight.
        count: of experts.
        places: all nodes whose values hold such entries.
    """
    labels, first = dict(starts), _First(count)
    for node in found.program.graph.nodes:
        if node in labels or not (node in places or any(a in labels for a in node.all_input_nodes)):
            continue
        carried = [a for a in node.all_input_nodes if a in labels]
        if node in places and carried and only_moves(node, carried, found):
            labels.update(moved(node, labels, found))
            continue
        after = _looked_up(node, labels, first) if does(node, Trait.LOOKS_UP) else _met(node, labels, places)
        if after is None:
            return False
        if node in places:
            labels[node] = after
    return True


class _First:
    """By what gives numbers, the label of the first of them."""

    def __init__(self, taken: int) -> None:
        self.taken = taken
        self.of = dict[fx.Node, int]()

    def __call__(self, numbers: fx.Node) -> int:
        source = _source(numbers)
        if source not in self.of:
            self.of[source] = self.taken
            self.taken += numbers.meta["val"].numel()
        return self.of[source]


def _looked_up(node: fx.Node, labels: Mapping[fx.Node, Tensor], first: _First) -> Tensor | None:
    """New labels of what an op has looked up, in a labelled table, along the axis of the labels."""
    table = node.args[0]
    numbers = [n for a in node.args[1:] for n in (a if isinstance(a, (list, tuple)) else [a])]
    chosen = [n for n in numbers if isinstance(n, fx.Node)]
    if not isinstance(table, fx.Node) or table not in labels or does(node, Trait.GATHERS):
        return None
    if len(chosen) != 1 or chosen[0] in labels or is_mask(chosen[0]):
        return None
    axis = Arguments(node).ask("dim", numbers.index(chosen[0])) % labels[table].dim()
    whose = without_copies(labels[table])
    if bool((whose == NOBODY).any()) or bool((whose != whose[tuple(_first_but(axis, whose))]).any()):
        return None
    shape, result = chosen[0].meta["val"].shape, node.meta["val"]
    own = torch.arange(shape.numel()).reshape(shape) + first(chosen[0])
    return own[(..., *[None] * (labels[table].dim() - axis - 1))].expand(result.shape)


def _first_but(axis: int, labels: Tensor) -> list[slice]:
    """The first entry along all axes but one."""
    return [slice(None) if i == axis else slice(1) for i in range(labels.dim())]


def _source(numbers: fx.Node) -> fx.Node:
    """What gives them, behind ops that keep all of them in their order."""
    while does(numbers, Trait.SAME | Trait.RESHAPES | Trait.ADDS_UNIT_AXES):
        numbers = numbers.all_input_nodes[0]
    return numbers


def _met(node: fx.Node, labels: Mapping[fx.Node, Tensor], places: Collection[fx.Node]) -> Tensor | None:
    """Labels of what an op makes of its operands, if no two of them meet in it."""
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    aligned = _pointwise(node) or axes_in_step(node)
    if aligned is None:
        return None
    operands, names = aligned
    after = torch.tensor(NOBODY)
    for operand, axes in operands:
        if operand not in labels and operand in places:
            return None  # it holds such entries, too, and nobody knows whose
        own = _along(labels[operand], axes, names) if operand in labels else torch.tensor(NOBODY)
        if own is None or bool(((own != after) & (own != NOBODY) & (after != NOBODY)).any()):
            return None
        after = torch.where(after == NOBODY, own, after)
    return after.expand(node.meta["val"].shape)


def _pointwise(node: fx.Node) -> tuple[list[tuple[fx.Node, list[str]]], list[str]] | None:
    """As `axes_in_step`: the axes of all operands are those of the result, counted from behind."""
    if not is_pointwise(node):
        return None
    names = [str(i) for i in range(-node.meta["val"].dim(), 0)]
    return [(o, names[len(names) - o.meta["val"].dim() :]) for o in node.all_input_nodes], names


def _along(labels: Tensor, axes: list[str], names: list[str]) -> Tensor | None:
    """An operand's labels, laid along the axes of the result; none where it has several along an axis that goes."""
    if len(set(axes)) < len(axes):
        return None
    labels = without_copies(labels)
    for i in reversed(range(len(axes))):
        if axes[i] not in names:
            if bool((labels != labels.narrow(i, 0, 1)).any()):
                return None
            labels = labels.select(i, 0)
    kept = [a for a in axes if a in names]
    labels = labels.permute([kept.index(n) for n in names if n in kept])
    return labels[tuple(slice(None) if n in kept else None for n in names)]
