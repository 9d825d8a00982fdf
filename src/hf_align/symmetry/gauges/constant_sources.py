"""Where constants come from: biases, tables that are added, and what readers without bias keep of a norm's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator

from torch import Tensor, fx

from hf_align.symmetry.gauges.index_provenance import entries_of, numbered
from hf_align.symmetry.gauges.moves import Constant, Stored
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.patterns import is_expanded_as, is_sum, used_only_by
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.ops import Trait, does

_NORMS = Trait.CENTRES | Trait.ALONG_CHANNELS | Trait.STORED_STATISTICS
Starts = dict[fx.Node, Tensor]
"""Where a constant stands first, with the number of its entry for each entry of the value."""


def sources(
    found: Interpretation, kept: Collection[Constant], gone: Collection[str]
) -> Iterator[tuple[Constant, Starts]]:
    """Every constant whose uses all add it to some value, in the order of the graph."""
    program, order = found.program, found.program.order
    names = program.parameters
    uses = found.linear_uses | found.grouped_uses
    attached = {r.bias for r in uses.values()}
    starts: dict[Constant, Starts] = defaultdict(dict)
    first: dict[Constant, int] = {}
    for node in program.graph.nodes:
        reading, operands = uses.get(node), [a for a in node.args if isinstance(a, fx.Node)]
        if reading is not None and reading.bias is not None:
            source, labels = Constant(reading.bias), numbered(reading)
        elif reading is not None and (own := Constant(reading.weight, Stored.READER, reading.in_axis)) in kept:
            source, labels = own, numbered(reading)
        elif does(node, Trait.LOOKS_UP_ROWS) and operands[0] in names:
            source, labels = Constant(names[operands[0]], Stored.TABLE), entries_of(node)
        elif (
            does(node, _NORMS)
            and isinstance(node.meta["val"], Tensor)
            and (bias := Arguments(node).ask("bias", None)) in names
        ):
            source, labels = Constant(names[bias]), entries_of(node, -1 if does(node, Trait.CENTRES) else 1)
        elif (
            node in names
            and names[node] not in attached
            and _has_entries(node)
            and node.users
            and _is_added_or_joined(node)
        ):
            stored = Stored.VECTOR if is_vector(node) else Stored.TABLE
            source, labels = Constant(names[node], stored), entries_of(node)
        else:
            continue
        starts[source][node] = labels
        first.setdefault(source, min(order[u] for u in node.users) if node in names else order[node])
    for source, nodes in sorted(starts.items(), key=lambda item: first[item[0]]):
        apart = all(node in names for node in nodes)
        if source.parameter not in gone and (apart or used_only_by((source.parameter,), nodes, program)):
            yield source, nodes


def _has_entries(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and bool(value.is_floating_point() and value.dim() and value.shape[-1] > 1)


def is_vector(node: fx.Node) -> bool:
    """Whether a value has several entries, along its last axis alone."""
    return _has_entries(node) and bool(node.meta["val"].numel() == node.meta["val"].shape[-1])


def is_added(vector: fx.Node) -> bool:
    """Whether all that is done with a weight, however it is laid out first, is to add it."""
    return _only(is_sum, vector)


def _is_added_or_joined(vector: fx.Node) -> bool:
    """As `is_added`; or it is laid beside other values."""
    return _only(lambda user: is_sum(user) or does(user, Trait.JOINS), vector)


def _only(end: Callable[[fx.Node], bool], vector: fx.Node) -> bool:
    """Whether all uses of a value, however it is laid out first, are of one kind."""
    return all(end(user) or (_is_laid_out(user, vector) and _only(end, user)) for user in vector.users)


def _is_laid_out(user: fx.Node, vector: fx.Node) -> bool:
    return does(user, Trait.MOVES) or is_expanded_as(user, vector)
