"""Parts of weights that no traced call reads: positions beyond the lengths of all calls, of a table that is cut to the
length of the text. Nothing was seen of what a longer call does with them, so they stand still."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from hf_align.symmetry.interpreter.bounds import FIXED
from hf_align.symmetry.interpreter.spaces import Axis, lower
from hf_align.symmetry.interpreter.values import Interpretation, Value, members
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Evidence

_SHOWS = (
    Trait.SAME | Trait.CASTS | Trait.MOVES | Trait.RESHAPES | Trait.REORDERS_AXES | Trait.ADDS_UNIT_AXES | Trait.COPIES
)
"""What shows entries, or some of them, and computes nothing."""


def pin_unread_parts(found: Interpretation) -> None:
    """Pin every atom of a weight that is read only by ops that show other parts of it, or to compute nothing."""
    read = {
        atom.root.space.serial
        for node in found.program.graph.nodes
        if not does(node, _SHOWS)
        for operand in node.all_input_nodes
        for axis in _axes(found, operand)
        for atom in axis.root.atoms
    }
    unread = {*found.program.unread}
    for name, weight in found.weights.items():
        for axis in weight.axes:
            for atom in axis.root.atoms:
                if name in unread or atom.root.space.serial not in read:
                    lower(atom, FIXED, Evidence("unread", "no traced call reads it", "", ""))


def _axes(found: Interpretation, node: fx.Node) -> Iterator[Axis]:
    for value in members(found.values.get(node)):
        if isinstance(value, Value):
            yield from value.axes
