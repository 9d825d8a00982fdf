"""Norms whose gain stays, because what they write re-enters the stream: γ ⊙ n + β with n of mean zero.

Their bias is a constant like any other: it may go into the biases of what reads it, and of what is added to it. And
hᵀ(γ ⊙ n + β) = hᵀβ for h = 1/γ, whatever n is, so that a reader W may become W + u hᵀ against -(hᵀβ) u in its bias.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import FreeReader, Gauge, LevelTable, MoveNormBias, Read
from hf_align.symmetry.interpreter import Interpretation, Reading
from hf_align.symmetry.passing import PASSES, is_centred, keeps_last, summands, used_only_by
from hf_align.tracing.trace import Program, op_name


@dataclass(frozen=True)
class _Norm:
    """γ ⊙ n + β as it is written somewhere, by the names of γ and β; `offset` is what is added to the stored gain."""

    gain: str
    bias: str | None
    offset: float


def kept_norms(found: Interpretation, gone: Collection[str]) -> Iterator[Gauge]:
    """The gauges of norms whose gain has not gone into all of its readers: first their biases, then the readers."""
    norms = dict(_norms(found, gone))
    uses = {node: list(_uses(node, found)) for node in norms}
    together: dict[str, list[fx.Node]] = defaultdict(list)
    for node, norm in norms.items():
        if norm.bias is not None:
            together[norm.bias].append(node)
    for bias, nodes in together.items():
        moved = _moved(bias, [use for node in nodes for use in uses[node]], nodes, found)
        if moved is not None:
            yield moved
    yield from _free_readers(norms, uses, found)


def _norms(found: Interpretation, gone: Collection[str]) -> Iterator[tuple[fx.Node, _Norm]]:
    """Where a value γ ⊙ n + β stands."""
    names = found.program.parameters
    for gain in found.gains:
        node = gain.node
        if gain.parameter in gone:
            continue
        if op_name(node) == "layer_norm" and len(node.args[1]) == 1:  # type: ignore[arg-type]
            bias = node.args[3] if len(node.args) > 3 else None
            if bias is None or bias in names:
                yield node, _Norm(gain.parameter, names.get(bias), gain.offset)  # type: ignore[arg-type]
        elif op_name(node) == "mul" and any(is_centred(a) for a in node.all_input_nodes):
            (user, *others) = node.users
            added = [a for a in user.all_input_nodes if a is not node]
            if not others and op_name(user) == "add" and len(added) == 1 and names.get(added[0]) is not None:
                yield user, _Norm(gain.parameter, names[added[0]], gain.offset)
            else:
                yield node, _Norm(gain.parameter, None, gain.offset)


@dataclass(frozen=True)
class _Use:
    """What becomes of a value in the end; `value` is what it is called there."""

    user: fx.Node
    value: fx.Node
    reading: Reading | None


def _uses(node: fx.Node, found: Interpretation) -> Iterator[_Use]:
    """The uses of a value behind ops that only pass its last axis on."""
    for user in node.users:
        reading = found.readings.get(user)
        if reading is not None and reading.input is node and len(found.weights[reading.weight].axes) == 2:
            yield _Use(user, node, reading)
        elif _passes(user, node, found.program):
            yield from _uses(user, found)
        else:
            yield _Use(user, node, None)


def _passes(user: fx.Node, node: fx.Node, program: Program) -> bool:
    """Whether every vector along the last axis of the result is one of the value, or a mean of such."""
    if op_name(user) == "mul":  # by a mask that hides nothing
        masks = [program.constants.get(a) for a in user.all_input_nodes if a is not node]
        ones = len(masks) == 1 and isinstance(masks[0], Tensor) and bool((masks[0] == 1).all())
        return ones and user.meta["val"].shape == node.meta["val"].shape
    passes = op_name(user) in PASSES or op_name(user) == "mean"
    return passes and user.all_input_nodes[0] is node and keeps_last(user)


def _moved(bias: str, uses: Iterable[_Use], nodes: Collection[fx.Node], found: Interpretation) -> MoveNormBias | None:
    """Where β goes, if every use is a reader with a bias, or a sum with what such a one writes."""
    reads: dict[Read, set[fx.Node]] = defaultdict(set)
    added: dict[str, set[fx.Node]] = defaultdict(set)
    for use in uses:
        if use.reading is not None and use.reading.bias is not None:
            reads[Read(use.reading.weight, use.reading.in_axis, use.reading.bias)].add(use.user)
        elif (writer := _beside(use, found)) is not None and writer.bias is not None:
            added[writer.bias].add(writer.node)
        else:
            return None
    taken: dict[str, set[fx.Node]] = defaultdict(set)
    for name, readers in (*((r.bias, n) for r, n in reads.items()), *added.items()):
        assert name is not None
        if taken[name]:
            return None
        taken[name] |= readers
    if not used_only_by((bias,), nodes, found.program):
        return None
    if not all(used_only_by((name,), readers, found.program) for name, readers in taken.items()):
        return None
    return MoveNormBias(bias, tuple(reads), tuple(added))


def _beside(use: _Use, found: Interpretation) -> Reading | None:
    """The linear map whose result alone is added to a value."""
    if op_name(use.user) != "add" or use.user.kwargs or len(use.user.args) != 2:
        return None
    (other,) = [a for a in use.user.args if a is not use.value] or [None]
    while isinstance(other, fx.Node) and len(other.users) == 1:
        if (reading := found.readings.get(other)) is not None:
            return reading
        if not (op_name(other) in PASSES and len(other.all_input_nodes) == 1 and keeps_last(other)):
            return None
        other = other.all_input_nodes[0]
    return None


def _free_readers(
    norms: Mapping[fx.Node, _Norm], uses: Mapping[fx.Node, list[_Use]], found: Interpretation
) -> Iterator[FreeReader | LevelTable]:
    """The weights that read nothing but what one norm writes, always with the same bias."""
    readers: dict[str, dict[tuple[_Norm, int, str | None], set[fx.Node]]] = defaultdict(lambda: defaultdict(set))
    for node, norm in norms.items():
        for reading in (use.reading for use in uses[node]):
            if reading is not None:
                readers[reading.weight][norm, reading.in_axis, reading.bias].add(reading.node)
    for weight, ways in readers.items():
        ((norm, axis, bias), nodes), *others = ways.items()
        seen = bias if norm.bias is not None else None
        if others or (norm.bias is not None and not used_only_by((bias,), nodes, found.program)):
            continue
        if norm.bias is not None and seen is None:
            continue
        if used_only_by((weight,), nodes, found.program):
            yield FreeReader(weight, axis, seen, norm.gain, norm.bias, norm.offset)
        elif axis == 1 and (other := _added_table(weight, nodes, found.program)) is not None:
            yield LevelTable(weight, other, seen, norm.gain, norm.bias, norm.offset)


def _added_table(table: str, readers: Collection[fx.Node], program: Program) -> str | None:
    """A table of which a row is added wherever one of this table is, if this one is only looked up or read."""
    lookups: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        name = program.parameters.get(node.args[0]) if op_name(node) == "embedding" else None
        if name is not None:
            lookups[name].append(node)
    if not lookups[table] or not used_only_by((table,), {*readers, *lookups[table]}, program):
        return None
    sums = [set(summands(lookup)) for lookup in lookups[table]]
    for other, nodes in lookups.items():
        met = [node for node in nodes for summands in sums if node in summands]
        each_once = all(sum(node in summands for node in nodes) == 1 for summands in sums)
        if other != table and each_once and met == nodes and used_only_by((other,), nodes, program):
            return other
    return None
