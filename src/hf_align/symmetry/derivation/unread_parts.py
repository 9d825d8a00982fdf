"""Parts of weights of which traced calls show too little to move them.

Those that no call reads, as positions beyond the lengths of all calls, of a table that is cut to the length of a text.
And those that read nothing but numbers of the code's own, as a mask of what a text is padded with: it has the same
number at many places in all traced calls, and another length may tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    operands = (n for node in found.program.graph.nodes if not does(node, _SHOWS) for n in node.all_input_nodes)
    read = _atoms(axis for operand in operands for axis in _axes(found, operand))
    unread = {*found.program.unread}
    for name, weight in found.weights.items():
        for axis in weight.axes:
            for atom in axis.root.atoms:
                if name in unread or atom.root.space.serial not in read:
                    lower(atom, FIXED, Evidence("unread", "no traced call reads it", "", ""))


def pin_constant_parts(found: Interpretation) -> None:
    """Pin every atom along which weights read nothing but numbers of the code's own."""
    program = found.program
    uses = [*found.linear_uses.values(), *found.grouped_uses.values()]
    reading = {(use.weight, use.in_axis) for use in uses}
    made = _atoms(axis for r in found.relations for axis in (r.product, r.left, r.right))
    for node in program.graph.nodes:
        name = program.parameters.get(node)
        if name is not None:
            axes = (axis for i, axis in enumerate(found.weights[name].axes) if (name, i) not in reading)
            made |= _atoms(axes)
        elif node not in program.constants:
            given = () if does(node, Trait.LOOKS_UP_ROWS) else node.all_input_nodes
            made |= _atoms(_axes(found, node)).difference(*(_atoms(_axes(found, operand)) for operand in given))
    for name, i in reading:
        for atom in found.weights[name].axes[i].root.atoms:
            if atom.size > 1 and atom.root.space.serial not in made:
                lower(atom, FIXED, Evidence("constant", "what it reads there is the same in all traced calls", "", ""))


def _atoms(axes: Iterable[Axis]) -> set[int]:
    return {atom.root.space.serial for axis in axes for atom in axis.root.atoms}


def _axes(found: Interpretation, node: fx.Node) -> Iterator[Axis]:
    for value in members(found.values.get(node)):
        if isinstance(value, Value):
            yield from value.axes
