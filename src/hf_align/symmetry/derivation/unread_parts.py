"""Parts of weights of which traced calls show too little to move them.

Those that no call reads, as positions beyond the lengths of all calls, of a table that is cut to the length of a text.
And those that read only what no weight has made, as a mask of what a text is padded with: it has the same number at
many places in all traced calls, and another length may tell them apart.
"""

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


def pin_unwritten_parts(found: Interpretation) -> None:
    """Pin every atom along which weights only read: what they read there are numbers of the code's own. To be asked for
    when gains are resolved, and what these write is the same as what they read."""
    uses = [*found.linear_uses.values(), *found.grouped_uses.values()]
    reading = {(use.weight, use.in_axis) for use in uses}
    axes = {(name, i): axis for name, weight in found.weights.items() for i, axis in enumerate(weight.axes)}
    met = [axis for r in found.relations for axis in (r.product, r.left, r.right)]
    written = {
        atom.root.space.serial
        for axis in (*met, *(axis for at, axis in axes.items() if at not in reading))
        for atom in axis.root.atoms
    }
    for at in reading:
        for atom in axes[at].root.atoms:
            if atom.size > 1 and atom.root.space.serial not in written:
                lower(atom, FIXED, Evidence("unwritten", "no weight has made what it reads", "", ""))


def _axes(found: Interpretation, node: fx.Node) -> Iterator[Axis]:
    for value in members(found.values.get(node)):
        if isinstance(value, Value):
            yield from value.axes
