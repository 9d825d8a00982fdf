"""The abstract interpreter: reads operands, looks up the rule of the op, writes the result.

A value is the tuple of its axes. Rules say what their op demands of them: unify, lower, split; everything that may
differ between architectures is in the rules (`rules/`), and nothing here or there knows a class or a module by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import SymFloat, Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hf_align.errors import IncompatibleModels
from hf_align.symmetry.interpreter.bounds import FIXED, PERMUTATION, Bound
from hf_align.symmetry.interpreter.call import RULES, Call
from hf_align.symmetry.interpreter.linear_regions import LinearRegion, find_rotations
from hf_align.symmetry.interpreter.spaces import Axis, SpaceMismatchError, fresh, lower
from hf_align.symmetry.interpreter.values import Interpretation, Product, Rows, Value, members
from hf_align.tracing.ops import Trait, does, op_name
from hf_align.tracing.program import Evidence, Program, evidence
from hf_align.tracing.reasons import NEEDS_NUMBERS


def interpret(program: Program) -> Interpretation:
    """Run the rules over the graph.

    Ops without a rule pin every axis they touch and are named in `unknown_ops`.
    """
    found = Interpretation(program)
    for name, shape in program.shapes.items():
        found.weights[name] = Value(tuple(fresh(n) for n in shape), name)
    read = set(program.parameters.values())
    for name in found.weights.keys() - read:
        for axis in found.weights[name].axes:
            lower(axis, FIXED, Evidence("unread", "no traced call reads it", name.rpartition(".")[0], ""))
    found.values.update({node: found.weights[name] for node, name in program.parameters.items()})
    for node in program.inputs:
        found.values[node] = Value(tuple(fresh(n, FIXED) for n in node.meta["val"].shape))
    regions = found.regions = find_rotations(program)
    replaced = _replaced(regions)
    for node in program.graph.nodes:
        if node.op == "call_function" and node not in program.constants and node not in replaced:
            if isinstance(node.meta.get("val"), SymFloat):  # taken out of a tensor
                raise IncompatibleModels(f"{evidence(node, '').line or op_name(node)} {NEEDS_NUMBERS}")
            try:
                found.values[node] = _rotate(regions[node], found) if node in regions else _step(node, found)
            except GuardOnDataDependentSymNode as error:
                raise IncompatibleModels(f"{evidence(node, '').line or op_name(node)} {NEEDS_NUMBERS}") from error
    _pin_outputs(found)
    return found


def _replaced(regions: Mapping[fx.Node, LinearRegion]) -> set[fx.Node]:
    """The nodes that regions replace, but for those that are read outside of them, too, and what these are made of."""
    within = set[fx.Node]().union(*(r.inner for r in regions.values()))
    known = within | regions.keys()
    waiting = [n for n in within if not known.issuperset(n.users)] + [r.base for r in regions.values()]
    while waiting:
        node = waiting.pop()
        if node in within:
            within.remove(node)
            waiting += node.all_input_nodes
    return within


def _step(node: fx.Node, found: Interpretation) -> Any:
    result = node.meta.get("val")
    if isinstance(result, Tensor) and not result.numel():  # what has no entries shows nothing of what it is made of
        return Value(tuple(fresh(n) for n in result.shape))
    call = Call(node, found)
    apply = RULES.get(op_name(node))
    if not does(node, Trait.PASSES_NUMBERS):
        _pin_what_numbers_point_to(call)
    resolved = _is_resolved(call)
    if apply is None:
        return _unknown(call, op_name(node), resolved)
    before = len(found.gains), len(found.statistics)
    try:
        result = apply(call)
        unseen = call.unseen()
        if not unseen:
            _pin_what_numbers_no_longer_point_to(call, result)
            return result
    except SpaceMismatchError as mismatch:
        found.withdraw(node, *before)
        return _pin(call, str(mismatch))
    except (IndexError, ZeroDivisionError):
        if all(n.meta["val"].shape for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)):
            raise
        unseen = ["an axis of a single number"]  # which has none, and torch takes one all the same
    found.withdraw(node, *before)
    return _unknown(call, f"{op_name(node)} with {' and '.join(unseen)}", resolved)


def _unknown(call: Call, name: str, resolved: bool) -> Any:
    """Pin what an op touches, and say so unless all of it was pinned before."""
    if not resolved:
        call.found.unknown_ops.setdefault(name, evidence(call.node, "").line)
    return _pin(call, "unknown op")


def _pin_what_numbers_point_to(call: Call) -> None:
    for operand in call.node.all_input_nodes:
        found = call.found.values.get(operand)
        if isinstance(found, Value) and found.points_to is not None:
            call.lower(found.points_to, FIXED, "number read")


def _pin_what_numbers_no_longer_point_to(call: Call, result: Any) -> None:
    """Numbers that an op passes go on to count what they counted, or have looked it up; else no more is known of it."""
    operands = [call.found.values.get(operand) for operand in call.node.all_input_nodes]
    counted = [v.points_to for v in operands if isinstance(v, Value) and v.points_to is not None]
    if not counted:
        return
    results = [v for v in members(result) if isinstance(v, Value)]
    others = [v for found in operands for v in members(found) if isinstance(v, Value)]
    shown = (*(x for v in (*results, *others) for x in v.axes), *(v.points_to for v in results if v.points_to))
    seen = {way for x in shown for atom in x.atoms for way in (atom.root, atom.root.dual)}
    for axis in counted:
        if not {atom.root for atom in axis.atoms} <= seen:
            call.lower(axis, FIXED, "number read")


def _is_resolved(call: Call) -> bool:
    """Whether everything that an op reads is pinned already, so that no rule could say more."""
    for operand in call.node.all_input_nodes:
        found = call.found.values.get(operand)
        for part in members(found):
            if isinstance(part, Product) or (isinstance(part, Value) and part.points_to is not None):
                return False
            if isinstance(part, Value) and any(a.root.size > 1 and not a.root.space.bound.fixed
                                               for x in part.axes for a in x.atoms):  # fmt: skip
                return False
    return True


def _pin(call: Call, role: str) -> Any:
    _pin_what_numbers_point_to(call)
    for operand in call.node.all_input_nodes:
        found = call.found.values.get(operand)
        for part in members(found):
            if isinstance(part, (Value, Product)):
                axes = call.resolve(part).axes if isinstance(part, Product) else part.axes
                call.lower_all(axes, FIXED, role)
    results = call.node.meta["val"]
    if isinstance(results, Tensor):
        return Value(tuple(fresh(n, FIXED) for n in results.shape))
    if not isinstance(results, (tuple, list)):
        return Value(())
    return tuple(Value(tuple(fresh(n, FIXED) for n in r.shape) if isinstance(r, Tensor) else ()) for r in results)


def _rotate(region: LinearRegion, found: Interpretation) -> Value:
    """y = R(position) x: what is left is the commutant of the rotations."""
    call = Call(region.output, found)
    value = call.value(region.base)
    last = value.axes[-1].root
    call.mixes(value, [-1])
    call.lower(last, FIXED if last.order else Bound(rotations=region.rotations), "rotary")
    call.lower_all(value.axes[:-2], PERMUTATION, "batch")
    call.lower_all((value.axes[i] for i in region.uneven), FIXED, "rotary")
    call.lower_all((a for c in region.coefficients for a in call.value(c).axes), FIXED, "rotary")
    if not region.order:
        return Value(value.axes)
    return Value((*value.axes[:-1], Axis(last.space, last.is_dual, region.order)))


def _pin_outputs(found: Interpretation) -> None:
    """What the model returns is its interface, and so is what the numbers in it count."""
    for node in found.program.interface:
        value = found.values.get(node)
        if isinstance(value, Value) and value.points_to is not None:
            lower(value.points_to, FIXED, evidence(node, "output"))
        if isinstance(value, (Value, Product, Rows)):
            call = Call(node, found)
            for axis in call.value(node).axes:
                lower(axis, FIXED, evidence(node, "output"))
