"""Gains: a weight that multiplies a value along its last axis, as it is, plus a number, or read through a link."""

from __future__ import annotations

from torch import Tensor, fx

from hf_align.symmetry.interpreter.call import Call
from hf_align.symmetry.interpreter.spaces import fresh
from hf_align.symmetry.interpreter.values import Gain, Value
from hf_align.symmetry.rules.links import Link, link_of
from hf_align.tracing.ops import Trait, does


def is_vector_along_last(weight: Value, value: Value) -> bool:
    """Whether a weight has entries along one axis only, the last of a value."""
    sizes = [a.size for a in weight.axes]
    return bool(sizes) and max(sizes) > 1 and sizes[-1] == max(sizes) == value.axes[-1].size and sum(
        s > 1 for s in sizes) == 1 and len(sizes) <= len(value.axes)  # fmt: skip


def offset_gain(call: Call, left: fx.Node, right: fx.Node) -> Value | None:
    """y = diag(1 + w) x."""
    for one, other in ((left, right), (right, left)):
        weight = call.raw(one)
        if isinstance(weight, Value) and weight.offset and weight.parameter and "mul" in str(call.node.target):
            value = call.value(other)
            if is_vector_along_last(weight, value):
                return gain(call, weight, value)
    return None


def gain(call: Call, weight: Value, value: Value) -> Value:
    """y = diag(w) x."""
    assert weight.parameter is not None
    target = fresh(value.axes[-1].size)
    call.found.gains.append(Gain(weight.parameter, weight.axes[-1], value.axes[-1], target, call.node, weight.offset))
    return Value((*value.axes[:-1], target))


def linked_gain(call: Call, left: fx.Node, right: fx.Node) -> Value | None:
    """y = diag(c f(w)) x for a number c, where f reads positive numbers of a weight."""
    for one, other in ((left, right), (right, left)):
        link = _read_through(one, call) if does(call.node, Trait.MULTIPLIES) and one is not other else None
        if link is None:
            continue
        factor, value = call.value(one), call.value(other)
        if value.parameter is None and is_vector_along_last(factor, value):
            target = fresh(value.axes[-1].size)
            name = call.found.program.parameters[link.all_input_nodes[0]]
            call.found.linked_gains.append(Gain(name, factor.axes[-1], value.axes[-1], target, call.node, through=link))
            return Value((*value.axes[:-1], target))
    return None


def link_of_gain(gain: Gain) -> Link:
    """The link by which a gain is read of its parameter."""
    return (link_of(gain.through) if gain.through is not None else None) or Link.SAME


def _read_through(node: fx.Node, call: Call) -> fx.Node | None:
    """The link through which a value shows a weight, times a number, with no other use of anything on the way."""
    while len(node.users) == 1 and link_of(node) is None:
        operands = [a for a in node.all_input_nodes if a not in call.found.program.constants]
        beside = [call.constant(a) for a in node.args if a not in operands]
        numbers = all(isinstance(n, (int, float)) or (isinstance(n, Tensor) and n.numel() == 1) for n in beside)
        scaled = does(node, Trait.MULTIPLIES | Trait.DIVIDES) and numbers and node.args[0] in operands
        if len(operands) != 1 or (scaled and node.kwargs) or not (scaled or does(node, Trait.MOVES)):
            return None
        node = operands[0]
    link = link_of(node)
    if len(node.users) > 1 or link is None or not link.is_positive:
        return None
    return node if node.all_input_nodes[0] in call.found.program.parameters else None
